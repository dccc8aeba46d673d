# SPDX-License-Identifier: Apache-2.0
"""Devices: copying blocks between device memory and the arena, behind one contract."""
