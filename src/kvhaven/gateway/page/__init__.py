# SPDX-License-Identifier: Apache-2.0
"""The dashboard: static files without any data, which reads the API as any other client does."""

import hashlib
from importlib import resources
from typing import Final

from aiohttp import web

FILES: Final = {
    "/": ("dashboard.html", "text/html"),
    "/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard.js": ("dashboard.js", "text/javascript"),
}
"""File and media type of each path."""
_HEADERS: Final = {
    # Everything comes from this API, and no text that it answers can become markup or code.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cache-Control": "no-cache",
}


class Page:
    """The files of the dashboard, read once. They are the same for every client."""

    def __init__(self) -> None:
        folder = resources.files(__name__)
        self._files = {path: (folder / name).read_bytes() for path, (name, _) in FILES.items()}
        self._tags = {
            path: hashlib.sha256(body).hexdigest()[:16] for path, body in self._files.items()
        }

    async def answer(self, request: web.Request, path: str) -> web.Response:
        """Return the file of a path, or that it has not changed."""
        tag = self._tags[path]
        if any(known.value in {tag, "*"} for known in request.if_none_match or ()):
            answer = web.Response(status=304, headers=_HEADERS)
        else:
            kind = FILES[path][1]
            answer = web.Response(
                body=self._files[path], content_type=kind, charset="utf-8", headers=_HEADERS
            )
        answer.etag = tag
        return answer
