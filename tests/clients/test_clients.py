"""Client libraries, unmodified, in environments of their own: docs/clients.md lists them. Needs PyPI and npm once."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from clients.client_runs import run_checks
from clients.environments import CLIENTS, Client, UnreachableError, command, environment

pytestmark = pytest.mark.long

CASES = [
    pytest.param(client, route, check, id=f"{client.name}-{route}-{check}")
    for client in CLIENTS
    for route in ("direct", "routed")
    for check in client.checks()
]
CLOSED = "http://127.0.0.1:9/"  # no server has this port
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


@pytest.mark.parametrize("name", ["openai", "npm-openai"])
def test_an_index_that_cannot_be_reached_is_a_reason_to_skip(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [client] = [client for client in CLIENTS if client.name == name]
    if client.is_npm and shutil.which("npm") is None:
        pytest.skip("needs npm")
    settings = {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": CLOSED,
        "PIP_RETRIES": "1",
        "npm_config_registry": CLOSED,
    }
    settings |= {"XDG_CACHE_HOME": str(tmp_path), "npm_config_cache": str(tmp_path), "npm_config_fetch_retries": "0"}
    for setting, value in settings.items():
        monkeypatch.setenv(setting, value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(UnreachableError, match="cannot be reached"):
        environment(client)
