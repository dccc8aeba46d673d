# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server that answers as a test says: what no real S3 server can be made to say."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What the server says: `length` is what it claims of the body, if that is not its own."""

    status: int = 200
    body: bytes = b""
    length: int | None = None
    hang: bool = False


def error(code: str, status: int, message: str = "said the server") -> Answer:
    """Return an error in S3's form."""
    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, text.encode())


class ScriptedServer:
    """Answers with what `script(method, path)` returns, and notes the requests."""

    def __init__(self, script: Callable[[str, str], Answer]) -> None:
        self.script = script
        self.requests: list[tuple[str, str]] = []
        self.authorizations: list[str] = []
        self.hanging = threading.Event()
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                scripted.requests.append((self.command, self.path))
                scripted.authorizations.append(self.headers.get("authorization") or "")
                answer = scripted.script(self.command, self.path)
                if answer.hang:
                    scripted.hanging.wait(30)
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                length = len(answer.body) if answer.length is None else answer.length
                self.send_header("content-length", str(length))
                self.send_header("last-modified", "Sat, 21 Nov 2026 00:00:00 GMT")
                self.send_header("etag", '"1"')
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)
                self.close_connection = length != len(answer.body)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - its names

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator["ScriptedServer"]:
        """Serve until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.hanging.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()
