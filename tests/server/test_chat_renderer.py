"""ChatRenderer: what ChatTemplate renders in this process, whatever the template does to the rendering one."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server.harness import PATIENCE, fake_server, wait_for
from server.test_chat_template import CHATS, TEMPLATES
from tokenizer_folders import BYTE_LEVEL, TEMPLATE, write

from headstart.core.errors import ConfigError, InvalidRequestError, QueueFullError
from headstart.openai.chat.chat_renderer import ChatRenderer
from headstart.openai.chat.chat_template import ChatTemplate
from headstart.openai.sandbox import sandbox_pool
from headstart.openai.tokenizer.tokenizer import Tokenizer

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "x" * 1000}]
BOMBS = {
    "a constant": "{{ 'a' * 2000000000 }}",
    "a content many times": "{{ messages[0].content * 2000000000 }}",
    "a width": "{{ '%2000000000d' % 1 }}",
    "a width by a method": "{{ '{:2000000000d}'.format(1) }}",
    "center": "{{ messages[0].content.center(2000000000) }}",
    "zfill": "{{ '1'.zfill(2000000000) }}",
    "an indent": "{{ ('a\\n' * 1000) | indent(20000000) }}",
    "a list": "{{ [messages] * 2000000000 }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "replacing": "{% set s = 'a' * 99999 %}{{ s.replace('a', s).replace('a', s) }}",
    "tojson of shared lists": "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x | tojson }}",
}
LOOPS = {
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 9 ** (9 ** (8 + messages | length)) }}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a sum": "{% set x = range(99999) | list %}{% for i in x %}{% set y = x | sum %}{% endfor %}",
}


@pytest.fixture(scope="module", params=[*TEMPLATES, "raising"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ChatTemplate, ChatRenderer]]:
    source = {**TEMPLATES, "raising": "{{ raise_exception('no: ' ~ messages[0].content) }}"}[request.param]
    renderer = ChatRenderer(source, NAMED)
    yield ChatTemplate(source, NAMED), renderer
    renderer.close()


ODD: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "\x00 \ud800 \U0001f600 \r\n" * 100}],
    [{"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 10**40}}}]}],
    [{"role": "user", "content": [{"type": "text", "text": "t"}]}],
    [{"role": "user", "content": "y" * 3_000_000}],
    [],
]


@pytest.mark.parametrize("go_on", [True, False])
@pytest.mark.parametrize("chat", range(len(CHATS) + len(ODD)))
def test_rendering_is_that_of_the_template_in_this_process(
    pair: tuple[ChatTemplate, ChatRenderer], chat: int, go_on: bool
) -> None:
    found: list[Any] = []
    for one in pair:
        try:
            text = one.render(
                (CHATS + ODD)[chat],
                add_generation_prompt=not go_on,
                continue_final_message=go_on,
                options={"enable_thinking": False},
            )
            found.append(text)
        except InvalidRequestError as error:
            found.append((str(error), error.param, error.code))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_grows_without_end_fails_and_the_next_is_rendered(name: str) -> None:
    renderer = ChatRenderer("{% if messages | length == 1 %}" + BOMBS[name] + "{% endif %}fine", {})
    before = psutil.Process().memory_info().rss
    with pytest.raises(InvalidRequestError) as caught:
        renderer.render(USER)
    assert caught.value.param == "messages" and renderer.render(USER * 2) == "fine"
    assert psutil.Process().memory_info().rss - before < 200e6
    renderer.close()


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_never_ends_fails_and_the_next_is_rendered(name: str) -> None:
    source = "{% if messages | length == 1 %}" + LOOPS[name] + "{% endif %}fine"
    renderer = ChatRenderer(source, {}, max_seconds=0.2)
    with pytest.raises(InvalidRequestError, match=r"too long|too much memory") as caught:
        renderer.render(USER)
    assert caught.value.param == "messages" and renderer.render(USER * 2) == "fine"
    renderer.close()


def test_one_endless_conversation_does_not_stop_the_others() -> None:
    renderer = ChatRenderer("{% if messages | length == 1 %}" + LOOPS["nested ranges"] + "{% endif %}fine", {})
    renderer.start()

    def fail() -> None:
        with pytest.raises(InvalidRequestError):
            renderer.render(USER)

    endless = threading.Thread(target=fail)
    endless.start()
    wait_for(lambda: not renderer._pool._idle)
    assert renderer.render(USER * 2) == "fine" and endless.is_alive()
    endless.join(PATIENCE)
    renderer.close()


def test_after_several_kills_in_a_row_there_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_pool, "PAUSE_SECONDS", 3600.0)
    renderer = ChatRenderer(
        "{% if messages | length == 1 %}" + LOOPS["a power"] + "{% endif %}fine", {}, max_seconds=0.1
    )
    for _ in range(2):
        for _ in range(2):
            with pytest.raises(InvalidRequestError):
                renderer.render(USER)
        assert renderer.render(USER * 2) == "fine"  # and they are not in a row any more
    for _ in range(3):
        with pytest.raises(InvalidRequestError):
            renderer.render(USER)
    with pytest.raises(QueueFullError, match="3 times in a row"):
        renderer.render(USER * 2)
    assert renderer.render(USER * 2, tenant="another") == "fine"
    renderer._pool._paused_until.clear()
    assert renderer.render(USER * 2) == "fine"
    renderer.close()


def test_a_process_that_was_killed_is_started_again() -> None:
    renderer = ChatRenderer(TEMPLATE, {})
    expected = renderer.render(USER)
    (process,) = renderer._pool._all
    process._process.send_signal(signal.SIGKILL)
    process._process.wait()
    assert renderer.render(USER) == expected and len(renderer._pool._all) == 1
    renderer.close()


def test_many_threads_get_each_their_own_text() -> None:
    renderer = ChatRenderer("{{ messages[0].content }}", {})
    wrong: list[str] = []

    def work(number: int) -> None:
        for i in range(50):
            text = f"{number}.{i}"
            if renderer.render([{"role": "user", "content": text}]) != text:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wrong and len(renderer._pool._all) <= sandbox_pool.MAX_PROCESSES
    renderer.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if 1 %}" * 10_000 + "{% endif %}" * 10_000, "nested too deeply"),
        ("a" * 100_000_000, "at most 262144"),
        ("{{ " + "(" * 10_000 + ")" * 10_000 + " }}", "nested too deeply"),
        ("{{ " + "9" * 5000 + " }}", "does not compile"),
        ("{{ 1 | nothing }}", "nothing"),
        ("{{ 1 is nothing }}", "nothing"),
        ("{% if %}", "does not compile"),
    ],
    ids=range(7),
)
def test_a_template_that_cannot_be_is_a_configuration_error_at_once(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ChatRenderer(source, {})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("source", ["{% break %}", "{{ 9 ** (9 ** (9 ** 9)) }}", "{% block a %}{% endblock %}" * 2])
def test_what_only_compiling_finds_is_a_configuration_error_at_the_start(source: str) -> None:
    renderer = ChatRenderer(source, {}, max_seconds=0.2)
    with pytest.raises(ConfigError) as caught:
        renderer.start()
    assert "\n" not in str(caught.value) and not renderer._pool._all


def test_the_process_ends_with_its_parent_and_inherits_nothing() -> None:
    code = (
        "import os, socket, sys\n"
        "from headstart.openai.chat.chat_renderer import ChatRenderer\n"
        "listener = socket.create_server(('127.0.0.1', 0)); listener.set_inheritable(True)\n"
        f"renderer = ChatRenderer({TEMPLATE!r}, {{}}); renderer.start()\n"
        "(process,) = renderer._pool._all\n"
        "print(process._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        modules = {Path(entry.path).name for entry in child.memory_maps()}
        assert not child.net_connections("inet") and not any("torch" in name for name in modules)
        parent.kill()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_server_with_a_hostile_template_stays_alive(tmp_path: Path) -> None:
    source = LOOPS["nested ranges"]
    folder = write(tmp_path / "model", BYTE_LEVEL, chat_template=source)

    async def run(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            chats = [
                asyncio.create_task(client.post("/v1/chat/completions", json={"messages": USER})) for _ in range(30)
            ]
            alive = 0
            while not all(chat.done() for chat in chats):
                assert (await client.get("/livez")).status_code == 200
                plain = await client.post("/v1/completions", json={"prompt": [3, 4], "max_tokens": 2})
                assert plain.status_code == 200
                alive += not all(chat.done() for chat in chats)
                await asyncio.sleep(0.05)
            assert {(await chat).status_code for chat in chats} <= {400, 429} and alive > 5

    with fake_server(str(folder), tmp_path / "log") as server:
        asyncio.run(run(server.url))


@pytest.mark.parametrize(("data", "message"), [(b"a" * 2_000_000, "at most 1048576"), (b"\xff", "not UTF-8")])
def test_a_template_file_that_is_no_template_is_a_configuration_error(
    tmp_path: Path, data: bytes, message: str
) -> None:
    folder = write(tmp_path / "model", BYTE_LEVEL)
    (folder / "chat_template.jinja").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(folder)
