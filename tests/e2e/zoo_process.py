# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines, one after the other, in children of a process that imported vLLM once."""

import json
import multiprocessing
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this is run as a program

from tests.e2e.engine_process import Commands, inspect_models_here


def main() -> None:
    """Answer each line, a model to start, with what came of it."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    from vllm import LLM  # noqa: F401 - the children have it

    inspect_models_here()
    print(json.dumps({"ready": True}), file=answers)
    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        command = json.loads(line)
        receive, send = fork.Pipe(duplex=False)
        child = fork.Process(target=_serve, args=(command, send))
        child.start()
        send.close()
        try:
            result = receive.recv()
        except EOFError:
            result = {"error": "the engine died"}
        child.join(30)
        child.kill()
        print(json.dumps(result), file=answers)


def _serve(command: dict[str, Any], send: Connection) -> None:
    """Start an engine and answer a prompt, or say why that failed."""
    from vllm import LLM

    os.environ.update(command["environment"])
    try:
        llm = LLM(**command["options"])
        Commands.generate(llm, [command["prompt"]])
    except Exception:  # noqa: BLE001 - this is what is asked for
        send.send({"error": traceback.format_exc()})
        return
    send.send({})


if __name__ == "__main__":
    main()
