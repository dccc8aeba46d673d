# SPDX-License-Identifier: Apache-2.0
"""The node service: the process that owns the catalog, the arena and the tiers."""
