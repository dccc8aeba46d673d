# SPDX-License-Identifier: Apache-2.0
"""What all tests share: their order, their time limits, a clean environment."""

import contextlib
import gc
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from kvhaven.config.sources import NOT_SETTINGS, NOT_SETTINGS_PREFIXES
from tests import servers

_SECONDS_BY_MARKER = {"vllm": 1200, "crash": 600, "slow": 600}
_ORDER = ("vllm", "crash", "slow")
"""What takes longest comes last, so that a mistake is seen early."""

_IN_LINE = "tests/crash/"
"""Tells when things happen: one worker runs all of the folder, beside the quick tests."""

_BY_MODULE = "tests/e2e/"
"""Real vLLM comes last. A module's tests share engines, so one worker runs them."""

_LONG = tuple(
    f"{_BY_MODULE}test_{name}.py"
    for name in ("hybrid", "hybrid_portable", "tails", "state", "engine", "interfaces")
)
"""Modules of minutes, which begin first: none of them is to run alone at the end."""

_MODULES_AT_ONCE = 4
"""An engine that starts leaves a core idle, but engines that compute wait for each other."""

# No deadline for an example: the machine may be busy with other work, and pytest has a limit.
hypothesis.settings.register_profile("kvhaven", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvhaven")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the settings of the shell that runs the tests out of them; set the engines' waits."""
    del config
    for name in list(os.environ):
        keep = name in NOT_SETTINGS or name.startswith(NOT_SETTINGS_PREFIXES)
        ours = name.startswith(("KVHAVEN_", "LMCACHE_"))
        if name == "KVHAVEN_CONFIG_FILE" or (ours and not keep):
            del os.environ[name]
    # Engines share the cores with each other: their threads sleep while they wait for each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip modules that import torch or vLLM where it is not installed (`make setup-quick`)."""
    report = yield
    absent = re.search(r"No module named '(torch|vllm)'$", report.longreprtext, re.MULTILINE)
    if report.failed and absent:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"Skipped: {absent[1]} is not installed")
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give marked tests the time they need (`-o timeout=0`: all they want), and run them last."""
    for item in items if float(config.getini("timeout")) else ():
        limits = [s for marker, s in _SECONDS_BY_MARKER.items() if item.get_closest_marker(marker)]
        if limits and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(max(limits)))
    items.sort(key=_rank)
    if hasattr(config, "workerinput"):  # there are others, which begin with what is quick
        items.sort(key=lambda item: not item.nodeid.startswith(_IN_LINE))


class _Scheduler(LoadScopeScheduling):
    """Hands out single tests, but all of such a folder or module to one worker.

    xdist's own groups (xdist_group, 3.8) have no effect with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_IN_LINE):
            return _IN_LINE
        return nodeid.partition("::")[0] if nodeid.startswith(_BY_MODULE) else nodeid

    def _assign_work_unit(self, node: Any) -> None:
        """Give a worker its next work, or end it, if what is left is for fewer workers."""
        at_work = sum(not one.shutting_down for one in self.nodes)
        if next(iter(self.workqueue)).startswith(_BY_MODULE) and at_work > _MODULES_AT_ONCE:
            node.shutdown()
        else:
            super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduler:
    """Tell xdist how to divide the tests."""
    return _Scheduler(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the simulated accelerators before tests that may need them: no test has the time."""
    build = sys.modules.get("tests.simulators.build")  # a test module imports it
    if build is not None and session.items and not session.config.option.collectonly:
        with contextlib.suppress(RuntimeError):  # the tests themselves say it, or skip
            build.library()
    gc.collect()
    gc.freeze()  # garbage is looked for among what tests make, not in all that was imported


def _rank(item: pytest.Item) -> tuple[int, bool]:
    """Return the lowest for what is quick; sorting by it keeps the order within each rank."""
    ranks = [len(_ORDER) - i for i, marker in enumerate(_ORDER) if item.get_closest_marker(marker)]
    return max(ranks, default=0), not item.nodeid.startswith(_LONG)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Give the log level back: an engine that starts in a test sets that of the whole process."""
    logger = logging.getLogger("kvhaven")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A new directory whose path is short enough for unix sockets, which `tmp_path` may not be."""
    path = Path(tempfile.mkdtemp(prefix="kvh-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a real S3 server: the one that is given (`make test-ceph`), or moto's."""
    given = os.environ.get("TEST_S3_URL")
    if given:
        servers.Bucket(given).put("first", b"")  # Ceph makes its pools for that, which takes time
        yield given
        return
    with servers.moto() as url:
        yield url


@pytest.fixture(scope="session")
def session_redis() -> Iterator[str]:
    with servers.redis() as url:
        yield url


@pytest.fixture(scope="session")
def session_redis_cluster() -> Iterator[str]:
    with servers.redis_cluster() as url:
        yield url


@pytest.fixture
def redis_server(session_redis: str) -> str:
    """The URL of a real Redis server, which is empty."""
    return servers.emptied(session_redis)


@pytest.fixture
def redis_cluster_server(session_redis_cluster: str) -> str:
    """The URL of a real Redis cluster of one node, which is empty."""
    return servers.emptied(session_redis_cluster)
