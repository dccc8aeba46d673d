# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of KVHaven, each compared with a limit of the same machine in the same run."""
