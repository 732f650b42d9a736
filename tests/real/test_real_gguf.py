"""SmolLM2-135M-Instruct served by its short name, from the GGUF file in its package: the first chat of the README."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from real.chats import chats
from server.harness import spawn
from transformers import AutoTokenizer

from headstart.bundled.packaged_models import SMOLLM2
from headstart.openai.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.long

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def path(smollm2_file: Path) -> Path:
    return smollm2_file


@pytest.mark.usefixtures("path")
def test_the_first_chat_of_the_readme_gives_the_answer_that_is_shown(tmp_path: Path) -> None:
    example = re.search(r"make serve MODEL=(\S+).*?curl -s \S+/chat/completions .*? -d '(.*?)'\n```", README, re.DOTALL)
    assert example is not None
    command, body = example.groups()
    shown = re.search(r'^"content": ("[^{].*")$', README, re.MULTILINE)
    assert command == SMOLLM2.name and shown is not None
    serve = [sys.executable, "-m", "headstart", "serve", command, "--port", "0", "--num-blocks", "1024"]
    with spawn(serve, tmp_path / "log") as started:
        server = started.wait_ready()
        answer = server.post("/v1/chat/completions", json=json.loads(body)).json()
    assert answer["model"] == SMOLLM2.name
    assert answer["choices"][0]["message"]["content"] == json.loads(shown[1])


@pytest.mark.usefixtures("path")
@pytest.mark.skipif(sys.platform != "linux", reason="memory that processes share is counted on Linux only")
def test_a_server_with_defaults_takes_memory_as_it_is_used(tmp_path: Path) -> None:
    """All processes together; pages that they share count once."""
    serve = [sys.executable, "-m", "headstart", "serve", SMOLLM2.name, "--port", "0"]
    with spawn(serve, tmp_path / "log") as started:
        server = started.wait_ready()
        first = psutil.Process(server.process.pid)
        resident = sum(one.memory_full_info().pss for one in (first, *first.children(recursive=True)))
        log = server.log
    assert resident <= 0.6e9, log
    assert re.search(r"KV +up to [\d.]+ \wiB, taken as it fills, = .*--kv-cache-memory changes it", log), log


def test_tokens_and_prompts_equal_transformers_reading_the_same_file(path: Path) -> None:
    """Prompts with numbers that are not ASCII are left out: Transformers' conversion has no split at digits."""
    theirs: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = Tokenizer.from_folder(path)
    assert ours.eos_token_ids[0] == theirs.eos_token_id and ours.vocab_size == len(theirs)
    compared = 0
    for chat in chats():
        text = ours.render_chat_text(chat)
        assert text == theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        if not any(char.isnumeric() and not char.isascii() for char in text):
            expected = theirs(text, add_special_tokens=False)["input_ids"]
            assert list(ours.encode(text, add_special_tokens=False)) == expected, text
            compared += 1
    assert compared > 40
