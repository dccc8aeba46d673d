# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: the prefill's and the decode's, and digests of the prompt's prefixes."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec
import xxhash

TWO_STEP: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Paths of requests that have a prompt."""

_PIECE: Final = 512
"""Bytes of text between two digests."""
_MOST_DIGESTS: Final = 4096
"""Digests of a prompt; the text behind them is not looked at."""
_CONTEXT: Final = (
    *("model", "cache_salt", "tools", "system", "instructions", "documents"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "mm_processor_kwargs"),
)
"""Fields besides the text that are part of a prompt, or of its identity."""
_TEXTS: Final = ("messages", "input", "prompt")
_MEDIA: Final = b";base64,"
_LONG: Final = 1 << 12
_MEDIA_TEXT: Final = 1 << 12
"""Bytes of text that a message with an image or a recording counts as: about 1,000 tokens."""
_DROPPED: Final = (
    *("stream_options", "min_tokens", "best_of", "response_format", "structured_outputs"),
    *("logprobs", "top_logprobs", "echo", "store", "background"),
)
"""Fields that only concern the answer; some of them forbid an answer of one token."""
_PROMPT_ANSWERS: Final = ("prompt_logprobs", "echo")
"""Fields that make the decode node compute the whole prompt itself."""
_MOST_TOKENS: Final = ("max_completion_tokens", "max_output_tokens")

Fields = dict[str, msgspec.Raw]

_decode_fields: Final = msgspec.json.Decoder(Fields).decode
_decode_list: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_ONE: Final = msgspec.Raw(b"1")
_FALSE: Final = msgspec.Raw(b"false")


class RequestBody:
    """A JSON object whose values stay as the client wrote them, except for those replaced.

    Raises `ValueError` if the bytes are not a JSON object.
    """

    def __init__(self, path: str, raw: bytes) -> None:
        self.path = path
        self.raw = raw
        try:
            self._fields = _decode_fields(raw)
            self._parts = [*_parts(self._fields)]
            self._params = self._value("kv_transfer_params")
            self.divisible = not any(self._value(name) for name in _PROMPT_ANSWERS)
            """Whether a prefill on another node can help: the answer says nothing of the prompt."""
            self.text_bytes = sum(map(_text_length, self._parts))
            """The size of the prompt's text in bytes, as far as it becomes tokens."""
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise ValueError(f"not a JSON object: {error}") from error

    def digests(self) -> list[bytes]:
        """Return a digest of each prefix of the prompt: after each message, and each 512 bytes."""
        hashed = xxhash.xxh3_128(self.path.encode())
        for name in _CONTEXT:
            hashed.update(name.encode() + b"=" + bytes(self._fields.get(name, b"")))
        digests = []
        for piece in islice(self._pieces(), _MOST_DIGESTS):
            hashed.update(piece)
            digests.append(hashed.digest())
        return digests

    def for_prefill(self, to: str) -> bytes:
        """Return the body for the prefill node: one token, and no stream.

        The node at `to` is told of the prompt's chunks.
        """
        fields = {name: value for name, value in self._fields.items() if name not in _DROPPED}
        if self.path != "/v1/responses":
            fields["max_tokens"] = _ONE
        for name in _MOST_TOKENS:
            if name in fields or (name, self.path) == ("max_output_tokens", "/v1/responses"):
                fields[name] = _ONE
        fields["store"] = _FALSE  # the default is to keep the answer
        if "n" in fields:
            fields["n"] = _ONE
        fields["stream"] = _FALSE
        params = {"do_remote_decode": True, "do_remote_prefill": False, "kvhaven.to": to}
        return self._with_params(fields, params)

    def for_decode(self, params: Mapping[str, Any]) -> bytes:
        """Return the body for the decode node, with the prefill node's parameters, if any."""
        return self._with_params(dict(self._fields), params) if params else self.raw

    def _with_params(self, fields: Fields, params: Mapping[str, Any]) -> bytes:
        own = self._params if isinstance(self._params, dict) else {}
        merged = {**own, **{name: value for name, value in params.items() if value is not None}}
        fields["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode(merged))
        return msgspec.json.encode(fields)

    def _value(self, name: str) -> Any:  # any JSON value
        raw = self._fields.get(name)
        return msgspec.json.decode(raw) if raw is not None else None

    def _pieces(self) -> Iterator[memoryview]:
        for raw in self._parts:
            part = memoryview(raw)  # no sooner: for all of 200,000 messages it takes 0.2 s
            for start in range(0, len(part), _PIECE):
                yield part[start : start + _PIECE]


def _parts(fields: Fields) -> Iterator[msgspec.Raw]:
    """Yield the messages of a chat, or the whole prompt, as JSON."""
    for name in _TEXTS:
        raw = fields.get(name)
        if raw is not None:
            listed = bytes(memoryview(raw)[:2]) == b"[{"
            yield from _decode_list(raw) if listed else [raw]


def _text_length(part: msgspec.Raw) -> int:
    """Return the bytes of text that a part of a prompt counts as."""
    coded = len(part) > _LONG and _MEDIA in bytes(part)
    return _MEDIA_TEXT if coded else len(part)
