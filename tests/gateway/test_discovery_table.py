"""Values of --discover."""

import pytest

from headstart.core.errors import ConfigError
from headstart.gateway.run_gateway import parse_discovery


@pytest.mark.parametrize("text", ["file:replicas.txt", "dns:replicas.default.svc:8000"])
def test_a_discovery_describes_itself_as_it_was_asked_for(text: str) -> None:
    assert parse_discovery(text).describe() == text


def test_the_brackets_of_an_address_are_not_part_of_it() -> None:
    assert parse_discovery("dns:[::1]:8000").describe() == "dns:::1:8000"


@pytest.mark.parametrize("text", ["", "file:", "dns:name", "dns:name:", "dns:name:x", "dns::1", "etcd:x:1", "dns:a:0"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write it like .*dns:replicas.default.svc:8000"):
        parse_discovery(text)
