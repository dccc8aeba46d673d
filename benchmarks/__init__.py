# SPDX-License-Identifier: Apache-2.0
"""Measurements of KVHaven, each against a limit of the same machine in the same run."""
