# SPDX-License-Identifier: Apache-2.0
"""Digests of values in vLLM's memory: preprocessed media, loaded adapters."""

from kvhaven.identity.digests import content_digest as _content_digest


def content_digest(value: object) -> bytes:
    """Return the SHA-256 of a value's content; vLLM's objects are hashed by their attributes.

    Raises `KeyInputError` as `identity.digests.content_digest` does.
    """
    return _content_digest(value, objects_of="vllm.")
