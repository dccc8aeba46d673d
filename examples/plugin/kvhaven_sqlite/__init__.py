# SPDX-License-Identifier: Apache-2.0
"""An example of a package that extends KVHaven: a tier in SQLite, an eviction policy."""
