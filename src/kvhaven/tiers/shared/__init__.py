# SPDX-License-Identifier: Apache-2.0
"""Shared tiers: the common part of all stores that several services use."""
