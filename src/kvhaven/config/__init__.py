# SPDX-License-Identifier: Apache-2.0
"""Settings: their definitions, sources, values and checks."""

from kvhaven.config.load import (
    Resolved,
    SettingRow,
    check_value,
    load_settings,
    setting_infos,
    setting_row,
)
from kvhaven.config.settings import Settings

__all__ = [
    "Resolved",
    "SettingRow",
    "Settings",
    "check_value",
    "load_settings",
    "setting_infos",
    "setting_row",
]
