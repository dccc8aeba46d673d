# SPDX-License-Identifier: Apache-2.0
"""KVHaven: a KV-cache layer for vLLM on every accelerator."""

__version__ = "0.1.0"
