# SPDX-License-Identifier: Apache-2.0
"""Digests of files: every byte counts, and what is remembered is never another file's."""

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash

from kvhaven.client.unix import lock_file
from kvhaven.identity.content import (
    MOST_ENTRIES,
    PIECE_BYTES,
    DigestMemory,
    FileChangedError,
    ReadingStoppedError,
    Stamp,
    digest_files,
)

OLD_NS = 1_600_000_000_000_000_000


def stamp_of(path: Path) -> Stamp:
    return Stamp.of(path.stat())


def digest(path: Path, memory: DigestMemory | None = None, **options: object) -> str:
    """Return a file's digest, as a process finds it that has just looked at the file."""
    found = digest_files(
        {path: stamp_of(path)},
        memory or DigestMemory(None),
        stop=threading.Event(),
        **options,  # type: ignore[arg-type]
    )
    return found[path]


@pytest.fixture
def memory(tmp_path: Path) -> DigestMemory:
    return DigestMemory.open(tmp_path / "cache" / "files")


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "files").iterdir())


def remember(file: Path, memory: DigestMemory) -> str:
    """Have a file's digest remembered, as if it had been read a while after its last change."""
    found = digest(file)
    memory.put(stamp_of(file), found, time.time_ns() + 10_000_000_000)
    return found


# --- where digests are kept ------------------------------------------------------------------


def test_directories_that_are_made_are_ours_alone_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        made = DigestMemory.open(tmp_path / "cache" / "kvhaven" / "files")
    finally:
        os.umask(before)
    kept = tmp_path / "cache" / "kvhaven"
    assert [path.stat().st_mode & 0o777 for path in (kept, kept / "files")] == [0o700, 0o700]
    (tmp_path / "file").write_text("x")
    remember(tmp_path / "file", made)
    assert made.get(stamp_of(tmp_path / "file")) is not None


# --- every byte -----------------------------------------------------------------------------


def test_every_byte_of_a_file_counts(tmp_path: Path) -> None:
    file, chance = tmp_path / "f", random.Random(0)
    content = bytearray(chance.randbytes(300_000))
    file.write_bytes(content)
    seen = {digest(file)}
    spots = [0, len(content) // 2, len(content) - 1, *chance.sample(range(len(content)), 20)]
    for count, spot in enumerate(spots, 2):
        content[spot] ^= 1
        file.write_bytes(content)
        seen.add(digest(file))
        content[spot] ^= 1
        assert len(seen) == count, spot
    file.write_bytes(content + b"\0")
    assert digest(file) not in seen
    file.write_bytes(content)
    assert digest(file) in seen


def test_pieces_of_a_large_file_count_by_their_place(tmp_path: Path) -> None:
    """A sparse file of three pieces and a bit, with a mark in one piece after the other."""
    file, seen = tmp_path / "f", set()
    for place in (0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 7, 3 * PIECE_BYTES):
        with file.open("wb") as opened:
            opened.truncate(3 * PIECE_BYTES + 9)
            opened.seek(place)
            opened.write(b"x")
        seen.add(digest(file))
    assert len(seen) == 5


def test_a_digest_is_what_the_format_says(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "empty").write_bytes(b"")
    piece = xxhash.xxh3_128_digest(b"abc")
    assert digest(tmp_path / "f") == xxhash.xxh3_128_hexdigest((3).to_bytes(8, "little") + piece)
    assert digest(tmp_path / "empty") == xxhash.xxh3_128_hexdigest(bytes(8))


def test_all_that_is_read_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "f"
    read: list[int] = []
    with file.open("wb") as opened:
        opened.truncate(PIECE_BYTES + 5)
    digest(file, on_read=read.append)
    assert sum(read) == PIECE_BYTES + 5


# --- what is remembered ---------------------------------------------------------------------


@pytest.fixture
def known(tmp_path: Path, memory: DigestMemory) -> Path:
    """A file whose digest is remembered."""
    file = tmp_path / "known"
    file.write_bytes(b"content")
    remember(file, memory)
    assert memory.get(stamp_of(file)) is not None
    return file


def test_a_remembered_file_is_not_read_again(known: Path, memory: DigestMemory) -> None:
    before = digest(known)
    read: list[int] = []
    assert digest(known, memory, on_read=read.append) == before
    assert read == []


def write_as_many_bytes(file: Path) -> None:
    file.write_bytes(b"CONTENT")


def write_and_set_the_time_back(file: Path) -> None:
    before = file.stat().st_mtime_ns
    file.write_bytes(b"CONTENT")
    os.utime(file, ns=(OLD_NS, before))


def put_another_file_in_its_place(file: Path) -> None:
    new = file.parent / "new"
    new.write_bytes(b"CONTENT")
    os.utime(new, ns=(OLD_NS, file.stat().st_mtime_ns))
    new.rename(file)


def write_more(file: Path) -> None:
    file.write_bytes(b"content and more")


@pytest.mark.parametrize(
    "change",
    [
        write_as_many_bytes,
        write_and_set_the_time_back,
        put_another_file_in_its_place,
        write_more,
    ],
)
def test_a_changed_file_is_read_again(
    known: Path, memory: DigestMemory, change: Callable[[Path], None]
) -> None:
    before = digest(known, memory)
    change(known)
    assert digest(known, memory) != before


def test_a_file_that_has_just_changed_is_not_remembered(
    tmp_path: Path, memory: DigestMemory
) -> None:
    """It could change again within the file system's resolution of time."""
    (tmp_path / "f").write_bytes(b"x")
    digest(tmp_path / "f", memory)
    assert entries(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"\xff" * 60, b"1 " + b"0" * 32, None], ids=repr)
def test_a_damaged_entry_is_as_good_as_none(
    known: Path, tmp_path: Path, memory: DigestMemory, content: bytes | None
) -> None:
    (entry,) = entries(tmp_path)
    if content is None:  # a whole entry, with another digest
        content = b"1 " + b"0" * 32 + entry.read_bytes()[34:]
    entry.write_bytes(content)
    assert memory.get(stamp_of(known)) is None
    assert digest(known, memory) == remember(known, memory) == memory.get(stamp_of(known))


def test_an_entry_under_another_name_is_not_believed(
    known: Path, tmp_path: Path, memory: DigestMemory
) -> None:
    (entry,) = entries(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(b"other")
    entry.rename(entry.with_name(stamp_of(other).name))
    assert memory.get(stamp_of(other)) is None


def test_so_many_files_are_remembered_and_no_more(known: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "files"
    for index in range(MOST_ENTRIES + 50):
        (folder / f"old-{index}").touch()
        os.utime(folder / f"old-{index}", ns=(OLD_NS, OLD_NS + index))
    memory = DigestMemory.open(folder)
    assert memory.get(stamp_of(known)) is not None  # used: it stays
    memory.prune()
    assert len(entries(tmp_path)) == MOST_ENTRIES
    assert memory.get(stamp_of(known)) is not None
    assert not (folder / "old-50").exists()
    assert (folder / f"old-{MOST_ENTRIES + 49}").exists()


def test_a_directory_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    open_to_all, own = tmp_path / "open", tmp_path / "own"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    blocked = tmp_path / "file" / "below"
    (tmp_path / "file").touch()
    memory = DigestMemory.open(open_to_all, blocked, own)
    file = tmp_path / "f"
    file.write_bytes(b"x")
    remember(file, memory)
    assert list(open_to_all.iterdir()) == []
    assert len(list(own.iterdir())) == 1
    assert own.stat().st_mode & 0o777 == 0o700


def test_without_any_directory_nothing_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    memory = DigestMemory.open(tmp_path / "f" / "below")
    assert digest(tmp_path / "f", memory) == digest(tmp_path / "f")
    with memory.turn("name", lambda: False):
        assert memory.get(stamp_of(tmp_path / "f")) is None


# --- changes while it is read, and stopping ---------------------------------------------------


def test_a_file_that_is_another_than_was_looked_at_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    before = stamp_of(file)
    (tmp_path / "new").write_bytes(b"two")
    (tmp_path / "new").rename(file)
    with pytest.raises(FileChangedError, match="changed before it was read"):
        digest_files({file: before}, DigestMemory(None), stop=threading.Event())


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f"
    with file.open("wb") as opened:
        opened.truncate(2 * PIECE_BYTES)

    def overwrite(_: int) -> None:
        with file.open("r+b") as opened:
            opened.write(b"x")

    with pytest.raises(FileChangedError, match="changed"):
        digest(file, on_read=overwrite)


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f"
    with file.open("wb") as opened:
        opened.truncate(2 * PIECE_BYTES)
    with pytest.raises(FileChangedError):
        digest(file, on_read=lambda _: os.truncate(file, 10))


def test_reading_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    file, stop = tmp_path / "f", threading.Event()
    with file.open("wb") as opened:
        opened.truncate(4 * PIECE_BYTES)
    with pytest.raises(ReadingStoppedError):
        digest_files(
            {file: stamp_of(file)},
            DigestMemory(None),
            stop=stop,
            on_read=lambda _: stop.set(),
        )


def test_a_process_that_ends_does_not_wait_until_all_is_read(tmp_path: Path) -> None:
    code = (
        "import atexit, sys, threading\nfrom pathlib import Path\n"
        "from kvhaven.identity.content import DigestMemory, Stamp, digest_files\n"
        "file, read, begun = Path(sys.argv[1]), [0], threading.Event()\n"
        "def on_read(count):\n    read[0] += count\n    begun.set()\n"
        "def work():\n    stamps = {file: Stamp.of(file.stat())}\n"
        "    digest_files(stamps, DigestMemory(None), stop=threading.Event(), on_read=on_read)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "begun.wait()\natexit.register(lambda: print(read[0]))\n"
    )
    file = tmp_path / "f"
    with file.open("wb") as opened:
        opened.truncate(100 * PIECE_BYTES)
    command = [sys.executable, "-c", code, str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0 < int(ended.stdout) < 100 * PIECE_BYTES


# --- several processes ------------------------------------------------------------------------


@contextmanager
def other_process_reads(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Have another process hold the lock at `path`."""
    code = (
        "import sys\nfrom kvhaven.client.unix import lock_file\n"
        "with lock_file(sys.argv[1]) as held:\n    print(held, flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


def test_one_process_reads_and_the_others_wait_for_it(tmp_path: Path, memory: DigestMemory) -> None:
    lock = tmp_path / "cache" / "files" / "name.lock"
    order = []
    with other_process_reads(lock) as other:

        def wait() -> None:
            with memory.turn("name", lambda: False):
                order.append("we")

        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        order.append("they end")
        other.kill()  # however it ends, its lock goes with it
        waiting.join(10)
    assert order == ["they end", "we"]
    with lock_file(str(lock)) as free:
        assert free


def test_who_waits_gives_up_when_it_is_asked_to(tmp_path: Path, memory: DigestMemory) -> None:
    lock = tmp_path / "cache" / "files" / "name.lock"
    with other_process_reads(lock), memory.turn("name", lambda: True):
        pass
