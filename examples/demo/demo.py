# SPDX-License-Identifier: Apache-2.0
"""Demo: vLLM loads the KV of its prompts from memory and from disk.

Three prompts, each a document of 9,000 tokens and a question, are served in five rows:

| row | what happens |
| --- | --- |
| cold | KVHaven is empty: it is cleared before every question |
| memory | the same engine; the document's KV is in the node service's memory |
| new_engine | a new vLLM process that attaches to the same node service |
| disk | after kill -9 of vLLM and node service: memory is emptied before every question |
| control | vLLM without KVHaven |

vLLM's own prefix cache is emptied before every question. All figures come from vLLM's counters and
a clock around its engine (`engine.py`). The exit status is 1 if an output differs from the
control's, or if the cache did not cover every full chunk of a prompt.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from examples.demo.model import make_model
from examples.demo.processes import (
    Answer,
    Engine,
    ProcessError,
    engine,
    kvhaven,
    node_service,
)
from examples.demo.report import Row, print_table, print_usage, write_json
from examples.demo.text import Question, make_document, make_questions

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
DEMO = BUILD / "demo"
CHUNK = 256
DOCUMENT_TOKENS = 8900
QUESTIONS = 3
OUTPUT_TOKENS = 24
PATIENT = {"lookup_deadline_ms": 1000, "promote_deadline_ms": 10_000}
"""Deadline of lookups and promotions in milliseconds. It is long, so that a busy machine or a slow
disk causes no miss."""
WARM_UP = "Nothing of this is in the document, and nobody will ask for it again. " * 3


@dataclass
class Demo:
    """Questions and answers. `answers[row]` has every answer of that row in order."""

    questions: list[Question]
    console: Console
    began: float
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def say(self, text: str) -> None:
        """Print a line with the time that has passed."""
        passed = time.monotonic() - self.began
        self.console.print(f"[dim]{passed:4.0f} s[/]  {text}", soft_wrap=True)

    def ask_all(self, row: str, asked: Engine, passes: int = 1) -> Iterator[None]:
        """Ask every question `passes` times; yields before each one, for preparations."""
        asked.ask(WARM_UP, 2)  # an engine's first request is slow, in every row alike
        for _ in range(passes):
            for question in self.questions:
                yield
                answer = asked.ask(question.prompt, OUTPUT_TOKENS)
                self.answers.setdefault(row, []).append(answer)
                self.say(
                    f"  first token after [bold]{answer.ttft:.3f} s[/]: "
                    f"“{question.phrase}” → “{answer.text.strip()}”"
                )


def main() -> int:
    """Run the demo; return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.chdir(ROOT)
    console = Console(highlight=False)
    DEMO.mkdir(parents=True, exist_ok=True)
    document = make_document(DOCUMENT_TOKENS)
    demo = Demo(make_questions(document, QUESTIONS), console, time.monotonic())
    console.print(
        f"A document of {len(document)} tokens is asked {QUESTIONS} questions. The model is a "
        "small Llama,\nmade here, which quotes the passage that a question begins. "
        "Logs: build/demo/"
    )
    demo.say("making the model and its tokenizer (kept for the next time)")
    model = make_model(DEMO / "model")
    try:
        with tempfile.TemporaryDirectory(prefix="kvhaven-demo-") as runtime:
            run(demo, model, Path(runtime) / "service.sock")
    except ProcessError as error:
        console.print("[bold red]The demo failed:[/]", end=" ")
        console.print(error, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; all processes are ended")
        return 130
    rows = [
        Row.of("cold", demo.answers, reads_from=None),
        Row.of("memory", demo.answers, reads_from="memory", wanted_speedup=15),
        Row.of("new_engine", demo.answers, reads_from="memory"),
        Row.of("disk", demo.answers, reads_from="disk", wanted_speedup=12),
        Row.of("control", demo.answers, reads_from=None),
    ]
    write_json(BUILD / "demo.json", rows)
    print_table(console, rows)
    problems = [problem for row in rows for problem in row.problems(CHUNK)]
    for problem in problems:
        console.print(f"[bold red]Wrong:[/] {problem}", soft_wrap=True)
    if problems:
        return 1
    print_usage(console)
    return 0


def run(demo: Demo, model: Path, socket: Path) -> None:
    """Ask all questions in all rows; see the table above."""
    disk = DEMO / "disk"
    shutil.rmtree(disk, ignore_errors=True)
    settings = {"local_disk": disk, "max_local_cpu_size": "1GiB", "runtime_dir": socket.parent}
    options = {
        "kv_transfer_config": kvhaven(service_address=str(socket), chunk_size=CHUNK, **PATIENT)
    }
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(node_service(socket, DEMO / "service-1.log", **settings))
        demo.say("starting two vLLM engines: one without KVHaven (the control), one with it")
        first = stack.enter_context(engine(model, DEMO / "engine-1.log", **options))
        with engine(model, DEMO / "control.log") as control:
            control.ready()
            first.ready()
            demo.say("[bold]control[/]: KVHaven off")
            for _ in demo.ask_all("control", control):
                pass
        demo.say("[bold]cold[/]: KVHaven on, and empty")
        for _ in demo.ask_all("cold", first):
            service.clear()
        demo.say("[bold]memory[/]: the same questions again")
        for _ in demo.ask_all("memory", first, passes=2):
            pass
        demo.say("ending this engine, starting a new one at the same node service")
        first.stop()
        second = stack.enter_context(engine(model, DEMO / "engine-2.log", **options))
        second.ready()
        demo.say("[bold]new engine[/]: its node service remembers")
        for _ in demo.ask_all("new_engine", second, passes=2):
            pass
        service.flush()
        demo.say("kill -9 of vLLM and of the node service; starting both anew")
        second.kill()
        service.kill()
        again = stack.enter_context(node_service(socket, DEMO / "service-2.log", **settings))
        third = stack.enter_context(engine(model, DEMO / "engine-3.log", **options))
        third.ready()
        demo.say("[bold]disk[/]: what was written survived")
        for _ in demo.ask_all("disk", third, passes=2):
            again.flush()
            again.clear("memory")
