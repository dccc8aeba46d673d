# SPDX-License-Identifier: Apache-2.0
"""Services and folders of one measurement."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import BENCH
from examples.demo.processes import NodeService, node_service


@contextlib.contextmanager
def fresh_node(name: str, **settings: object) -> Iterator[NodeService]:
    """Run a node service, with 1 GiB by default, in a new directory.

    Its log is `build/bench/<name>-service.log`.
    """
    with tempfile.TemporaryDirectory(prefix="kvhaven-bench-") as runtime:
        common = {"max_local_cpu_size": "1GiB", "runtime_dir": runtime}
        log, address = BENCH / f"{name}-service.log", Path(runtime) / "service.sock"
        with node_service(address, log, **(common | settings)) as service:
            yield service


@contextlib.contextmanager
def fresh_folder(name: str) -> Iterator[Path]:
    """Yield the path of a folder in `build/bench` that is not there, and remove it afterwards."""
    folder = BENCH / name
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
