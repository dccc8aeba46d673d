# SPDX-License-Identifier: Apache-2.0
"""An engine's HTTP server, as far as the API asks it: texts of prompts, and prompts to compute."""

import asyncio
from typing import Final

import aiohttp
import msgspec

from kvhaven.config.urls import redacted
from kvhaven.errors import KVHavenError, ServiceUnavailableError
from kvhaven.gateway.models import TokenIds

_TOKENIZE_S: Final = 10.0
_COMPUTE_S: Final = 120.0
_MOST_TEXTS: Final = 16
"""Texts that the engine tokenizes at a time; others wait."""
_MOST_BYTES: Final = 64 << 20
_PIECE: Final = 1 << 16
_MOST_SHOWN: Final = 200
"""Bytes of an answer that an error repeats."""


class _Tokenized(msgspec.Struct):
    tokens: TokenIds


class EngineServer:
    """OpenAI-compatible server at `url` (the setting `plugin_engine_url`; None: there is none).

    Methods raise `KVHavenError` if there is no server, and `ServiceUnavailableError` if it fails.
    """

    def __init__(self, url: str | None) -> None:
        self._url = (url or "").rstrip("/")
        self._texts = asyncio.Semaphore(_MOST_TEXTS)

    @property
    def known(self) -> bool:
        """Whether there is a server."""
        return bool(self._url)

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, at least one."""
        if not self._url:
            raise KVHavenError(
                "a text needs plugin_engine_url, whose engine tokenizes it (for the API's own "
                "service only); give token ids, or set it"
            )
        try:
            async with asyncio.timeout(_TOKENIZE_S), self._texts:
                raw = await self._post("/tokenize", _TOKENIZE_S, prompt=text)
        except TimeoutError as error:
            raise self._failure("/tokenize", f"no answer within {_TOKENIZE_S:g} s") from error
        try:
            tokens = msgspec.json.decode(raw, type=_Tokenized).tokens
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._failure("/tokenize", f"it gave no token ids ({error})") from error
        return token_ids(tokens)

    async def compute(self, tokens: list[int]) -> None:
        """Have the engine compute a prompt."""
        await self._post("/v1/completions", _COMPUTE_S, prompt=tokens, max_tokens=1, temperature=0)

    async def _post(self, path: str, timeout_s: float, **body: object) -> bytes:
        limits = aiohttp.ClientTimeout(total=timeout_s)
        found = bytearray()
        try:
            async with (
                aiohttp.ClientSession(timeout=limits) as session,
                session.post(f"{self._url}{path}", json=body, allow_redirects=False) as answer,
            ):
                if answer.status != 200:  # noqa: PLR2004  OK
                    said = (await answer.content.read(_MOST_SHOWN)).decode(errors="replace")
                    reason = f"status {answer.status}, expected 200; it said {said!r}"
                    raise self._failure(path, reason)
                async for piece in answer.content.iter_chunked(_PIECE):
                    found += piece
                    if len(found) > _MOST_BYTES:
                        reason = f"its answer is longer than {_MOST_BYTES} bytes"
                        raise self._failure(path, reason)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._failure(path, str(error) or "no answer in time") from error
        return bytes(found)

    def _failure(self, path: str, reason: str) -> ServiceUnavailableError:
        """Return an error that names the server, without its password."""
        return ServiceUnavailableError(
            redacted(f"{self._url}{path} (setting plugin_engine_url): {reason}")
        )


def token_ids(given: object) -> list[int]:
    """Return the token ids of a prompt. Raises `KVHavenError` if they are none."""
    try:
        found = msgspec.convert(given, TokenIds)
    except msgspec.ValidationError as error:
        raise KVHavenError(f"prompt: expected a text or token ids ({error})") from error
    if not found:
        raise KVHavenError("prompt: it has no tokens")
    return found
