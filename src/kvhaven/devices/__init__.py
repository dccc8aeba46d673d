# SPDX-License-Identifier: Apache-2.0
"""Devices: copies of blocks between device memory and the arena, behind one contract."""
