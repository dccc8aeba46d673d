# SPDX-License-Identifier: Apache-2.0
"""Filesystem tier: a directory that several nodes write."""
