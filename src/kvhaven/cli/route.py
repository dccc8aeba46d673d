# SPDX-License-Identifier: Apache-2.0
"""`kvhaven route`: one OpenAI-compatible address for prefill and decode nodes."""

from typing import Annotated

import typer

from kvhaven.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add `route` to the command line."""
    app.command()(route)


def route(
    decode: Annotated[
        list[str],
        typer.Option(help="URL of a vLLM server that answers; repeat it for several."),
    ],
    prefill: Annotated[
        list[str] | None,
        typer.Option(help="URL of a vLLM server that computes prompts; repeat it for several."),
    ] = None,
    listen: Annotated[str, typer.Option(help="Address of the router.")] = "127.0.0.1:8080",
    pd_min_tokens: Annotated[
        int, typer.Option(min=0, help="Prompts with fewer uncached tokens are not prefilled apart.")
    ] = 0,
    prefill_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a prefill; then the decode node does it.")
    ] = 120.0,
    health_interval: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two checks of a node.")
    ] = 1.0,
    health_timeout: Annotated[
        float, typer.Option(min=0.05, help="Seconds for the answer to a check.")
    ] = 1.0,
    health_failures: Annotated[
        int, typer.Option(min=1, help="Failed checks in a row after which a node is out of use.")
    ] = 3,
) -> None:
    """Serve the OpenAI API over prefill and decode nodes.

    A URL may be followed by =HOST:PORT, the peer_listen address of the node; the default is the
    URL's host and port 7420. It is needed at --decode, so that KV moves while it is computed.
    """
    import logging  # noqa: PLC0415 - keeps other commands quick

    try:
        from kvhaven.router.main import serve  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"kvhaven route needs the package {error.name}; install it with: "
            "pip install 'kvhaven[router]'"
        ) from error

    from kvhaven.peers.addresses import parse_address  # noqa: PLC0415
    from kvhaven.router.choice import Chooser  # noqa: PLC0415
    from kvhaven.router.nodes import HealthPolicy, parse_node  # noqa: PLC0415

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    address = parse_address(listen, "--listen")
    chooser = Chooser(
        [parse_node(text, "--prefill") for text in prefill or ()],
        [parse_node(text, "--decode") for text in decode],
        pd_min_tokens,
    )
    health = HealthPolicy(health_interval, health_timeout, health_failures)
    logging.getLogger(__name__).info(
        "router: listening at %s, %d prefill and %d decode nodes",
        address,
        len(chooser.prefill),
        len(chooser.decode),
    )
    serve(address, chooser, health, prefill_timeout)
