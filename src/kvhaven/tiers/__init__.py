# SPDX-License-Identifier: Apache-2.0
"""Storage tiers below the arena; `base` defines their contract."""
