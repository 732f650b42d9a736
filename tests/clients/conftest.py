"""The servers that clients are run against: the bundled and the scripted model, each direct and through a router."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from clients.scripted_agent import bundled_server, scripted_router, scripted_server

Urls = tuple[str, str]


@pytest.fixture(scope="session")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Urls]:
    """The addresses of the two servers."""
    room = tmp_path_factory.mktemp("direct")
    with ExitStack() as stack:
        yield stack.enter_context(bundled_server(room)).url, stack.enter_context(scripted_server(room)).url


@pytest.fixture(scope="session")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Urls]:
    """The addresses of two routers, each in front of two such servers."""
    room = tmp_path_factory.mktemp("routed")
    with ExitStack() as stack:
        yield stack.enter_context(bundled_server(room, 2)).url, stack.enter_context(scripted_router(room)).url
