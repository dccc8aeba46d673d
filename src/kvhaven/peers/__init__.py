# SPDX-License-Identifier: Apache-2.0
"""Peer plane: services of several nodes read chunks from each other's memory over TCP."""
