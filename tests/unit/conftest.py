# SPDX-License-Identifier: Apache-2.0
"""What unit tests of the service and its clients share: a service, and a proxy before it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.node import NodeThread
from tests.crash.proxy import Proxy


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with NodeThread(short_dir / "s.sock") as node:
        yield node
        node.check()


@pytest.fixture
def proxy(node: NodeThread, short_dir: Path) -> Iterator[Proxy]:
    with Proxy(short_dir / "p.sock", node.address) as proxy:
        yield proxy
