"""Client libraries, unmodified, in environments of their own: docs/clients.md lists them. Needs PyPI and npm once."""

from collections.abc import Callable

import pytest
from clients.client_runs import run_checks
from clients.environments import CLIENTS, Client, UnreachableError, command

pytestmark = pytest.mark.long

CASES = [
    pytest.param(client, route, check, id=f"{client.name}-{route}-{check}")
    for client in CLIENTS
    for route in ("direct", "routed")
    for check in client.checks()
]
Outcome = Callable[[Client, str, str], str | None]


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest) -> Outcome:
    """The error of a check; a client's checks are run when the first of them is asked for."""
    known: dict[tuple[str, str], dict[str, str | None]] = {}

    def of(client: Client, route: str, check: str) -> str | None:
        try:
            run = command(client)
        except UnreachableError as error:
            pytest.skip(str(error))
        key = client.name, route
        if key not in known:
            known[key] = run_checks(client, run, request.getfixturevalue(route))
        return known[key][check]

    return of


@pytest.mark.parametrize(("client", "route", "check"), CASES)
def test_client(client: Client, route: str, check: str, outcome: Outcome) -> None:
    error = outcome(client, route, check)
    if error is not None:
        pytest.fail(error, pytrace=False)
