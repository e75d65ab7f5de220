"""Serves the page, and tells it what is new, on this machine."""

from __future__ import annotations

import gzip
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from heteropp.board.board import Known, RunBoard
from heteropp.board.page import render
from heteropp.description.files import FileError


class BoardServer(ThreadingHTTPServer):
    """GET / is the page; GET /news?known=[...] what the page does not know yet, as JSON."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, board: RunBoard, host: str, port: int) -> None:
        """Raises FileError where nothing can be served there."""
        self.board = board
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FileError(
                f"port {port} of {host} cannot be served on: {reason}; --port takes another"
            ) from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away midway is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: BoardServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if address.path == "/":
            self._answer(200, "text/html; charset=utf-8", render(None))
        elif address.path == "/news":
            known = _known(address.query, len(self.server.board.runs))
            if known is None:
                self._answer(400, "text/plain", "known is not what this server has told")
            else:
                news = self.server.board.news(known)
                self._answer(200, "application/json", json.dumps(news, separators=(",", ":")))
        elif address.path == "/favicon.ico":
            self._answer(204, "text/plain", "")
        else:
            self._answer(404, "text/plain", "there is only / and /news")

    def _answer(self, code: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(code)
        if len(content) > 4096 and "gzip" in self.headers.get("Accept-Encoding", ""):
            content = gzip.compress(content, 1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _known(query: str, runs: int) -> list[Known] | None:
    """What a page says that it knows, by run; None where it cannot be that."""
    try:
        (text,) = parse_qs(query)["known"]
        known = [Known(**{name: int(n) for name, n in each.items()}) for each in json.loads(text)]
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return (known + [Known()] * runs)[:runs] if len(known) in (0, runs) else None
