# SPDX-License-Identifier: Apache-2.0
"""Frames of `kvhaven top`: lines of text that follow from the last snapshots alone."""

import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

from kvhaven.cli.terminal import Line, Span
from kvhaven.cli.text import age_text, size_text
from kvhaven.gateway.models import Check, TierRow
from kvhaven.gateway.views import checks_of, memory_of, state_of, tier_state_of, tiers_of, tokens_of
from kvhaven.service.accounts import RequestRow
from kvhaven.service.snapshot import EngineRow, ServiceSnapshot, TenantRow

T = TypeVar("T")
Table = Literal["tiers", "engines", "requests", "tenants"]
Row = EngineRow | RequestRow | TenantRow
TABLES: Final[Sequence[Table]] = ("tiers", "engines", "requests", "tenants")
HELP: Final = "q quit  t table  s sort  p pause"
_BAR: Final = 30
_LEAST_BAR: Final = 12
_NOTHING: Final[Line] = ()
_MOST_CELL: Final = 40


class Moment(NamedTuple):
    """A snapshot, and when it arrived, in seconds of any clock."""

    at: float
    snapshot: ServiceSnapshot


class View(NamedTuple):
    """All that a frame shows.

    `moments` are of one service, oldest first: the rates are between the first and the last one.
    `rows` are those of `table`, if it is not that of the tiers; `sort` is the column by which they
    are sorted, if any, see `sort_columns`. `error` says why there is no newer
    snapshot.
    """

    address: str
    moments: Sequence[Moment]
    table: Table
    rows: Sequence[Row]
    error: str = ""
    paused: bool = False
    now: float = 0.0
    """Seconds since 1970."""
    sort: str = ""


def sort_columns(table: Table) -> Sequence[str]:
    """Return the columns by which a table can be sorted."""
    return list(_SORTS[table])


def frame(view: View, width: int, height: int | None) -> list[Line]:
    """Return the lines of a frame, at most `height` (None: all); they may exceed `width`."""
    if not view.moments:
        return [[("KVHaven", "bold"), (f" {view.address}", "")], [(clean(view.error), "warn")]]
    lines = [_title(view, width), *_attention(view), *_tokens(view, width), *_memory(view, width)]
    lines += [_NOTHING, *_table(view, width)]
    if height is not None and len(lines) < height:
        lines += [_NOTHING] * (height - len(lines) - 1)
        lines.append([(HELP, "dim")])
    return lines[:height]


def line_of(view: View) -> str:
    """Return the figures of a second in one line, for logs."""
    when = time.strftime("%H:%M:%S", time.localtime(view.now))
    if view.error or not view.moments:
        return f"{when} {clean(view.error)}"
    snapshot = view.moments[-1].snapshot
    found = tokens_of(snapshot)
    memory = memory_of(snapshot)
    recent = _share(_sources(view.moments))
    parts = [
        f"{when} {state_of(snapshot)}",
        f"engines {snapshot.engines}",
        f"tokens/s {_rate(view.moments)}",
        f"found {_percent(recent)} (total {_percent(_share(found.by_source))})",
        f"memory {_percent((memory.capacity - memory.free) / max(1, memory.capacity))}",
    ]
    parts += [f"{check.name}: {clean(check.detail)}" for check in _failed(snapshot)]
    return ", ".join(parts)


def clean(text: str) -> str:
    """Return a text of others without control characters, and with one column a character.

    Names of models and errors come from elsewhere: escape sequences must not reach the terminal.
    """
    return "".join(
        char
        if char.isprintable()
        and unicodedata.east_asian_width(char) not in "WF"
        and not unicodedata.combining(char)
        else "?"
        for char in text
    )


# --- parts ----------------------------------------------------------------------------------


def _title(view: View, width: int) -> Line:
    last = view.moments[-1].snapshot
    state = "no answer" if view.error else state_of(last)
    style = {"ok": "good", "degraded": "warn"}.get(state, "bad")
    engines = f"{last.engines} engine{'s' if last.engines != 1 else ''}"
    left: list[Span] = [
        (f"KVHaven {clean(last.version)}", "bold"),
        (f" {last.service[:8]}  ", ""),
        (state, style),
        (f"  {engines}  up {age_text(max(0.0, view.now - last.started))}", ""),
    ]
    if view.paused:
        left.append(("  paused", "warn"))
    right = time.strftime("%H:%M:%S", time.localtime(view.now))
    gap = width - sum(len(text) for text, _ in left) - len(right)
    return [*left, (" " * gap + right, "dim")] if gap > 1 else left


def _attention(view: View) -> Iterator[Line]:
    if view.error:
        yield [("! ", "bad"), (clean(view.error), "bad")]
        return
    for check in _failed(view.moments[-1].snapshot):
        yield [("! ", "warn"), (f"{check.name}: {clean(check.detail)}", "warn")]


def _tokens(view: View, width: int) -> Iterator[Line]:
    last = view.moments[-1].snapshot
    total, recent = tokens_of(last), _sources(view.moments)
    shown = recent if sum(recent.values()) else total.by_source
    when = f"in {_span(view.moments):.0f} s" if shown is recent else "since start"
    yield [
        ("Prompt tokens ", "bold"),
        (f"{_percent(_share(shown))} found {when}", ""),
        (f", {_percent(_share(total.by_source))} in all, {_rate(view.moments)}/s", ""),
    ]
    asked = sum(shown.values())
    if not asked:
        yield [("  none yet", "dim")]
        return
    bar = _bar_of(width)
    for name, tokens in shown.items():
        if tokens or name in {"memory", "none"}:
            style = "warn" if name == "none" else "good"
            yield _bar(f"  {clean(name):<10}", tokens / asked, bar, style, _short(tokens))
    missed = {reason: tokens for reason, tokens in total.missed_by_reason.items() if tokens}
    if missed:
        whole = sum(missed.values())
        ordered = sorted(missed.items(), key=lambda item: -item[1])
        parts = "  ".join(f"{reason} {_percent(tokens / whole)}" for reason, tokens in ordered)
        yield [("Missed since start  ", "bold"), (parts, "")]


def _memory(view: View, width: int) -> Iterator[Line]:
    found = memory_of(view.moments[-1].snapshot)
    used = found.capacity - found.free
    share = used / found.capacity if found.capacity else 0.0
    figures = f"{size_text(used)} of {size_text(found.capacity)}"
    yield _bar("Memory      ", share, _bar_of(width), "good", figures)
    states = {
        "idle": found.idle,
        "leased": found.leased,
        "pinned": found.pinned,
        "promoting": found.promoting,
        "reserved": found.reserved,
        "quarantined": found.quarantined,
        "doomed": found.doomed,
    }
    parts = [f"{name} {size_text(size)}" for name, size in states.items() if size]
    if parts:
        yield [("  " + "  ".join(parts), "")]


def _table(view: View, width: int) -> list[Line]:
    if view.table == "tiers":
        head = ["TIER", "STATE", "USED", "READ/S", "WRITE/S", "QUEUED", "DROPPED", "REJECTED"]
        head += ["ERRORS"]
        rates = _traffic(view.moments)
        tiers = _sorted(tiers_of(view.moments[-1].snapshot), view)
        cells = [_tier(row, rates) for row in tiers]
    else:
        kinds: Mapping[str, type] = {
            "engines": EngineRow,
            "requests": RequestRow,
            "tenants": TenantRow,
        }
        heads = {
            "engines": ["ENGINE", "MODEL", "CHUNK", "RANKS", "FORMAT", "DTYPE", "SINCE"],
            "requests": ["REQUEST", "TOKENS", "FOUND", "WHY", "FIRST GAP", "WAIT", "SOURCES"],
            "tenants": ["TENANT", "MEMORY", "TIERS", "QUOTAS"],
        }
        head = heads[view.table]
        rows = [row for row in view.rows if isinstance(row, kinds[view.table])]
        cells = [_cells(row, view.now) for row in _sorted(rows, view)]
    head = [f"{name} v" if name == view.sort else name for name in head]
    if not cells:
        return [[(f"{view.table}: none", "dim")]]
    return _columns(head, cells, width)


def _sorted(rows: Sequence[T], view: View) -> Sequence[T]:
    key = _SORTS[view.table].get(view.sort)
    return rows if key is None else sorted(rows, key=key, reverse=True)


def _tier(row: TierRow, rates: Mapping[tuple[str, str], float]) -> list[str]:
    used = "shared"
    if row.used_bytes is not None and row.capacity_bytes is not None:
        used = f"{size_text(row.used_bytes)} of {size_text(row.capacity_bytes)}"
    return [
        clean(row.id),
        tier_state_of(row),
        used,
        size_text(rates.get((row.id, "read"), 0.0)),
        size_text(rates.get((row.id, "write"), 0.0)),
        str(row.queued_writes),
        str(row.dropped_writes),
        str(row.rejected),
        str(row.errors),
    ]


def _cells(row: Row, now: float) -> list[str]:
    if isinstance(row, EngineRow):
        return [
            clean(row.id),
            clean(row.model or "?"),
            str(row.chunk_tokens or "?"),
            f"{row.attached_ranks} of {row.world_size}",
            clean(row.format or "paged"),
            clean(row.dtype or "?"),
            age_text(max(0.0, now - row.since)),
        ]
    if isinstance(row, RequestRow):
        return [
            clean(row.request or row.id.lstrip("0")),
            str(row.prompt_tokens),
            _percent(_found(row)),
            row.reason or "-",
            "-" if row.first_gap is None else str(row.first_gap),
            f"{row.wait_ms:.1f} ms",
            " ".join(f"{name} {tokens}" for name, tokens in row.by_source.items()),
        ]
    tiers = [f"{name} {size_text(size)}" for name, size in row.bytes.items() if name != "memory"]
    quotas = [f"{name} {size_text(size)}" for name, size in row.quotas.items()]
    memory = size_text(row.bytes.get("memory", 0))
    return [row.id, memory, clean(" ".join(tiers)), clean(" ".join(quotas)) or "-"]


def _found(row: RequestRow) -> float:
    """Return the share of a request's tokens that were found."""
    none = row.by_source.get("none", 0)
    return (row.prompt_tokens - none) / row.prompt_tokens if row.prompt_tokens else 0.0


def _columns(head: list[str], rows: list[list[str]], width: int) -> list[Line]:
    """Return a table; columns that do not fit are left out, from the right."""
    table = [[cell[:_MOST_CELL] for cell in row] for row in (head, *rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(head))]
    count, used = 1, widths[0]
    while count < len(head) and used + 2 + widths[count] <= width:
        used += 2 + widths[count]
        count += 1
    lines = ["  ".join(row[at].ljust(widths[at]) for at in range(count)) for row in table]
    return [[(lines[0].ljust(width), "head")], *([(line, "")] for line in lines[1:])]


# --- figures --------------------------------------------------------------------------------


def _failed(snapshot: ServiceSnapshot) -> list[Check]:
    return [check for check in checks_of(snapshot) if not check.ok]


def _span(moments: Sequence[Moment]) -> float:
    return moments[-1].at - moments[0].at


def _sources(moments: Sequence[Moment]) -> dict[str, int]:
    """Return the tokens by source between the first moment and the last."""
    before = tokens_of(moments[0].snapshot).by_source
    now = tokens_of(moments[-1].snapshot).by_source
    return {name: max(0, tokens - before.get(name, 0)) for name, tokens in now.items()}


def _rate(moments: Sequence[Moment]) -> str:
    seconds = _span(moments)
    return _short(sum(_sources(moments).values()) / seconds) if seconds > 0 else "-"


def _traffic(moments: Sequence[Moment]) -> dict[tuple[str, str], float]:
    """Return bytes a second by tier and operation."""
    seconds = _span(moments)
    if seconds <= 0:
        return {}
    before, now = moments[0].snapshot.traffic, moments[-1].snapshot.traffic
    return {
        (tier, op): max(0, traffic.bytes - before[tier][op].bytes) / seconds
        for tier, ops in now.items()
        for op, traffic in ops.items()
        if tier in before and op in before[tier]
    }


def _share(by_source: Mapping[str, int]) -> float | None:
    """Return the share of tokens that were found; None without any tokens."""
    asked = sum(by_source.values())
    return 1 - by_source.get("none", 0) / asked if asked else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 1000:  # noqa: PLR2004 - the units' base
            return f"{number:.0f}{unit}" if not unit or number >= 100 else f"{number:.1f}{unit}"  # noqa: PLR2004
        number /= 1000
    return f"{number:.1f}T"


def _bar_of(width: int) -> int:
    """Return the length of bars; 0 in a terminal that is too narrow for them."""
    room = min(_BAR, width - 40)
    return room if room >= _LEAST_BAR else 0


def _bar(name: str, share: float, length: int, style: str, figures: str) -> Line:
    filled = round(length * min(1.0, max(0.0, share)))
    bar: list[Span] = [("[", ""), ("#" * filled, style), ("." * (length - filled) + "] ", "")]
    return [(name, "bold"), *(bar if length else ()), (f"{share:>4.0%}  {figures}", "")]


_TIER_SORTS: Final[Mapping[str, Callable[[TierRow], float]]] = {
    "USED": lambda row: row.used_bytes or 0,
    "QUEUED": lambda row: row.queued_writes,
    "DROPPED": lambda row: row.dropped_writes,
    "REJECTED": lambda row: row.rejected,
    "ERRORS": lambda row: row.errors,
}
_ENGINE_SORTS: Final[Mapping[str, Callable[[EngineRow], float]]] = {
    "RANKS": lambda row: row.world_size,
    "SINCE": lambda row: -row.since,
}
_REQUEST_SORTS: Final[Mapping[str, Callable[[RequestRow], float]]] = {
    "TOKENS": lambda row: row.prompt_tokens,
    "FOUND": _found,
    "WAIT": lambda row: row.wait_ms,
}
_TENANT_SORTS: Final[Mapping[str, Callable[[TenantRow], float]]] = {
    "MEMORY": lambda row: row.bytes.get("memory", 0),
    "TIERS": lambda row: sum(row.bytes.values()) - row.bytes.get("memory", 0),
}
_SORTS: Final[Mapping[Table, Mapping[str, Callable[[Any], float]]]] = {
    "tiers": _TIER_SORTS,
    "engines": _ENGINE_SORTS,
    "requests": _REQUEST_SORTS,
    "tenants": _TENANT_SORTS,
}
"""Columns by which the rows of a table can be sorted, largest value first."""
