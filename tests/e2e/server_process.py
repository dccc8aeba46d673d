# SPDX-License-Identifier: Apache-2.0
"""vLLM's HTTP server, in a fork of the zygote; the second argument is its command line as JSON."""

import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this is run as a program

from tests.e2e import engine_process

if __name__ == "__main__":
    engine_process.inspect_models_here()
    engine_process.fork_workers()
    sys.argv[1:] = json.loads(sys.argv[2])
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
