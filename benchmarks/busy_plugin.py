# SPDX-License-Identifier: Apache-2.0
"""A plugin that is busy: it computes, prints and asks for each request that it is told of."""

import hashlib
from typing import Any

from kvhaven.plugins import PluginBase


class Busy(PluginBase):
    """Plugin for `benchmarks.operate`."""

    def on_request_complete(self, request_id: str, stats: Any) -> None:
        """Compute for some milliseconds, and ask."""
        digest = request_id.encode()
        for _ in range(2000):
            digest = hashlib.sha256(digest).digest()
        print(digest.hex(), stats.by_source)
        try:
            self.engine.lookup(list(range(512)))
        except RuntimeError as error:  # the engine of the benchmark names no chunk size
            print(error)
