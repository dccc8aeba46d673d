# SPDX-License-Identifier: Apache-2.0
"""Example of a package that extends KVHaven with a SQLite tier and an eviction policy."""
