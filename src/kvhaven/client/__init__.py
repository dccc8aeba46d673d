# SPDX-License-Identifier: Apache-2.0
"""Clients of the node service, for engines and for administration."""
