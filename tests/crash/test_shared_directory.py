# SPDX-License-Identifier: Apache-2.0
"""Several nodes write one directory with a quota, and its owner is killed again and again."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from kvhaven.tiers.filesystem.ownership import NAME, Owner

ROOT = Path(__file__).parents[2]
QUOTA = int(os.environ.get("TEST_QUOTA_MIB", "64")) << 20
WRITTEN = 5 * QUOTA
"""In total, by all nodes together."""
KILLS = 3

NODE = """
import asyncio, os, random, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from kvhaven.errors import TierError, TierMissError
from kvhaven.tiers.filesystem.usage import Limits
from kvhaven.tiers.registry import TierOptions, open_tier
from kvhaven.testing.tiers import content, fetch, make_namespace, make_piece

async def main(folder, quota, first):
    space = make_namespace("model", (508 << 10,))
    limits = Limits(quota_bytes=quota, beat_s=0.2, lease_s=2.0, credit_s=2.0,
                    survey_s=5.0, least_wanted_bytes=quota // 32)
    tier = open_tier(folder, TierOptions(limits=limits, retry_s=0.1))
    await tier.start()
    await tier.add_namespace(space)
    print(f"owner-id {tier._store.quota_manager._id}", flush=True)
    chosen = random.Random(first)
    number, written = first, 0
    while True:
        number += 1
        try:
            await tier.write(*make_piece(space, number))
            written += 1
        except TierError:
            await asyncio.sleep(0.01)
        old = make_piece(space, chosen.randrange(first, number + 1))
        try:
            assert await fetch(tier, old.shard) == content(old), "WRONG BYTES"
        except (TierMissError, TierError):
            pass
        if written % 10 == 0:
            print(f"written {written}", flush=True)

asyncio.run(main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
"""


class Node:
    """A process that writes and reads as fast as it may."""

    _number = 0

    def __init__(self, folder: Path, out: Path) -> None:
        Node._number += 1
        self._out = out / f"node{Node._number}.out"
        command = [sys.executable, "-c", NODE, str(ROOT), str(folder), str(QUOTA)]
        with self._out.open("wb") as file:
            first = str(Node._number * 1_000_000)
            self.process = subprocess.Popen([*command, first], stdout=file, stderr=file)

    @property
    def said(self) -> str:
        return self._out.read_text()

    @property
    def owner_id(self) -> str:
        return self.said.partition("owner-id ")[2].partition("\n")[0]

    @property
    def written_bytes(self) -> int:
        return int([0, *re.findall(r"written (\d+)\n", self.said)][-1]) * (512 << 10)

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()


def used(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_blocks * 512 if file.is_file() else 0
    return total


@pytest.mark.crash
@pytest.mark.timeout(1800)  # for what hangs: it takes 105 s alone, and more than 600 s beside much
def test_the_quota_holds_while_owners_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    nodes = [Node(folder, tmp_path) for _ in range(2)]
    everybody = list(nodes)
    most, kills = 0, 0
    next_kill = time.monotonic() + 4
    chosen = random.Random(1)
    try:
        while sum(node.written_bytes for node in everybody) < WRITTEN or kills < KILLS:
            most = max(most, used(folder))
            assert most <= QUOTA * 1.05
            for node in nodes:
                assert node.process.poll() is None, node.said
            if kills < KILLS and time.monotonic() > next_kill:
                owner = msgspec.json.decode((folder / NAME).read_bytes(), type=Owner)
                for at, node in enumerate(nodes):
                    if node.owner_id == owner.holder:
                        node.end()
                        nodes[at] = Node(folder, tmp_path)
                        everybody.append(nodes[at])
                        kills += 1
                next_kill = time.monotonic() + 3 + 4 * chosen.random()
            time.sleep(0.02)
    finally:
        for node in nodes:
            node.end()
    written = sum(node.written_bytes for node in everybody)
    print(f"{written >> 20} MiB written, at most {most / QUOTA:.1%} of {QUOTA >> 20} MiB in use")  # noqa: T201
    assert kills == KILLS
    assert most > QUOTA // 2
    assert not any("WRONG" in node.said for node in everybody)
