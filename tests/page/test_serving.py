"""The page over HTTP: to who has the token, on this machine, renewed while the job runs."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rankscope.errors import RankscopeError, TraceError
from rankscope.tree.reader import open_trace
from rankscope.words.page.pages import check_page
from rankscope.words.page.pageserver import PageServer, PageSource


@pytest.fixture(scope="package")
def source(trace_of) -> PageSource:
    trace = open_trace(trace_of("clean") / "trace")
    return PageSource(lambda: (check_page(trace)[0], False))


@contextmanager
def serving(source: PageSource) -> Iterator[PageServer]:
    server = PageServer(source)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(30)
        assert not thread.is_alive()


def asked(server: PageServer, path: str, method: str = "GET", **headers: str):
    """Return status, headers and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def test_who_has_the_token_gets_the_page_and_its_data(source: PageSource) -> None:
    with serving(source) as server:
        status, headers, page = asked(server, f"/?token={server.token}")
        assert status == 200 and b"<title>rankscope - no fault found" in page
        assert b"connect-src &#x27;self&#x27;" in page or b"connect-src 'self'" in page
        assert headers["Cache-Control"] == "no-store"
        status, headers, body = asked(server, f"/data?token={server.token}")
        data = json.loads(body)
        assert status == 200 and data["data"]["command"] == "check"
        status, _, body = asked(
            server, f"/data?token={server.token}", **{"If-None-Match": headers["ETag"]}
        )
        assert (status, body) == (304, b"")
        assert asked(server, f"/else?token={server.token}")[0] == 404


@pytest.mark.parametrize("path", ["/", "/data", "/?token=", "/data?token=guess", "/?token=%ff"])
def test_who_has_not_gets_nothing(path: str, source: PageSource) -> None:
    with serving(source) as server:
        status, _, body = asked(server, path)
        assert status == 403 and b"rankscope serve printed" in body
        assert len(body) < 200


def test_a_name_of_another_host_that_points_here_gets_nothing(source: PageSource) -> None:
    with serving(source) as server:
        path = f"/?token={server.token}"
        assert asked(server, path, Host="evil.example")[0] == 403
        assert asked(server, path, Host=f"localhost:{server.port}")[0] == 200
        assert asked(server, path, Host=f"127.0.0.1:{server.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_nothing_but_get_is_answered(method: str, source: PageSource) -> None:
    with serving(source) as server:
        assert asked(server, f"/?token={server.token}", method)[0] == 501


def test_a_client_that_says_nothing_holds_up_no_other(source: PageSource) -> None:
    with serving(source) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
        assert asked(server, f"/?token={server.token}")[0] == 200
        for each in silent:
            each.sendall(b"\x00\xff not HTTP \r\n\r\n")
            each.close()
        assert asked(server, f"/?token={server.token}")[0] == 200


def test_the_threads_are_few_however_many_connect_and_say_nothing(source: PageSource) -> None:
    with serving(source) as server:
        before = threading.active_count()
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
        assert asked(server, f"/?token={server.token}")[0] == 200
        assert threading.active_count() - before <= 64
        for each in silent:
            each.close()
        assert asked(server, f"/data?token={server.token}")[0] == 200


def test_two_servers_have_tokens_of_their_own(source: PageSource) -> None:
    with serving(source) as one, serving(source) as two:
        assert one.token != two.token
        assert asked(one, f"/?token={two.token}")[0] == 403


def test_what_is_wrong_at_the_start_is_raised_and_later_said_beside_what_is_known(trace_of) -> None:
    def broken():
        raise TraceError("the folder is gone")

    with pytest.raises(RankscopeError, match="the folder is gone"):
        PageSource(broken)
    trace = open_trace(trace_of("clean") / "trace")
    turns = []

    def later():
        turns.append(1)
        if len(turns) > 1:
            raise TraceError("the folder is gone")
        return check_page(trace)[0], True

    source = PageSource(later)
    data, _, trouble = source.data()
    assert data and trouble == ""
    deadline = time.monotonic() + 60
    while not trouble and time.monotonic() < deadline:
        time.sleep(0.2)
        data, _, trouble = source.data()
    assert data and trouble == "the folder is gone"
    assert b"<title>rankscope" in source.page("'self'")
