# SPDX-License-Identifier: Apache-2.0
"""`identity.*`: seconds to identify the content of 10 GB of weights, at a first start.

The weights are two files of 5 GB, as of a model without the blob names of a hub, and are read by as
many threads as in an engine. `identity.disk` reads them from the disk, `identity.cached` from the
page cache, where the engine's loading has put them. The limit of both is a plain read of the same
bytes by as many threads in the same run. `identity.again` is the second start, which reads nothing.
`identity.cpu` is the CPU time of `identity.cached`.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.rates import empty_folder
from benchmarks.results import Result, plain
from kvhaven.identity.content import PIECE_BYTES, DigestMemory
from kvhaven.identity.files import EngineFiles, Source

_FILES = 2
_BYTES = 5_000_000_000
_PIECE = 4 << 20
_THREADS = 2
_NEVER_NS = 2**63 - 1


def measure(say: Callable[[str], None]) -> list[Result]:
    """Write files, and identify them."""
    with empty_folder("identity") as folder:
        model = folder / "model"
        model.mkdir()
        say(f"writing {_FILES * _BYTES / 1e9:.0f} GB")
        files = [model / f"part-{number}.safetensors" for number in range(_FILES)]
        for file in files:
            _write(file)
        results = []
        _forget(files)
        limit = _seconds(lambda: _read(files))
        _forget(files)
        results.append(_compared("identity.disk", _identify(model, folder / "1")[0], limit))
        limit = _seconds(lambda: _read(files))
        cached, cpu = _identify(model, folder / "2")
        results.append(_compared("identity.cached", cached, limit))
        results.append(plain("identity.cpu", cpu, "s", 1))
        results.append(plain("identity.again", _identify(model, folder / "2")[0], "s", 1))
        return results


def _compared(name: str, value: float, limit: float) -> Result:
    return Result(name, value, "s", limit, 1, "a plain read of the same bytes")


def _identify(model: Path, remembered: Path) -> tuple[float, float]:
    """Return the seconds, and the seconds of CPU time, until the content is known."""
    cpu = time.process_time()
    began = time.perf_counter()
    sources = [Source("weights", model)]
    EngineFiles(sources, DigestMemory.open(remembered), _NEVER_NS).read(threading.Event())
    return time.perf_counter() - began, time.process_time() - cpu


def _write(file: Path) -> None:
    piece = os.urandom(_PIECE)
    with file.open("wb") as output:
        for at in range(0, _BYTES, _PIECE):
            output.write(at.to_bytes(8, "little") + piece[8 : min(_PIECE, _BYTES - at)])
        output.flush()
        os.fsync(output.fileno())
    old = time.time_ns() - 10**10  # digests of files that changed recently are not stored
    os.utime(file, ns=(old, old))


def _forget(files: list[Path]) -> None:
    """Remove files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(files: list[Path]) -> None:
    def read(file: Path, offset: int) -> None:
        buffer = bytearray(_PIECE)
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            left = PIECE_BYTES
            while left > 0 and (count := opened.readinto(buffer)):
                left -= count

    with ThreadPoolExecutor(_THREADS) as threads:
        for file in files:
            for offset in range(0, _BYTES, PIECE_BYTES):
                threads.submit(read, file, offset)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
