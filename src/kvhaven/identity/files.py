# SPDX-License-Identifier: Apache-2.0
"""Files that determine an engine's KV, and their identity, which covers every byte.

Files in the hub's cache are identified by the names of their blobs, which are hashes of their
content. Other files are read in full (see `content`). Files of large models are read in the
background, while the engine serves without a cache.
"""

import contextlib
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvhaven.errors import IncompatibleEngineError, KVHavenError
from kvhaven.identity.content import DigestMemory, Stamp, digest_files

logger = logging.getLogger(__name__)

AT_ONCE_BYTES: Final = 256 << 20
"""Maximum number of bytes that a start reads itself; more is read in the background."""
MOST_FILES: Final = 20_000

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")

IGNORED_FILES: Final[Mapping[str, str]] = {
    "hidden files of git, the hub's client or a desktop": ".*",
    "documentation": """
        README* LICENSE* NOTICE* USE_POLICY* *.md *.pdf *.bib *.png *.jpg *.jpeg *.gif *.svg *.webp
    """,
    "it determines prompts, whose tokens are in the key": "chat_template.json *.jinja",
    "formats that engines on torch do not load": """
        *.onnx *.onnx_data *.h5 *.msgpack *.ot *.tflite *.mlmodel
    """,
    "training artifacts, which engines do not load": """
        training_args.bin optimizer.bin optimizer.pt scheduler.pt scaler.pt
        trainer_state.json trainer_log.jsonl
    """,
    "logs and tables that tools write there, such as an engine's own output": """
        *.log nohup.out events.out.tfevents.* *.csv *.tsv
    """,
    "compiled from files that count": "*.pyc",
    "locks and incomplete downloads": "*.lock *.incomplete *.tmp",
}
"""Patterns of files in a model's folder that do not count, by reason. All other files count.

Tokenizers count: some models read them (Engram tables, times in videos).
"""
IGNORED_FOLDERS: Final[Mapping[str, str]] = {
    "hidden folders of git, the hub's client or a desktop": ".*",
    "Llama's original checkpoint beside the converted one, which LoadConfig skips": "original",
    "it determines prompts, whose tokens are in the key": "additional_chat_templates",
    "formats that engines on torch do not load": "onnx openvino coreml",
    "compiled from files that count": "__pycache__",
    "training artifacts: checkpoints of other steps, and logs": """
        checkpoint-* global_step* runs logs wandb
    """,
}

_LINKS_MOST: Final = 40
"""Number of links that the kernel follows."""
_BLOB: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PROGRESS_S: Final = 10.0
ADVICE: Final = (
    "set `model_fingerprint` to a text that identifies these weights, and change it whenever "
    "they change"
)


class UnidentifiedError(KVHavenError):
    """The content of the model's files cannot be identified; the engine serves uncached."""


class Source(NamedTuple):
    """A file, or the files of a folder, that determine KV."""

    field: str
    """Name of the namespace's field."""
    place: Path
    only: tuple[str, ...] = ()
    """Patterns of file names, one of which must match; if empty, all that are not ignored."""


class EngineFiles:
    """Files of an engine's sources, and the identity of their content.

    `since_ns` is a time before the engine began to load. A file that changed later may differ from
    the loaded one, so its content does not identify the KV; `changed` then names such a file.
    Raises `IncompatibleEngineError` if there are no weights, `UnidentifiedError` if there are more
    than `MOST_FILES` files, `OSError` if storage fails.
    """

    def __init__(self, sources: Sequence[Source], memory: DigestMemory, since_ns: int) -> None:
        self._memory = memory
        self.changed = ""
        """A file that changed after the engine began to load, for a log line; empty if none."""
        self._records: list[tuple[str, str, str | None]] = []  # field, name, blob (None: read it)
        self._stamps: dict[tuple[str, str], Stamp] = {}
        self._paths: dict[Stamp, Path] = {}  # one path for each file, as links may lead there
        for source in sources:
            self._add(source, since_ns)
        if not any(name.endswith(WEIGHTS) for _, name, _ in self._records):
            places = ", ".join(str(source.place) for source in sources)
            raise IncompatibleEngineError(
                f"{places}: no file of weights (expected {', '.join(WEIGHTS)}); {ADVICE}"
            )

    @property
    def unknown_bytes(self) -> int:
        """Number of bytes that must be read before the content is known."""
        return sum(stamp.size for stamp in self._paths if self._memory.get(stamp) is None)

    def read(self, stop: threading.Event) -> dict[str, str]:
        """Return the namespace's fields for the content; read files without remembered digests.

        One process at a time reads; the others wait for it. Raises `FileChangedError` if a file
        changes, `ReadingStoppedError` once `stop` is set, `OSError` if storage fails.
        """
        with contextlib.ExitStack() as turn:
            if self.unknown_bytes:
                turn.enter_context(self._memory.turn(self._name, stop.is_set))
            progress = _Progress(self.unknown_bytes)
            files = {path: stamp for stamp, path in self._paths.items()}
            digests = digest_files(files, self._memory, stop=stop, on_read=progress.add)
        contents: dict[str, list[tuple[str, str]]] = {}
        for field, name, blob in self._records:
            content = f"blob {blob}"
            if blob is None:
                stamp = self._stamps[field, name]
                content = f"xxh3 {digests[self._paths[stamp]]} {stamp.size}"
            contents.setdefault(field, []).append((name, content))
        return {field: _digest(sorted(records)) for field, records in contents.items()}

    @property
    def _name(self) -> str:
        """The lock's name, equal in all processes with the same files."""
        return "files-" + _digest(sorted(stamp.name for stamp in self._paths))[:32]

    def _add(self, source: Source, since_ns: int) -> None:
        for name, path in _files(source):
            field = source.field if path.suffix in WEIGHTS else f"{source.field}.other"
            blob = _blob(path)
            self._records.append((field, name, blob))
            if blob is not None:
                continue
            status = path.stat()
            stamp = self._stamps[field, name] = Stamp.of(status)
            self._paths.setdefault(stamp, path.absolute())
            if status.st_ctime_ns >= since_ns:
                self.changed = self.changed or f"{path} changed"
        for place, status in _ways_to(source.place):
            # A new entry changes both times of a folder; moving the folder changes only ctime.
            into = stat.S_ISDIR(status.st_mode) and status.st_mtime_ns >= since_ns
            if status.st_ctime_ns >= since_ns and not into:
                self.changed = self.changed or f"{place} was replaced"


def process_began_ns() -> int:
    """Return when this process started, in ns since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return int((time.time() - age_s) * 1e9)


class _Progress:
    """Progress of the reading, logged at intervals."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self._began = self._logged = time.monotonic()

    def add(self, count: int) -> None:
        """Add bytes that were read, and log the progress if it is due."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._logged < _PROGRESS_S:
                return
            self._logged = now
        logger.warning(
            "nothing is cached yet: %.1f of %.1f GB of the model's files were read (%d%%, %.0f s)",
            self._done / 1e9,
            self._total / 1e9,
            100 * self._done // max(1, self._total),
            now - self._began,
        )


def _files(source: Source) -> Iterator[tuple[str, Path]]:
    """Yield the files of a source that count, with their names relative to it."""
    if source.place.is_file():
        yield source.place.name, source.place
        return
    seen: set[tuple[int, int]] = set()
    folders, count = [source.place], 0
    while folders:
        folder = folders.pop()
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            continue  # a link to a parent folder
        seen.add((status.st_dev, status.st_ino))
        for path in sorted(folder.iterdir()):
            if not _is_readable(path):
                continue  # the engine cannot read it either (`lost+found`, a broken link)
            if path.is_dir():
                if not source.only and not _matches(path.name, IGNORED_FOLDERS.values()):
                    folders.append(path)
            elif path.is_file() and _counts(path.name, source.only):
                count += 1
                if count > MOST_FILES:
                    raise UnidentifiedError(
                        f"{source.place}: more than {MOST_FILES} files; expected the folder of "
                        f"one model. Move the model to a separate folder, or {ADVICE}"
                    )
                yield str(path.relative_to(source.place)), path


def _is_readable(path: Path) -> bool:
    """Return whether a path can be read. Raises `OSError` if storage fails."""
    if os.access(path, os.R_OK):
        return True
    return path.exists() and os.access(path, os.R_OK)  # `exists` raises storage errors


def _counts(name: str, only: Sequence[str]) -> bool:
    if only:
        return any(fnmatchcase(name, pattern) for pattern in only)
    return not _matches(name, IGNORED_FILES.values())


def _matches(name: str, patterns: "Iterator[str] | Any") -> bool:
    return any(fnmatchcase(name, pattern) for group in patterns for pattern in group.split())


def _blob(path: Path) -> str | None:
    """Return the name, a hash, of the blob in the hub's cache that a link leads to."""
    end = path
    for _ in range(_LINKS_MOST):
        text = _link_text(end)
        if text is None:
            break
        end = end.parent / text
    if end is path or end.parent.name != "blobs" or not _BLOB.fullmatch(end.name):
        return None
    return end.name if end.exists() and end.samefile(path) else None


def _ways_to(place: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield a folder and the links that lead to it; their times show whether it was replaced."""
    yield place, place.stat()
    pending = [place.absolute()]
    for _ in range(_LINKS_MOST):
        if not pending:
            return
        path = pending.pop()
        for link in (path, *path.parents):
            text = _link_text(link)
            if text is not None:
                yield link, link.lstat()
                pending.append(link.parent / text)


def _link_text(path: Path) -> str | None:
    """Return the target text of a link; None if the path is not a link or cannot be read.

    Also None for links of `/proc` (such as `/proc/1/root`, which leads to KServe's model
    containers): the kernel does not follow their text, which may be a path in another container,
    and their times have no meaning. Their size differs from the length of the text.
    """
    try:
        text = os.readlink(path)  # noqa: PTH115 - a Path would write it differently
        return text if path.lstat().st_size == len(os.fsencode(text)) else None
    except OSError:
        return None


def _digest(value: object) -> str:
    return sha256(json.dumps(value).encode("utf-8", "surrogatepass")).hexdigest()
