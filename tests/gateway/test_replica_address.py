"""Addresses of replicas as people write them."""

import pytest

from headstart.core.errors import ConfigError
from headstart.gateway.replicas.replica_address import ReplicaAddress, parse_replica_address


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("http://10.0.0.7:8000/", "http://10.0.0.7:8000"),
        ("http://10.0.0.7:8000/v1/", "http://10.0.0.7:8000"),
        ("10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("https://replica.example", "https://replica.example"),
        ("HTTP://Replica:80", "http://replica:80"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_come_to_one_form(text: str, url: str) -> None:
    assert parse_replica_address(text) == ReplicaAddress(url)


def test_event_endpoints_stand_behind_the_address() -> None:
    found = parse_replica_address("http://a:1, events=tcp://a:5557, replay=tcp://a:5558")
    assert found == ReplicaAddress("http://a:1", "tcp://a:5557", "tcp://a:5558")


@pytest.mark.parametrize(
    "text",
    [
        *("", "ftp://a:1", "http://", "http://a:port", "http://a:1/path", "http://a:1?x=1", "http://u:p@a:1"),
        *("http://a:1,events=a:5557", "http://a:1,replay=tcp://a:1", "http://a:1,other=tcp://a:1", "http://[::1"),
        *("http://a:1,events=tcp://a:1,events=tcp://a:2", "http://a:0", "http://a:-5", "http://a:65536"),
    ],
)
def test_what_is_no_address_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_replica_address(text)


def test_the_path_of_a_socket_may_hold_a_space() -> None:
    assert parse_replica_address("http://a:1,events=ipc:///tmp/my folder/pub").events == "ipc:///tmp/my folder/pub"
