# SPDX-License-Identifier: Apache-2.0
"""`kvhaven tier`: maintenance of a shared tier from any machine with access to its store."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from kvhaven.cli.tenant import Tenant, tenant_of
from kvhaven.cli.text import age_text, size_text
from kvhaven.errors import ConfigError, KVHavenError

if TYPE_CHECKING:
    from kvhaven.config import Settings
    from kvhaven.tiers.shared.maintenance import FolderUsage, Removed
    from kvhaven.tiers.shared.store import SharedStore

T = TypeVar("T")

_CLOSE_S = 5.0

commands = typer.Typer(
    no_args_is_help=True,
    help="Maintain a shared tier from any machine, while services use it.",
)

Url = Annotated[
    str, typer.Argument(help="Path, or fs://, s3:// or redis:// URL; default: remote_url.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add `tier` to the command line."""
    app.add_typer(commands, name="tier")


@commands.command()
def usage(url: Url = "", *, as_json: AsJson = False) -> None:
    """Show the usage of the store by namespace."""
    import msgspec  # noqa: PLC0415 - keeps other commands quick

    from kvhaven.tiers.shared import maintenance as tools  # noqa: PLC0415

    rows = _with_store(url, tools.usage)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return
    _print(rows)


@commands.command()
def verify(
    url: Url = "",
    *,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove damaged shards, for all nodes.")
    ] = False,
) -> None:
    """Read and verify every byte of the store. Exit status 1 if there are problems.

    Foreign files are reported and never removed. Nodes detect truncated, corrupt and misplaced
    shards themselves when they read them, and never serve them.
    """
    from kvhaven.tiers.shared.maintenance import audit  # noqa: PLC0415
    from kvhaven.tiers.shared.store import blob_name  # noqa: PLC0415

    async def run(store: "SharedStore") -> tuple[int, int, int, int]:
        right = bytes_ = wrong = removed = 0
        async for found in audit(store):
            if not found.problem:
                right += 1
                bytes_ += found.size
                continue
            wrong += 1
            typer.echo(found.problem)
            if remove and found.shard is not None:
                await store.remove([blob_name(found.shard)])
                removed += 1
        return right, bytes_, wrong, removed

    right, bytes_, wrong, removed = _with_store(url, run)
    typer.echo(f"{right} shards verified, {size_text(bytes_)}; {wrong} problems")
    if removed:
        typer.echo(f"removed {removed} damaged shards")
    if wrong > removed:
        raise typer.Exit(1)


@commands.command()
def gc(
    url: Url = "",
    *,
    max_size: Annotated[
        str, typer.Option(help="Size limit of all shards; default: max_remote_size.")
    ] = "",
    max_namespace_size: Annotated[
        str, typer.Option(help="Size limit of each namespace; default: max_remote_namespace_size.")
    ] = "",
    ttl_s: Annotated[
        float | None,
        typer.Option(min=0, help="Remove entries unused for this long; default: remote_ttl_s."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be removed.")
    ] = False,
) -> None:
    """Remove expired shards, the least recently used ones above the limits, and leftovers.

    Leftovers are old temporary files and files of an impossible size. Services enforce the limits
    of a directory periodically; this command does so immediately. The limits of a bucket are
    enforced only by this command. Redis expires and evicts by itself.
    """
    from kvhaven.config import load_settings  # noqa: PLC0415
    from kvhaven.tenants import quotas_of  # noqa: PLC0415
    from kvhaven.tiers.filesystem.usage import Limits  # noqa: PLC0415
    from kvhaven.tiers.shared import maintenance as tools  # noqa: PLC0415

    settings = load_settings().settings
    limits = Limits(
        _size("--max-size", max_size) or settings.max_remote_size,
        _size("--max-namespace-size", max_namespace_size) or settings.max_remote_namespace_size,
        settings.remote_ttl_s if ttl_s is None else ttl_s,
        quotas_of(settings.tenant_remote),
    )

    async def run(store: "SharedStore") -> "Removed":
        if store.name == "redis":
            raise ConfigError(
                "Redis expires and evicts by itself; set its maxmemory and maxmemory-policy, and "
                "remote_ttl_s"
            )
        return await tools.collect(store, limits, dry_run=dry_run)

    done = _with_store(url, run)
    if not limits.any:
        typer.echo(
            "no limit is set (--max-size, --max-namespace-size, --ttl-s): removing leftovers only"
        )
    _tell("would remove" if dry_run else "removed", done)


@commands.command()
def rm(
    url: Url = "",
    *,
    namespace: Annotated[
        str, typer.Option(help="Digest of a namespace, or its first digits, as shown by `usage`.")
    ] = "",
    tenant: Tenant = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all namespaces and tenants.")
    ] = False,
) -> None:
    """Remove a namespace, a tenant, or all, for all nodes. Later requests compute the KV again."""
    from kvhaven.tiers.shared import maintenance as tools  # noqa: PLC0415
    from kvhaven.tiers.shared.store import tenant_of as owner_of  # noqa: PLC0415

    if bool(namespace or tenant) == everything:
        raise KVHavenError("specify what to remove: --namespace, --tenant, or --all")
    owner = tenant_of(tenant) if tenant else None

    async def run(store: "SharedStore") -> "Removed":
        folders = await store.folders()
        spaces = sorted({folder.partition(".")[0] for folder in folders})
        chosen = [space for space in spaces if space.startswith(namespace.lower()[:16])]
        if namespace and len(chosen) != 1:
            raise KVHavenError(
                f"{len(chosen)} namespaces start with {namespace!r}; known: "
                f"{', '.join(spaces) or 'none'}"
            )
        found = [folder for folder in folders if folder.partition(".")[0] in chosen]
        return await tools.empty(
            store, [folder for folder in found if owner in {None, owner_of(folder)}]
        )

    _tell("removed", _with_store(url, run))


def _with_store(url: str, work: "Callable[[SharedStore], Awaitable[T]]") -> T:
    """Open the store at `url` (default: `remote_url`) and return the result of `work`."""
    import asyncio  # noqa: PLC0415

    from kvhaven.config import load_settings  # noqa: PLC0415
    from kvhaven.service.tier_setup import store_at  # noqa: PLC0415

    settings = load_settings().settings
    store = store_at(_one_url(url, settings), settings)

    async def run() -> T:
        try:
            await store.open()
            return await work(store)
        finally:
            await store.close(_CLOSE_S)

    return asyncio.run(run())


def _one_url(url: str, settings: "Settings") -> str:
    from kvhaven.config.urls import parse_urls, redacted  # noqa: PLC0415

    urls = (settings.remote_url or "").split()
    if url:
        try:
            urls = parse_urls(url).split()
        except ValueError as error:
            raise ConfigError(
                f"{redacted(url)!r} is not a shared tier: {error}; allowed: a path, "
                f"fs:///path, s3://bucket/prefix, redis://host:port"
            ) from error
    if len(urls) != 1:
        there = ", ".join(redacted(one) for one in urls) or "none"
        raise ConfigError(f"specify one shared tier as URL; remote_url has: {there}")
    return urls[0]


def _size(option: str, text: str) -> int | None:
    from kvhaven.config.sizes import parse_size  # noqa: PLC0415

    try:
        return parse_size(text) if text else None
    except ValueError as error:
        raise ConfigError(
            f"{option} {text!r} is refused ({error}); allowed: a size such as 20GiB, 512MiB or "
            f"1.5GB, or a plain number of GiB"
        ) from error


def _tell(verb: str, done: "Removed") -> None:

    typer.echo(
        f"{verb} {done.shards} shards, {size_text(done.bytes)}; left: {done.left_shards}, "
        f"{size_text(done.left_bytes)}"
    )


def _print(rows: "list[FolderUsage]") -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table("namespace", "model", "shards", "bytes", "last used", "foreign")
    for row in rows:
        table.add_row(
            row.folder,
            row.fields.get("model", "no manifest") if row.fields else "[red]no manifest[/]",
            str(row.shards),
            size_text(row.bytes),
            ""
            if row.newest_s is None
            else f"{age_text(row.newest_s)} to {age_text(row.oldest_s or 0)} ago",
            str(row.foreign or ""),
        )
    console = Console()
    console.print(table)
    total = size_text(sum(row.bytes for row in rows))
    console.print(f"{sum(row.shards for row in rows)} shards, {total}", highlight=False)


def _ages(row: "FolderUsage") -> str:
    if row.newest_s is None or row.oldest_s is None:
        return ""
    return f"{age_text(row.newest_s)} to {age_text(row.oldest_s)} ago"
