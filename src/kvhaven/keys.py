# SPDX-License-Identifier: Apache-2.0
r"""Names of chunks: the namespace digest and the key chain, specified for other implementations.

Every name is SHA-256 over exactly specified bytes. `u32` is a little-endian unsigned 32-bit number,
`i64` a little-endian signed 64-bit number. Text is UTF-8; lone surrogates are encoded as three
bytes each, so that no text is refused.

- Namespace: `SHA-256("kvhaven namespace 1\n" || u32 number of fields || fields)`, with the fields
  sorted by the bytes of their names, each as `u32 length || name || u32 length || value`.
- Chain: `key[i] = SHA-256(key[i-1] || tokens of chunk i, each u32 || extras of chunk i)`. `key[-1]`
  is the root: the namespace's digest, or after a reset `SHA-256("kvhaven epoch 1\n" || namespace's
  digest || epoch)`.
- Extras: records of `kind (one byte) || u32 length || content`, in this order and only where they
  exist. Kind 1 is the LoRA adapter's fingerprint and kind 2 the cache salt, both only in chunk 0
  (the chain carries them to later chunks). Kind 3 is a media item, in every chunk that its range
  touches, with the content `i64 offset || u32 length || content hash`. The offset is that of the
  item's first token relative to the chunk's first token; it is negative if the item began in an
  earlier chunk. Items are ordered by offset, length, content hash.
- Tail, the tokens behind the last full chunk: `SHA-256("kvhaven tail 1\n" || key of that chunk ||
  u32 number of tokens || tokens, each u32 || extras)`. Without a full chunk it follows the root,
  and its extras are those of chunk 0.
- Tenant: the first 8 bytes of `SHA-256("kvhaven tenant 1\n" || cache salt)`, empty without a salt.
  It replaces the salt wherever users or files see it: usage, quotas, names of stores.
- Announced digest of a chunk: xxh3-64 of `namespace's digest || key || tenant`, an unsigned number.

`tests/unit/key_vectors.json` holds test vectors.
"""

import array
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import msgspec
import xxhash

from kvhaven.errors import KVHavenError
from kvhaven.types import (
    KEY_BYTES,
    NO_TENANT,
    TENANT_BYTES,
    ChunkKey,
    NamespaceDigest,
    TenantId,
)

UINT32_MAX = 2**32 - 1
_NAMESPACE_TAG = b"kvhaven namespace 1\n"
_EPOCH_TAG = b"kvhaven epoch 1\n"
_TENANT_TAG = b"kvhaven tenant 1\n"
_TAIL_TAG = b"kvhaven tail 1\n"
_LORA, _SALT, _MEDIA = 1, 2, 3
_RULES = "rules"
"""Field with the version of the rules by which the other fields were made."""
_OF_CONTENT = ("weights", "draft.weights", "code.", "tokenizer", "scales", "files.")
_SHOWN_FIELDS = 6
_SHOWN_CHARACTERS = 40


class KeyInputError(KVHavenError):
    """Error for tokens or extras that cannot be part of a key: the request is not cached."""


class MediaItem(msgspec.Struct, frozen=True):
    """Multimodal item in the prompt, which takes `length` tokens from token `offset` on."""

    content_hash: str
    offset: int
    length: int


class Extras(msgspec.Struct, frozen=True):
    """Inputs that determine a request's KV besides its tokens.

    `lora` is the adapter's fingerprint (never its name), `salt` the tenant's cache salt.
    """

    lora: str = ""
    salt: str = ""
    items: tuple[MediaItem, ...] = ()


def namespace_digest(fields: Mapping[str, str]) -> NamespaceDigest:
    """Return the digest of a namespace; the order of `fields` does not matter."""
    parts = [_NAMESPACE_TAG, struct.pack("<I", len(fields))]
    encoded = sorted((_text(name), _text(value)) for name, value in fields.items())
    for name, value in encoded:
        parts += (struct.pack("<I", len(name)), name, struct.pack("<I", len(value)), value)
    return NamespaceDigest(sha256(b"".join(parts)).digest())


def differing_fields(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the sorted names of the fields in which two namespaces differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def of_content(field: str) -> bool:
    """Return whether a namespace field is derived from the content of files, not from settings."""
    return field.startswith(_OF_CONTENT)


def difference(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Describe the difference of two namespaces for messages: some fields, with both values."""
    names = differing_fields(one, other)
    if _RULES in names:  # with other rules most fields differ, which explains nothing
        names = [_RULES]
    shown = [
        f"{name} ({_shortened(one.get(name))}, {_shortened(other.get(name))})"
        for name in names[:_SHOWN_FIELDS]
    ]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def epoch_root(namespace: NamespaceDigest, epoch: bytes) -> bytes:
    """Return the 32-byte root for an engine that reset its cache; `epoch` is any unique value."""
    return sha256(_EPOCH_TAG + namespace + epoch).digest()


def tenant_id(salt: str) -> TenantId:
    """Return the tenant with this cache salt; `NO_TENANT` for an empty salt."""
    if not salt:
        return NO_TENANT
    return TenantId(sha256(_TENANT_TAG + _text(salt)).digest()[:TENANT_BYTES])


def announced_digest(namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId) -> int:
    """Return the number by which nodes announce a tenant's chunk: xxh3-64 of all three.

    It reveals nothing of the key, with which the chunk could be read.
    """
    return xxhash.xxh3_64_intdigest(namespace + key + tenant)


class KeyChain:
    """Keys of one request's full chunks, extended as the request grows.

    `root` starts the chain: 32 bytes, a namespace's digest or an `epoch_root`. Raises
    `KeyInputError` for a root of another length, a `chunk_size` below 1, or media items with an
    offset or length outside of 32 bits.

    Not thread-safe.
    """

    def __init__(
        self, root: NamespaceDigest | bytes, chunk_size: int, extras: Extras | None = None
    ) -> None:
        if len(root) != KEY_BYTES:
            raise KeyInputError(f"root: wrong length (expected {KEY_BYTES} bytes, got {len(root)})")
        if chunk_size < 1:
            raise KeyInputError(f"chunk_size: out of range (got {chunk_size}); expected at least 1")
        self.root = bytes(root)
        self.chunk_size = chunk_size
        self.keys: list[ChunkKey] = []
        """Keys of the full chunks so far, starting with the first chunk."""
        extras = extras or Extras()
        self.tenant = tenant_id(extras.salt)
        """Tenant to which these chunks belong."""
        self._first_records = _record(_LORA, _text(extras.lora)) if extras.lora else b""
        if extras.salt:
            self._first_records += _record(_SALT, _text(extras.salt))
        self._items = sorted(_checked(extras.items), key=_order)

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the full chunks of `tokens` that are not hashed yet.

        `tokens` are all tokens of the request so far; tokens of chunks that already have a key are
        not read again. Raises `KeyInputError` if a token is not an unsigned 32-bit integer, or if
        there are fewer tokens than were hashed (see `truncate`); the keys are unchanged in both
        cases.
        """
        size, first, end = self.chunk_size, len(self.keys), len(tokens) // self.chunk_size
        if end == first:
            return
        if end < first:
            raise KeyInputError(
                f"tokens: too few (got {len(tokens)}); {first * size} are already hashed. "
                "Call truncate first."
            )
        packed = _packed(tokens, first * size, end * size)
        records = self._records(first, end, end * size)
        previous = self.keys[-1] if self.keys else self.root
        step = 4 * size
        for index, start in enumerate(range(0, len(packed), step), first):
            content = previous + packed[start : start + step]
            if records:
                content += records.get(index, b"")
            previous = ChunkKey(sha256(content).digest())
            self.keys.append(previous)

    def tail_key(self, tokens: Sequence[int], end: int) -> ChunkKey | None:
        """Return the key of the tail of the first `end` tokens; None if they end with a full chunk.

        Nothing has a tail as its parent. Raises `KeyInputError` as `extend` does, or if not all
        full chunks of these tokens are hashed.
        """
        size, full = self.chunk_size, end // self.chunk_size
        count = end - full * size
        if not count:
            return None
        if len(tokens) < end or len(self.keys) < full:
            raise KeyInputError(
                f"tail of {end} tokens: {len(tokens)} tokens and {len(self.keys)} full chunks are "
                "known; expected all of them. Call extend first."
            )
        parent = self.keys[full - 1] if full else self.root
        packed = _packed(tokens, full * size, end)
        extras = self._records(full, full + 1, end).get(full, b"")
        content = _TAIL_TAG + parent + struct.pack("<I", count) + packed + extras
        return ChunkKey(sha256(content).digest())

    def truncate(self, tokens: int) -> None:
        """Drop the keys of chunks that end after the first `tokens` tokens."""
        del self.keys[max(tokens, 0) // self.chunk_size :]

    def add_items(self, items: Iterable[MediaItem]) -> None:
        """Add media items (of a streaming session); drop the keys of chunks that they touch.

        Raises `KeyInputError` as the constructor does.
        """
        added = _checked(items)
        self._items = sorted(self._items + added, key=_order)
        for item in added:
            self.truncate(item.offset)

    def _records(self, first: int, end: int, tokens: int) -> dict[int, bytes]:
        """Return the extras of chunks `first` to `end` by index, for the first `tokens` tokens."""
        records: dict[int, bytes] = {}
        if first == 0 and self._first_records:
            records[0] = self._first_records
        for item in self._items:
            if item.offset >= tokens:
                break  # items are in order
            content = _text(item.content_hash)
            touched = range(
                max(first, item.offset // self.chunk_size),
                min(end, (item.offset + item.length - 1) // self.chunk_size + 1),
            )
            for index in touched:
                offset = item.offset - index * self.chunk_size
                record = _record(_MEDIA, struct.pack("<qI", offset, item.length) + content)
                records[index] = records.get(index, b"") + record
        return records


def _shortened(value: str | None) -> str:
    if value is None:
        return "none"
    return value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}..."


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _record(kind: int, content: bytes) -> bytes:
    return struct.pack("<BI", kind, len(content)) + content


def _checked(items: Iterable[MediaItem]) -> list[MediaItem]:
    checked = list(items)
    for item in checked:
        if not (0 <= item.offset <= UINT32_MAX and 1 <= item.length <= UINT32_MAX):
            raise KeyInputError(
                f"media item {item.content_hash!r}: out of range (got {item.length} tokens from "
                f"token {item.offset}); expected unsigned 32-bit numbers and a length of at least 1"
            )
    return checked


def _order(item: MediaItem) -> tuple[int, int, bytes]:
    return item.offset, item.length, _text(item.content_hash)


def _packed(tokens: Sequence[int], start: int, end: int) -> memoryview:
    """Return tokens `start` to `end` as little-endian unsigned 32-bit numbers."""
    try:
        # Slicing a long list costs more than half as much as hashing it.
        packed = array.array("I", tokens if start == 0 else tokens[start:end])
    except (OverflowError, TypeError):  # the bad token may lie behind `end`
        packed = _packed_strictly(tokens[start:end], start)
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")[: 4 * (end - start)]


def _packed_strictly(tokens: Sequence[int], position: int) -> "array.array[int]":
    """Return packed tokens; the first is token `position`. Raises `KeyInputError` for a bad one."""
    try:
        return array.array("I", tokens)
    except (OverflowError, TypeError):
        _refuse_first_bad(tokens, position)
        raise


def _refuse_first_bad(tokens: Sequence[object], position: int) -> None:
    for index, token in enumerate(tokens, position):
        if not isinstance(token, int) or not 0 <= token <= UINT32_MAX:
            raise KeyInputError(
                f"token {index} of the request: invalid (got {token!r}); "
                f"expected an integer from 0 to {UINT32_MAX}"
            ) from None
