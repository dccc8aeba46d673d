# SPDX-License-Identifier: Apache-2.0
"""One node service for a module's tests, and engines without an engine at it (`bench`).

vLLM is imported when `bench` is made, so that collecting these tests needs none.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.simulation.node import Node, running_node

if TYPE_CHECKING:
    from tests.simulation.connector_kit import Bench
    from tests.unit.connector.rank_kit import Rank


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Run a node service as a process of its own."""
    with running_node(tmp_path_factory.mktemp("n")) as started:
        yield started


@pytest.fixture
def bench(node: Node) -> Iterator["Bench"]:
    """Attach ranks; afterwards disconnect everybody and drop what was stored."""
    from tests.simulation.connector_kit import Bench

    made = Bench(node)
    yield made
    made.close()
    node.clear()


@pytest.fixture
def fresh_node(short_dir: Path) -> Iterator[Node]:
    """Run a node service of one test's own, which has nothing."""
    with running_node(short_dir) as started:
        yield started


@pytest.fixture
def rank(fresh_node: Node) -> Iterator["Rank"]:
    """Attach the only rank of an engine, with a late device."""
    from tests.simulation.engine_device import LateDevice
    from tests.unit.connector.rank_kit import Rank

    made = Rank(fresh_node, LateDevice(Random(0)))
    yield made
    made.worker.close()
