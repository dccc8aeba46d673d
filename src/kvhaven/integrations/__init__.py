# SPDX-License-Identifier: Apache-2.0
"""Integrations of KVHaven with inference engines."""
