# SPDX-License-Identifier: Apache-2.0
"""Shared tiers: what stores that several services use have in common."""
