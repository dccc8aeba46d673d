# SPDX-License-Identifier: Apache-2.0
"""Keys: against an implementation of their own, and what must and must not share a key."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.keys import (
    Extras,
    KeyChain,
    KeyInputError,
    MediaItem,
    epoch_root,
    namespace_digest,
    tenant_id,
)
from kvhaven.types import NamespaceDigest

VECTORS = Path(__file__).parent / "key_vectors.json"
ROOT = NamespaceDigest(bytes(range(32)))


# What another program would write, by docs/formats.md: nothing of kvhaven.keys is used.


def reference_namespace(fields: dict[str, str]) -> bytes:
    text = b"kvhaven namespace 1\n" + struct.pack("<I", len(fields))
    for name in sorted(fields, key=lambda name: name.encode()):
        for part in (name.encode(), fields[name].encode()):
            text += struct.pack("<I", len(part)) + part
    return hashlib.sha256(text).digest()


def reference_epoch(namespace: bytes, epoch: bytes) -> bytes:
    return hashlib.sha256(b"kvhaven epoch 1\n" + namespace + epoch).digest()


def reference_keys(
    root: bytes, chunk_size: int, tokens: list[int], extras: dict[str, Any]
) -> list[bytes]:
    keys, previous = [], root
    for start in range(0, len(tokens) - chunk_size + 1, chunk_size):
        text = previous + reference_content(tokens, start, start + chunk_size, extras)
        previous = hashlib.sha256(text).digest()
        keys.append(previous)
    return keys


def reference_tail(
    root: bytes, chunk_size: int, tokens: list[int], extras: dict[str, Any]
) -> bytes | None:
    start = len(tokens) // chunk_size * chunk_size
    if start == len(tokens):
        return None
    parent = [root, *reference_keys(root, chunk_size, tokens, extras)][-1]
    text = b"kvhaven tail 1\n" + parent + struct.pack("<I", len(tokens) - start)
    return hashlib.sha256(text + reference_content(tokens, start, len(tokens), extras)).digest()


def reference_content(tokens: list[int], start: int, end: int, extras: dict[str, Any]) -> bytes:
    text = struct.pack(f"<{end - start}I", *tokens[start:end])
    for kind, name in ((1, "lora"), (2, "salt")):
        if start == 0 and extras[name]:
            content = extras[name].encode()
            text += bytes([kind]) + struct.pack("<I", len(content)) + content
    items = sorted(
        (item["offset"], item["length"], item["content_hash"].encode()) for item in extras["items"]
    )
    for offset, length, content_hash in items:
        if offset < end and offset + length > start:
            content = struct.pack("<qI", offset - start, length) + content_hash
            text += b"\x03" + struct.pack("<I", len(content)) + content
    return text


def token_rule(rule: dict[str, int]) -> list[int]:
    """Return `count` tokens; token i is `(first + i * step) mod 2**32`."""
    return [(rule["first"] + i * rule["step"]) % 2**32 for i in range(rule["count"])]


def extras_of(plain: dict[str, Any]) -> Extras:
    items = tuple(MediaItem(**item) for item in plain["items"])
    return Extras(plain["lora"], plain["salt"], items)


def chain_of(tokens: list[int], chunk_size: int = 4, **extras: Any) -> list[bytes]:
    chain = KeyChain(ROOT, chunk_size, Extras(**extras))
    chain.extend(tokens)
    return [bytes(key) for key in chain.keys]


@pytest.mark.parametrize(
    "vector", json.loads(VECTORS.read_text())["vectors"], ids=lambda vector: str(vector["name"])
)
def test_the_written_vectors_hold_here_and_in_the_reference(vector: dict[str, Any]) -> None:
    tokens = token_rule(vector["tokens"])
    expected = vector["keys"]

    namespace = reference_namespace(vector["namespace"])
    assert namespace.hex() == vector["namespace_digest"]
    root = (
        reference_epoch(namespace, bytes.fromhex(vector["epoch"])) if vector["epoch"] else namespace
    )
    reference = reference_keys(root, vector["chunk_size"], tokens, vector["extras"])
    assert [key.hex() for key in reference] == expected
    tail = reference_tail(root, vector["chunk_size"], tokens, vector["extras"])
    assert (tail.hex() if tail else "") == vector["tail"]

    digest = namespace_digest(vector["namespace"])
    assert digest.hex() == vector["namespace_digest"]
    ours = epoch_root(digest, bytes.fromhex(vector["epoch"])) if vector["epoch"] else digest
    chain = KeyChain(ours, vector["chunk_size"], extras_of(vector["extras"]))
    chain.extend(tokens)
    assert [key.hex() for key in chain.keys] == expected
    assert chain.tail_key(tokens, len(tokens)) == tail


def test_a_tenant_has_the_written_name_and_a_chain_knows_its_own() -> None:
    names = json.loads(VECTORS.read_text())["tenants"]
    assert {salt: tenant_id(salt).hex() for salt in names} == names
    for salt, name in names.items():
        expected = hashlib.sha256(b"kvhaven tenant 1\n" + salt.encode()).digest()[:8]
        assert name == (expected.hex() if salt else "")
        assert KeyChain(ROOT, 4, Extras(salt=salt)).tenant == bytes.fromhex(name)
    assert tenant_id("\ud800") != tenant_id("\udfff")


def test_fields_are_told_apart_wherever_their_borders_lie() -> None:
    digests = {
        namespace_digest(fields)
        for fields in ({"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": "", "bc": ""}, {})
    }
    assert len(digests) == 5


def test_the_order_of_fields_does_not_matter() -> None:
    assert namespace_digest({"a": "1", "b": "2"}) == namespace_digest({"b": "2", "a": "1"})


tokens_strategy = st.lists(st.integers(0, 2**32 - 1), max_size=60)
items_strategy = st.lists(
    st.builds(
        MediaItem,
        content_hash=st.text(max_size=5),
        offset=st.integers(0, 70),
        length=st.integers(1, 30),
    ),
    max_size=4,
).map(tuple)


@given(
    tokens=tokens_strategy,
    chunk_size=st.integers(1, 9),
    items=items_strategy,
    cuts=st.lists(st.integers(0, 60)),
)
def test_growing_in_steps_gives_the_keys_of_hashing_at_once(
    tokens: list[int], chunk_size: int, items: tuple[MediaItem, ...], cuts: list[int]
) -> None:
    extras = Extras("adapter", "tenant", items)
    chain = KeyChain(ROOT, chunk_size, extras)
    for cut in sorted(cut for cut in cuts if cut <= len(tokens)):
        chain.extend(tokens[:cut])
    chain.extend(tokens)
    plain = {
        "lora": "adapter",
        "salt": "tenant",
        "items": [
            {"content_hash": i.content_hash, "offset": i.offset, "length": i.length} for i in items
        ],
    }
    assert chain.keys == reference_keys(bytes(ROOT), chunk_size, tokens, plain)
    for end in range(len(tokens) + 1):
        tail = reference_tail(bytes(ROOT), chunk_size, tokens[:end], plain)
        assert chain.tail_key(tokens, end) == tail


@given(
    tokens=tokens_strategy, kept=st.integers(0, 60), others=tokens_strategy, items=items_strategy
)
def test_a_truncated_chain_goes_on_like_a_new_one(
    tokens: list[int], kept: int, others: list[int], items: tuple[MediaItem, ...]
) -> None:
    chain = KeyChain(ROOT, 4, Extras(items=items))
    chain.extend(tokens)
    chain.truncate(kept)
    chain.extend(tokens[:kept] + others)
    assert chain.keys == chain_of(tokens[:kept] + others, items=items)


@given(tokens=tokens_strategy, early=items_strategy, late=items_strategy)
def test_items_that_come_late_give_the_keys_of_items_known_at_once(
    tokens: list[int], early: tuple[MediaItem, ...], late: tuple[MediaItem, ...]
) -> None:
    chain = KeyChain(ROOT, 4, Extras(items=early))
    chain.extend(tokens)
    chain.add_items(late)
    chain.extend(tokens)
    assert chain.keys == chain_of(tokens, items=early + late)


def test_adapter_salt_and_image_each_change_every_key_that_they_reach() -> None:
    tokens = list(range(16))
    image = MediaItem("cat", 5, 4)  # touches chunks 1 and 2
    variants = [
        chain_of(tokens),
        chain_of(tokens, lora="x"),
        chain_of(tokens, salt="x"),
        chain_of(tokens, lora="x", salt="x"),
        chain_of(tokens, items=(image,)),
        chain_of(tokens, items=(MediaItem("dog", 5, 4),)),
        chain_of(tokens, items=(MediaItem("cat", 6, 4),)),
        chain_of(tokens, items=(MediaItem("cat", 5, 5),)),
        chain_of(tokens, items=(image, image)),
    ]
    for chunk in (1, 2, 3):
        assert len({keys[chunk] for keys in variants}) == len(variants)
    assert variants[0][0] == variants[4][0], "an image does not reach back"


def test_an_item_is_in_no_chunk_that_it_only_borders_on() -> None:
    tokens = list(range(12))
    between = chain_of(tokens, items=(MediaItem("cat", 4, 4),))
    plain = {"lora": "", "salt": "", "items": [{"content_hash": "cat", "offset": 4, "length": 4}]}
    assert between == reference_keys(bytes(ROOT), 4, tokens, plain)


def test_image_placeholders_alone_do_not_collide() -> None:
    placeholders = [32000] * 8
    assert not set(chain_of(placeholders, items=(MediaItem("cat", 0, 8),))) & set(
        chain_of(placeholders, items=(MediaItem("dog", 0, 8),))
    )


def test_the_order_in_which_items_are_given_does_not_matter() -> None:
    one, other = MediaItem("a", 1, 2), MediaItem("b", 4, 2)
    assert chain_of(list(range(8)), items=(one, other)) == chain_of(
        list(range(8)), items=(other, one)
    )


def test_a_new_epoch_shares_nothing_with_the_old_one() -> None:
    roots = [bytes(ROOT), epoch_root(ROOT, b"1"), epoch_root(ROOT, b"2")]
    firsts = set()
    for root in roots:
        chain = KeyChain(root, 2)
        chain.extend([1, 2])
        firsts.add(chain.keys[0])
    assert len(firsts) == 3


@pytest.mark.parametrize("bad", [-1, 2**32, None, 1.5, "a"])
def test_a_token_that_cannot_be_is_named_and_changes_nothing(bad: Any) -> None:
    chain = KeyChain(ROOT, 2)
    chain.extend([1, 2])
    with pytest.raises(KeyInputError, match=rf"token 3 of the request: invalid \(got {bad!r}\)"):
        chain.extend([1, 2, 3, bad])
    assert len(chain.keys) == 1


def test_a_token_behind_the_last_full_chunk_may_be_anything() -> None:
    """vLLM has -1 for a token that is being computed."""
    chain = KeyChain(ROOT, 2)
    chain.extend([1, 2, 3, 4, -1])
    assert chain.keys == chain_of([1, 2, 3, 4], 2)


def test_fewer_tokens_than_hashed_are_refused() -> None:
    chain = KeyChain(ROOT, 2)
    chain.extend([1, 2, 3, 4])
    with pytest.raises(KeyInputError, match="truncate"):
        chain.extend([1, 2])


@pytest.mark.parametrize("item", [MediaItem("a", -1, 2), MediaItem("a", 0, 0)])
def test_items_that_cannot_be_are_refused(item: MediaItem) -> None:
    with pytest.raises(KeyInputError, match="media item 'a'"):
        KeyChain(ROOT, 4, Extras(items=(item,)))


def tail_of(tokens: list[int], chunk_size: int = 4, **extras: Any) -> bytes | None:
    chain = KeyChain(ROOT, chunk_size, Extras(**extras))
    chain.extend(tokens)
    return chain.tail_key(tokens, len(tokens))


def test_a_tail_has_a_key_of_its_own_whatever_differs() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7]
    tails = [
        tail_of(tokens),
        tail_of(tokens[:6]),
        tail_of([*tokens[:6], 0]),
        tail_of([0, *tokens[1:]]),
        tail_of(tokens[4:]),
        tail_of(tokens, 5),
        tail_of(tokens, 8),
        tail_of(tokens, lora="x"),
        tail_of(tokens, salt="x"),
        tail_of(tokens[:3], lora="x"),
        tail_of(tokens[:3], salt="x"),
        tail_of(tokens, items=(MediaItem("cat", 5, 1),)),
        tail_of(tokens, items=(MediaItem("dog", 5, 1),)),
        tail_of(tokens, items=(MediaItem("cat", 5, 2),)),
        tail_of(tokens, items=(MediaItem("cat", 6, 1),)),
        *chain_of(tokens, 3),
        *chain_of(tokens, 7),
    ]
    assert len(set(tails)) == len(tails)
    assert tail_of(tokens, items=(MediaItem("cat", 7, 1),)) == tails[0], "the item is behind it"


def test_a_tail_of_tokens_that_are_not_hashed_is_refused() -> None:
    chain = KeyChain(ROOT, 2)
    with pytest.raises(KeyInputError, match="extend first"):
        chain.tail_key([1, 2, 3], 3)
    chain.extend([1, 2])
    with pytest.raises(KeyInputError, match="token 2 of the request"):
        chain.tail_key([1, 2, -1], 3)
    assert chain.tail_key([1, 2, 3, -1], 3) == tail_of([1, 2, 3], 2)


def test_roots_and_chunk_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(KeyInputError, match="32 bytes"):
        KeyChain(b"short", 4)
    with pytest.raises(KeyInputError, match=r"chunk_size: out of range \(got 0\)"):
        KeyChain(ROOT, 0)


def test_a_salt_of_any_text_has_a_key() -> None:
    assert chain_of([1, 2, 3, 4], salt="\ud800") != chain_of([1, 2, 3, 4], salt="\udfff")
