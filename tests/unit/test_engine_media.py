# SPDX-License-Identifier: Apache-2.0
"""Names of media for an engine that is not vLLM."""

from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from typing import Any, NamedTuple

import pytest

from kvhaven.engine.media import HashedMedia, MediaFeature, MediaNames
from kvhaven.keys import KeyInputError, MediaItem


class Picture(NamedTuple):
    name: Any
    pixels: Any
    tower: bool = False


class Pictures:
    """Reads pictures, whose data are plain mappings."""

    objects_of = ""

    def identifier(self, item: Picture) -> object:
        return item.name

    def feature(self, item: Picture, adapter: str | None) -> MediaFeature:
        data = {"pixels": item.pixels}
        tower = item.tower and adapter is not None
        return MediaFeature(item.name, "image", data, 0, 4, None, tower)

    def size(self, data: Any) -> int:
        return len(data["pixels"])

    def tensors(self, data: Any) -> Mapping[str, Any]:
        if data["pixels"] == b"elsewhere":
            raise KeyInputError("its pixels are elsewhere")
        return dict(data)


@pytest.fixture
def names() -> Iterator[MediaNames]:
    made = MediaNames(Pictures())
    yield made
    made.close()


def noted(names: MediaNames, *pictures: Picture, adapter: str | None = None) -> HashedMedia:
    media = names.note(pictures, adapter)
    wait([media.digests], 60)
    return media


def items_of(names: MediaNames, *pictures: Picture) -> tuple[MediaItem, ...]:
    return noted(names, *pictures).items()


def test_a_name_is_that_of_the_content(names: MediaNames) -> None:
    first, second = items_of(names, Picture("1", b"cat"), Picture("2", b"dog"))
    assert first.content_hash != second.content_hash
    assert items_of(names, Picture("3", b"cat")) == (first,)


def test_an_identifier_with_two_contents_is_refused(names: MediaNames) -> None:
    items_of(names, Picture("1", b"cat"))
    with pytest.raises(KeyInputError, match="two contents"):
        items_of(names, Picture("1", b"dog"))


@pytest.mark.parametrize("name", [5, None, b"5"])
def test_an_identifier_that_is_not_text_is_refused_each_time(names: MediaNames, name: Any) -> None:
    for content in (b"cat", b"cat"):
        with pytest.raises(KeyInputError, match="the identifier is not a text"):
            items_of(names, Picture(name, content))
    assert items_of(names, Picture("1", b"cat"))


def test_an_identifier_whose_content_could_not_be_read_is_refused(names: MediaNames) -> None:
    """The engine's encoding under it may be of that content."""
    with pytest.raises(TypeError):
        items_of(names, Picture("1", None))
    with pytest.raises(KeyInputError, match="unknown content"):
        items_of(names, Picture("1", b"dog"))


def test_content_that_cannot_be_read_has_an_error_with_the_identifier(names: MediaNames) -> None:
    with pytest.raises(KeyInputError, match="media item '1': its pixels are elsewhere"):
        items_of(names, Picture("1", b"elsewhere"))


def test_an_encoding_that_an_adapter_affects_is_refused_after_the_adapter_changed(
    names: MediaNames,
) -> None:
    affected = noted(names, Picture("1", b"cat", tower=True), adapter="a")
    other = noted(names, Picture("2", b"cat"), adapter="a")
    assert affected.items() == other.items()
    names.adapter_changed()
    assert other.items()
    with pytest.raises(KeyInputError, match="before the encoder changed"):
        affected.items()
