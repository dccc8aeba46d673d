# SPDX-License-Identifier: Apache-2.0
"""Parameters that clients, the router and proxies send with a request, whatever the engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvhaven.engine.requests import MOST_TAGS, Permissions, Transfer

_PREFIXES = ("kvhaven.", "lmcache.")


class RequestParameters:
    """Parameters of one request by name (vLLM's `kv_transfer_params`).

    Clients can send any value in place of the mapping and of each parameter: a value of another
    type than expected is ignored, and nothing raises.
    """

    __slots__ = ("_given",)

    def __init__(self, given: object) -> None:
        self._given: Mapping[str, Any] = given if isinstance(given, Mapping) else {}

    def permissions(self, *, load: bool, save: bool) -> Permissions:
        """Return the transfers that the parameters permit, of those that `load` and `save` do."""
        if _is_on(self._own("skip_save")):
            save = False
        return Permissions(
            load, save, _tags(self._own("tags")), _count(self._own("max_load_tokens"))
        )

    @property
    def transfer(self) -> Transfer:
        """The request's part in prefill and decode on two nodes.

        LMCache's `disagg_spec` is read as well: `receiver_host` and `receiver_init_port` must then
        be the address of a peer.
        """
        to, spec = self._given.get("kvhaven.to"), self._given.get("disagg_spec")
        if to is None and isinstance(spec, Mapping):
            to, port = spec.get("receiver_host"), spec.get("receiver_init_port")
            port = port[0] if isinstance(port, list | tuple) and port else port
            if to and isinstance(to, str) and port and isinstance(port, int | str):
                to = f"{to}:{port}"
        awaited = _is_on(self._given.get("do_remote_prefill"))
        source = self._given.get("kvhaven.from")
        return Transfer(
            to if isinstance(to, str) else "",
            awaited,
            source if isinstance(source, str) else "",
            _is_on(self._given.get("do_remote_decode")),
        )

    def handover(self, request_id: str, service: str) -> dict[str, Any] | None:
        """Parameters for the node that decodes the request; None unless one will.

        `service` is the name of this node's service. The decode node asks it for the chunks, unless
        they were announced and the announcement came first. Two-step proxies pass the parameters
        on. The `remote_*` names are those of vLLM's NIXL connector, which such proxies expect; here
        no block stays reserved for the other node.
        """
        if not _is_on(self._given.get("do_remote_decode")):
            return None
        return {
            **({"kvhaven.from": service} if service else {}),
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": None,
            "remote_block_ids": [],
            "remote_request_id": request_id,
            "remote_host": None,
            "remote_port": None,
        }

    def _own(self, name: str) -> Any:
        """Return a parameter of KVHaven by its name without a prefix; None without one."""
        for prefix in _PREFIXES:
            if prefix + name in self._given:
                return self._given[prefix + name]
        return None


def _is_on(value: Any) -> bool:
    """Return whether a switch is on; JSON clients may also send it as text."""
    if isinstance(value, str):
        return value.strip().lower() in {"true", "1", "yes", "on"}
    return bool(value)


def _count(given: Any) -> int | None:
    """Return a number of tokens; JSON clients may also send it as text. Others are no limit."""
    try:
        return max(0, int(given))
    except (TypeError, ValueError, OverflowError):
        return None


def _tags(given: Any) -> tuple[str, ...]:
    """Return a request's tags; values of other types than text or a list yield none."""
    if not isinstance(given, str | list | tuple):
        return ()
    texts: Sequence[Any] = (given,) if isinstance(given, str) else given
    return tuple(map(str, texts[:MOST_TAGS]))
