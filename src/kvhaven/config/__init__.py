# SPDX-License-Identifier: Apache-2.0
"""Settings: their definitions, sources, values and checks."""

from kvhaven.config.load import (
    NEXT_REQUEST,
    NOW,
    Resolved,
    SettingRow,
    check_value,
    cross_check,
    load_settings,
    setting_infos,
    setting_row,
)
from kvhaven.config.settings import Settings

__all__ = [
    "NEXT_REQUEST",
    "NOW",
    "Resolved",
    "SettingRow",
    "Settings",
    "check_value",
    "cross_check",
    "load_settings",
    "setting_infos",
    "setting_row",
]
