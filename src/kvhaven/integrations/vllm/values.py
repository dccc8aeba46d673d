# SPDX-License-Identifier: Apache-2.0
"""Digests of values that vLLM holds in memory: media after preprocessing, adapters once loaded."""

from kvhaven.identity.digests import content_digest as _content_digest


def content_digest(value: object) -> bytes:
    """Return the SHA-256 of a value by its content; vLLM's own objects count by their attributes.

    Raises `KeyInputError` as `identity.digests.content_digest` does.
    """
    return _content_digest(value, objects_of="vllm.")
