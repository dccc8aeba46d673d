# SPDX-License-Identifier: Apache-2.0
"""Results of the demo: a table for people and JSON for programs."""

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich import box
from rich.console import Console
from rich.table import Table

from examples.demo.processes import Answer

_TITLES = {
    "cold": ("1 cold", "KVHaven on, and empty before every question"),
    "memory": ("2 memory", "the same engine again, KV from the node service's memory"),
    "new_engine": ("3 new engine", "a new vLLM process at the same node service"),
    "disk": ("4 disk", "after kill -9 of vLLM and the node service, memory always empty"),
    "control": ("5 control", "vLLM without KVHaven"),
}
_SOURCES = ("computed", "engine", "memory", "disk")


@dataclass(frozen=True)
class Row:
    """A row of the table.

    `reads_from` is the required source of its prompts' KV (None: computed), `wanted_speedup` the
    target. In every row the answers are to the questions in order, possibly several times.
    """

    name: str
    answers: Sequence[Answer]
    cold: Sequence[Answer]
    control: Sequence[Answer]
    reads_from: str | None
    wanted_speedup: float | None

    @classmethod
    def of(
        cls,
        name: str,
        answers: Mapping[str, Sequence[Answer]],
        *,
        reads_from: str | None,
        wanted_speedup: float | None = None,
    ) -> Self:
        """Return the row of that name."""
        return cls(
            name, answers[name], answers["cold"], answers["control"], reads_from, wanted_speedup
        )

    @property
    def ttft(self) -> float:
        """Median seconds to the first token."""
        return _median_ttft(self.answers)

    @property
    def speedup(self) -> float:
        """Cold time to first token divided by this row's."""
        return _median_ttft(self.cold) / self.ttft

    @property
    def identical(self) -> bool:
        """Whether every output equals the control's to the same question, token by token."""
        return all(
            answer.tokens == self.control[index % len(self.control)].tokens
            for index, answer in enumerate(self.answers)
        )

    @property
    def tokens_by_source(self) -> dict[str, int]:
        """Sources of a prompt's tokens, of the first prompt if they differ."""
        return {source: self.answers[0].sources[source] for source in _SOURCES}

    def problems(self, chunk: int) -> list[str]:
        """Return the violated requirements as text; chunks have `chunk` tokens."""
        found = []
        if not self.identical:
            found.append(f"{self.name}: an output differs from the control's")
        for number, answer in enumerate(self.answers, 1):
            place = f"{self.name}, question {number}"
            if sum(answer.sources.values()) != answer.prompt_tokens:
                found.append(f"{place}: {answer.sources} is not {answer.prompt_tokens} tokens")
            found += [f"{place}: {wrong}" for wrong in self._misses(answer, chunk)]
        return found

    def _misses(self, answer: Answer, chunk: int) -> list[str]:
        """Return the violated requirements on the sources of a prompt's tokens.

        Of KV from disk, the first chunks may count as memory: KVHaven begins to promote them
        when the request comes, before the engine asks for them.
        """
        # The engine computes the last token in any case.
        full = (answer.prompt_tokens - 1) // chunk * chunk if self.reads_from else 0
        wrong = []
        cached = answer.prompt_tokens - answer.sources["computed"]
        if cached != full:
            wrong.append(f"{cached} tokens were not computed instead of {full}: {answer.sources}")
        allowed = {None: (), "memory": ("memory",), "disk": ("disk", "memory")}[self.reads_from]
        unexpected = [name for name in _SOURCES[1:] if answer.sources[name] and name not in allowed]
        if unexpected or (allowed and not answer.sources[allowed[0]]):
            wrong.append(f"tokens came from {answer.sources}, not from {self.reads_from}")
        return wrong

    def as_json(self, commit: str) -> dict[str, object]:
        """Return the row as an object of `build/demo.json`.

        `limit` is the time that the wanted speed-up allows, `ratio` the time used of it.
        """
        limit = _median_ttft(self.cold) / self.wanted_speedup if self.wanted_speedup else None
        return {
            "name": self.name,
            "value": self.ttft,
            "unit": "s",
            "limit": limit,
            "ratio": self.ttft / limit if limit else None,
            "repetitions": len(self.answers),
            "commit": commit,
            "identical": self.identical,
            "tokens_by_source": self.tokens_by_source,
            "speedup": self.speedup,
            "samples": [answer.ttft for answer in self.answers],
        }


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write all rows to a file."""
    commit = current_commit()
    path.write_text(json.dumps([row.as_json(commit) for row in rows], indent=1) + "\n")


def current_commit() -> str:
    """Return the commit that is checked out, with a plus for uncommitted changes; or nothing."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.decode().strip() + ("+" if dirty.stdout.strip() else "")


def print_table(console: Console, rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("first token", justify="right", no_wrap=True)
    table.add_column("speed-up", justify="right", no_wrap=True)
    for source in _SOURCES:
        table.add_column(source, justify="right", no_wrap=True)
    table.add_column("identical", justify="center", no_wrap=True)
    for row in rows:
        table.add_row(
            _TITLES[row.name][0],
            f"{row.ttft:.3f} s",
            f"{row.speedup:.1f}x",
            *(str(count) if count else "[dim]-[/]" for count in row.tokens_by_source.values()),
            "[green]yes[/]" if row.identical else "[bold red]no[/]",
        )
    console.print()
    console.print(table)
    for title, meaning in _TITLES.values():
        console.print(f"  {title:13} {meaning}", soft_wrap=True)
    prompt, output = rows[0].answers[0].prompt_tokens, len(rows[0].answers[0].tokens)
    requests = ", ".join(f"{row.name} {len(row.answers)}" for row in rows)
    console.print(
        f"""
First token: median seconds from handing over the prompt ({prompt} tokens) to the first token.
Requests: {requests}; each alone, with vLLM's own prefix cache
emptied before. Speed-up: against cold. Then: where the KV of the prompt's tokens came from;
"engine" is vLLM's own prefix cache. Identical: all {output} output tokens equal those of control,
in every answer.
All figures are in build/demo.json.""",
        soft_wrap=True,
    )


def print_usage(console: Console) -> None:
    """Print how to use KVHaven with another model."""
    console.print(
        """
[bold]With your own model[/], in the environment where vLLM and KVHaven are installed:

  vllm serve MODEL --kv-transfer-config \\
    '{"kv_connector":"KVHavenConnector","kv_role":"kv_both"}'

That keeps KV in host memory while the engine runs. To share it between engines and to keep it
over restarts, start a node service and name it:

  KVHAVEN_LOCAL_DISK=/var/cache/kvhaven KVHAVEN_MAX_LOCAL_CPU_SIZE=20GiB \\
    kvhaven serve --socket "$HOME/.kvhaven/service.sock"
  vllm serve MODEL --kv-transfer-config \\
    '{"kv_connector":"KVHavenConnector","kv_role":"kv_both","kv_connector_extra_config":
      {"service_address":"'"$HOME"'/.kvhaven/service.sock"}}'

`kvhaven status --socket ...` shows what it holds, `kvhaven config show` every setting.""",
        markup=True,
        soft_wrap=True,
    )


def _median_ttft(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.ttft for answer in answers)
