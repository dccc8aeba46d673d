# SPDX-License-Identifier: Apache-2.0
"""An engine's HTTP server, as far as the API asks it: texts of prompts, and prompts to compute."""

from typing import Any, Final

import aiohttp
import msgspec

from kvhaven.errors import KVHavenError
from kvhaven.gateway.models import TokenIds

_TOKENIZE_S: Final = 10.0
_COMPUTE_S: Final = 120.0


class EngineServer:
    """OpenAI-compatible server at `url` (the setting `plugin_engine_url`; None: there is none)."""

    def __init__(self, url: str | None) -> None:
        self._url = (url or "").rstrip("/")

    @property
    def known(self) -> bool:
        """Whether there is a server."""
        return bool(self._url)

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, at least one.

        Raises `KVHavenError` if there is no server, it fails, or it gives none.
        """
        if not self._url:
            raise KVHavenError(
                "a text needs plugin_engine_url, whose engine tokenizes it; give token ids, or "
                "set it"
            )
        answer = await self._post("/tokenize", _TOKENIZE_S, prompt=text)
        return token_ids(answer.get("tokens"))

    async def compute(self, tokens: list[int]) -> None:
        """Have the engine compute a prompt. Raises `KVHavenError` if it fails."""
        await self._post("/v1/completions", _COMPUTE_S, prompt=tokens, max_tokens=1, temperature=0)

    async def _post(self, path: str, timeout_s: float, **body: object) -> dict[str, Any]:
        url = f"{self._url}{path}"
        limits = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=limits) as session,
                session.post(url, json=body) as answer,
            ):
                if answer.status != 200:  # noqa: PLR2004  OK
                    raise KVHavenError(f"{url} answered {answer.status}")
                found = msgspec.convert(await answer.json(), dict[str, Any])
        except (aiohttp.ClientError, TimeoutError, ValueError, msgspec.ValidationError) as error:
            raise KVHavenError(f"{url}: {str(error) or 'no answer in time'}") from error
        return found


def token_ids(given: object) -> list[int]:
    """Return the token ids of a prompt. Raises `KVHavenError` if they are none."""
    try:
        found = msgspec.convert(given, TokenIds)
    except msgspec.ValidationError as error:
        raise KVHavenError(f"prompt: expected a text or token ids ({error})") from error
    if not found:
        raise KVHavenError("prompt: it has no tokens")
    return found
