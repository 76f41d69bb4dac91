"""The page over HTTP: the same as the file, and renewed while the job runs.

It serves one machine: the loopback address, and only with the token in the URL. Other machines come
through ssh, which brings identity and encryption that this server would have to have itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from rankscope.errors import RankscopeError, SettingError, os_errors_as
from rankscope.record.texts import visible
from rankscope.tree.tracejson import UNREADABLE
from rankscope.words.page.pagecontent import PageContent, page_html, served_data

_HOST: Final = "127.0.0.1"
_TOKEN_BYTES: Final = 18
_LEAST_WAIT_S: Final = 2.0
_MOST_CONNECTIONS: Final = 64
_ROOM_S: Final = 1.0
_SHARE: Final = 4
"""Renewing the page may take a fourth of the time."""
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


class PageSource:
    """Renews the page when it is asked for and something may have changed."""

    def __init__(self, make: Callable[[], tuple[PageContent, bool]]) -> None:
        """Make it once, so that an error of `make` is raised before anything is served. `make`
        returns the page, and whether the job goes on."""
        self._make = make
        self._lock = threading.Lock()
        self._next = 0.0
        self._is_live = True
        self._trouble = ""
        self._content: PageContent | None = None
        self._data, self._tag = b"", ""
        self._renew()
        if self._trouble:
            raise RankscopeError(self._trouble)

    def page(self, connect: str) -> bytes:
        """Return the page as HTML."""
        with self._lock:
            self._renew()
            assert self._content is not None
            return page_html(self._content, connect).encode("utf-8", "xmlcharrefreplace")

    def data(self) -> tuple[bytes, str, str]:
        """Return what the page shows as JSON, its ETag, and why it is not newer, "" where it is."""
        with self._lock:
            self._renew()
            return self._data, self._tag, self._trouble

    def _renew(self) -> None:
        if not self._is_live or time.monotonic() < self._next:
            return
        began = time.monotonic()
        try:
            self._content, self._is_live = self._make()
            self._trouble = ""
        except (RankscopeError, OSError, MemoryError, RecursionError, *UNREADABLE) as error:
            # a folder that was moved, a file that was damaged: what is known stays
            message = " ".join(str(error).split())
            is_ours = isinstance(error, (RankscopeError, OSError))
            self._trouble = visible(message if is_ours else f"{type(error).__name__}: {message}")
        else:
            self._data = served_data(self._content)
            self._tag = f'"{hashlib.sha256(self._data).hexdigest()[:32]}"'
        now = time.monotonic()
        self._next = now + max(_LEAST_WAIT_S, _SHARE * (now - began))


class PageServer(ThreadingHTTPServer):
    """Serves one page until it is closed."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, source: PageSource, *, port: int = 0) -> None:
        """Bind, and choose a token. `port`: 0 for any that is free. SettingError: it cannot be
        bound."""
        self.source, self.token = source, secrets.token_urlsafe(_TOKEN_BYTES)
        self._room = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self.idle: dict[socket.socket, None] = {}
        """Connections that have asked for nothing yet, or for nothing more; the longest first."""
        with os_errors_as(SettingError, f"--port {port}"):
            super().__init__((_HOST, port), _Handler)

    @property
    def port(self) -> int:
        """The port that is served."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """Where the page is, with the token."""
        return f"http://{_HOST}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        """Serve until `close`, or until the process is interrupted."""
        self.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Have a thread answer; where there are too many, the one goes that is idle the longest."""
        if not self._room.acquire(blocking=False):
            with contextlib.suppress(StopIteration, RuntimeError, OSError):
                longest = next(iter(self.idle))
                self.idle.pop(longest, None)
                socket.socket.shutdown(longest, socket.SHUT_RDWR)  # its thread ends
            if not self._room.acquire(timeout=_ROOM_S):  # all are being answered
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Give the thread's room back in the end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer in the thread of the request, and count the connection as idle meanwhile."""
        request.settimeout(30)
        self.idle[request] = None
        try:
            super().finish_request(request, client_address)
        finally:
            self.idle.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "rankscope"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.idle.pop(self.connection, None)
        try:
            self._get()
        finally:
            self.server.idle[self.connection] = None

    def _get(self) -> None:
        try:
            asked, is_ours = urlsplit(self.path), self._is_ours()
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST, b"that is not a URL\n", "text/plain")
            return
        if not is_ours:
            self._answer(HTTPStatus.FORBIDDEN, b"another host was asked for\n", "text/plain")
            return
        token = parse_qs(asked.query).get("token", [""])[0]
        # in constant time: the answer must not tell how much of a guess was right
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            refusal = (
                b"the token in the URL is missing or wrong: take the URL rankscope serve printed\n"
            )
            self._answer(HTTPStatus.FORBIDDEN, refusal, "text/plain")
        elif asked.path == "/":
            page = self.server.source.page("'self'")
            self._answer(HTTPStatus.OK, page, "text/html; charset=utf-8")
        elif asked.path == "/data":
            self._data()
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there is one page: /\n", "text/plain")

    def _data(self) -> None:
        data, tag, trouble = self.server.source.data()
        if trouble:
            self._answer(
                HTTPStatus.SERVICE_UNAVAILABLE, trouble.encode("utf-8", "replace"), "text/plain"
            )
        elif self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", "application/json", ETag=tag)
        else:
            self._answer(HTTPStatus.OK, data, "application/json", ETag=tag)

    def _is_ours(self) -> bool:
        """True where the browser asked for this address by its own name: no rebound name of
        others."""
        return is_loopback(urlsplit(f"//{self.headers.get('Host', '')}").hostname or "")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str, **more: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in {**_HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: their URLs hold the token."""
