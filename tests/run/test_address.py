"""Addresses: sockets of this host, and TCP with keys."""

from __future__ import annotations

import pytest

from rankscope.errors import BindError
from rankscope.run.connection import check_address

TCP = ["tcp://127.0.0.1:1", "tcp://localhost:*", "tcp://[::1]:7", "tcp://*:1", "tcp://head:1"]


@pytest.mark.parametrize("address", TCP)
def test_tcp_needs_keys_on_this_host_too(address: str) -> None:
    assert check_address(address, has_keys=True) == address
    with pytest.raises(BindError, match=r"rankscope keys new FILE.* ipc:///path .* every host"):
        check_address(address, has_keys=False)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "udp://127.0.0.1:1",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:99999",
        "tcp://head :1",
        "ipc://relative",
        "inproc://x",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(BindError):
        check_address(address, has_keys=True)


def test_a_socket_path_longer_than_the_system_allows_is_refused_before_it_is_bound() -> None:
    assert check_address("ipc:///" + "x" * 106, has_keys=False)
    with pytest.raises(BindError, match="107 bytes, this one has 108"):
        check_address("ipc:///" + "x" * 107, has_keys=False)
