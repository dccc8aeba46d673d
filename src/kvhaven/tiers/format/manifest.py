# SPDX-License-Identifier: Apache-2.0
"""Manifest `namespace.json`: the record of a namespace in a tier's folder."""

from typing import Final

import msgspec
import xxhash

from kvhaven.errors import TierMissError
from kvhaven.tiers.base import Namespace
from kvhaven.types import NamespaceDigest, ShardTable

MANIFEST_NAME: Final = "namespace.json"
MANIFEST_VERSION: Final = 1
MOST_BYTES: Final = 1 << 24
"""Largest manifest in bytes; a longer one is invalid and is not read in full."""
DIGEST_BYTES: Final = 32


class _Manifest(msgspec.Struct, frozen=True):
    """JSON content; `checksum` is the xxh3-128, in hex, of the JSON with an empty `checksum`."""

    version: int
    digest: str
    fields: dict[str, str]
    table: ShardTable
    checksum: str = ""


def folder_name(namespace: Namespace) -> str:
    """Return the name of a namespace's folder: the first 16 hex digits of its digest."""
    return namespace.digest.hex()[:16]


def pack_manifest(namespace: Namespace) -> bytes:
    """Return the content of a namespace's manifest."""
    bare = _Manifest(
        MANIFEST_VERSION, namespace.digest.hex(), dict(namespace.fields), namespace.table
    )
    return msgspec.json.format(msgspec.json.encode(_seal(bare)))


def unpack_manifest(raw: bytes, folder: str) -> Namespace:
    """Return the namespace described by `raw`, the content of the manifest in `folder`.

    Raises `TierMissError` if it is damaged, has another version, or belongs to another folder.
    """
    try:
        manifest = msgspec.json.decode(raw, type=_Manifest)
        digest = bytes.fromhex(manifest.digest)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise TierMissError(f"{folder}/{MANIFEST_NAME} is not a valid manifest: {error}") from error
    if manifest.version != MANIFEST_VERSION:
        raise TierMissError(
            f"{folder}/{MANIFEST_NAME} has version {manifest.version}; "
            f"this reader supports version {MANIFEST_VERSION}"
        )
    if manifest != _seal(manifest):
        raise TierMissError(f"{folder}/{MANIFEST_NAME} does not match its own checksum")
    namespace = Namespace(NamespaceDigest(digest), manifest.fields, manifest.table)
    if len(digest) != DIGEST_BYTES or folder_name(namespace) != folder:
        raise TierMissError(f"{folder}/{MANIFEST_NAME} belongs to namespace {manifest.digest}")
    return namespace


def _seal(manifest: _Manifest) -> _Manifest:
    bare = msgspec.json.encode(msgspec.structs.replace(manifest, checksum=""))
    return msgspec.structs.replace(manifest, checksum=xxhash.xxh3_128_hexdigest(bare))
