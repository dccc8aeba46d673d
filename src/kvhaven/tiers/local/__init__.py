# SPDX-License-Identifier: Apache-2.0
"""Local disk tier: a directory that belongs to one service."""
