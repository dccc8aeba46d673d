# SPDX-License-Identifier: Apache-2.0
"""KVHaven for Hugging Face transformers: reuse of prompts' KV across calls, processes and nodes.

from kvhaven.integrations.transformers import KVHaven

with KVHaven(model, local_disk="/var/cache/kv") as haven:
output = haven.generate(input_ids, max_new_tokens=100)
"""

from kvhaven.integrations.transformers.generation import KVHaven

__all__ = ["KVHaven"]
