# SPDX-License-Identifier: Apache-2.0
"""How engines and people talk to the node service."""
