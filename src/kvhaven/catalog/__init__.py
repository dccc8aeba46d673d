# SPDX-License-Identifier: Apache-2.0
"""The catalog: which chunks exist, where they are, and their pins; a state machine without I/O."""

from kvhaven.catalog.catalog import Catalog
from kvhaven.catalog.tier_spec import StoreOn, TierSpec, WriteMode

__all__ = ["Catalog", "StoreOn", "TierSpec", "WriteMode"]
