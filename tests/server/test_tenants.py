"""Tenants over the wire: `headstart serve` as operators start it, a real engine, keys of two tenants of headstart.toml.

Each claim has its positive control beside it: what must not be found by another is found by its owner.
"""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from server.harness import Server, spawn

from headstart.model.weights.init_model import write_random_model

PUBLIC = "You are the assistant of a small library. Answer in one sentence, name your source, and never guess. " * 4
PRIVATE = "Beta's own instructions, which are nobody else's business at all: be brief, be polite, be right. " * 4
CONFIG = f"""
admin_api_key = "root"
api_key = "single"

[[tenant]]
name = "acme"
api_keys = ["acme-1", "acme-2"]

[[tenant]]
name = "beta"
api_keys = ["beta-1"]

[[prefix]]
name = "library"
text = "{PUBLIC}"

[[prefix]]
name = "beta-own"
tenant = "beta"
text = "{PRIVATE}"
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    room = tmp_path_factory.mktemp("tenants")
    model = write_random_model("tiny", room / "tiny", std=0.2, dtype="float32", progress=False)
    config = room / "headstart.toml"
    config.write_text(CONFIG, encoding="utf-8")
    options = ["--port", "0", "--num-blocks", "512", "--max-model-len", "1024", "--config", str(config)]
    with spawn([sys.executable, "-m", "headstart", "serve", str(model), *options], room / "log") as running:
        yield running.wait_ready()


class Reply:
    """One caller's view of one answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.text: str = answer["choices"][0]["text"]
        self.prompt: int = answer["usage"]["prompt_tokens"]
        self.cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    @property
    def reusable(self) -> int:
        """Tokens of the prompt that its owner finds when it asks again."""
        whole = self.prompt // 16 * 16
        return min(whole, self.prompt - 1)


def ask(server: Server, key: str, prompt: str, **fields: Any) -> Reply:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    headers = {"authorization": f"Bearer {key}"}
    answer = server.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return Reply(answer.json())


def story(name: str) -> str:
    """A prompt of its own for one test."""
    return f"{name}. " + " ".join(f"{name} counted {number} sheep on the hill and went on." for number in range(20))


def test_a_tenant_hits_with_any_of_its_keys_and_no_other_ever_does(shared: Server) -> None:
    prompt = story("Ada")
    first = ask(shared, "acme-1", prompt)
    assert first.cached == 0 and first.reusable >= 128
    assert [ask(shared, key, prompt).cached for key in ("acme-1", "acme-2")] == [first.reusable] * 2
    for key in ("beta-1", "single", "root"):
        other = ask(shared, key, prompt)
        assert other.cached == 0, key
        assert other.text == first.text
        assert ask(shared, key, prompt).cached == first.reusable


def test_a_salt_narrows_sharing_and_gives_no_access_to_other_caches(shared: Server) -> None:
    prompt = story("Bob")
    salted = ask(shared, "acme-1", prompt, cache_salt="bobs-salt")
    assert ask(shared, "acme-2", prompt, cache_salt="bobs-salt").cached == salted.reusable
    assert ask(shared, "acme-1", prompt).cached == 0
    assert ask(shared, "acme-1", prompt, cache_salt="another").cached == 0
    for key in ("beta-1", "single", "root"):
        assert ask(shared, key, prompt, cache_salt="bobs-salt").cached == 0, key


def test_all_share_the_public_prefix_and_nothing_behind_it(shared: Server) -> None:
    prompt = PUBLIC + story("Cem")
    first = ask(shared, "acme-1", prompt)
    assert 96 <= first.cached < first.reusable
    assert ask(shared, "acme-1", prompt).cached == first.reusable
    callers: list[tuple[str, dict[str, str]]] = [
        ("beta-1", {}),
        ("single", {}),
        ("root", {}),
        ("acme-1", {"cache_salt": "s"}),
        ("beta-1", {"cache_salt": "s"}),
    ]
    for key, fields in callers:
        other = ask(shared, key, prompt, **fields)
        assert (other.cached, other.text) == (first.cached, first.text), (key, fields)


def test_a_tenants_own_pinned_prefix_is_warm_for_it_alone(shared: Server) -> None:
    prompt = PRIVATE + story("Dan")
    assert ask(shared, "beta-1", prompt).cached >= 96
    assert [ask(shared, key, prompt).cached for key in ("acme-1", "single", "root")] == [0, 0, 0]


def test_no_answer_depends_on_what_another_tenant_has_cached(shared: Server) -> None:
    prompt = story("Eva")
    before = ask(shared, "beta-1", prompt, cache="bypass", logprobs=3, max_tokens=16)
    ask(shared, "acme-1", prompt, max_tokens=16)
    after = ask(shared, "beta-1", prompt, logprobs=3, max_tokens=16)
    assert (after.text, after.cached) == (before.text, before.cached) == (before.text, 0)


def test_modes_read_write_or_neither(shared: Server) -> None:
    prompt = story("Fay")
    assert ask(shared, "acme-1", prompt, cache="bypass").cached == 0
    assert ask(shared, "acme-1", prompt, prompt_cache_options={"mode": "explicit"}).cached == 0
    assert ask(shared, "acme-1", prompt, cache="read-only").cached == 0
    first = ask(shared, "acme-1", prompt, cache_priority=90, cache_ttl=60)
    assert first.cached == 0  # nothing was left behind by any of the three
    assert ask(shared, "acme-1", prompt, cache="read-only").cached == first.reusable
    assert ask(shared, "acme-1", prompt, cache="bypass").cached == 0
    hinted = {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}
    assert ask(shared, "acme-1", prompt, **hinted).cached == first.reusable


def test_prompt_logprobs_are_computed_and_leave_the_prompt_to_others(shared: Server) -> None:
    prompt = story("Gus")
    first = ask(shared, "acme-1", prompt, prompt_logprobs=1)
    assert ask(shared, "acme-1", prompt, prompt_logprobs=1).cached == 0
    assert ask(shared, "acme-1", prompt).cached == first.reusable


def test_logs_name_tenants_and_never_keys(shared: Server) -> None:
    ask(shared, "acme-2", story("Hal"))
    assert '"tenant":"acme"' in shared.log.replace(" ", "")
    for key in ("acme-1", "acme-2", "beta-1", '"single"', '"root"'):
        assert key not in shared.log
