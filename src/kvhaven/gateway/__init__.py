# SPDX-License-Identifier: Apache-2.0
"""HTTP API of a node service, in a process of its own."""
