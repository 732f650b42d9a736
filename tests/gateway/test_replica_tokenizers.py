"""Finding the replicas' tokenizer on this machine."""

from pathlib import Path

import pytest

from headstart.bundled import BUNDLED_NAME, bundled_intent_model_folder
from headstart.core.errors import ConfigError
from headstart.gateway.replica_tokenizers import find_tokenizer_of_models, load_named_tokenizer
from headstart.gateway.replicas.probes import ModelCard


def test_a_folder_and_the_bundled_model_are_found() -> None:
    for name in (str(bundled_intent_model_folder()), BUNDLED_NAME):
        assert load_named_tokenizer(name).vocab_size > 0


@pytest.mark.parametrize("name", ["/nowhere/at/all", "nobody/has-this", "x" * 300, "a//b", ""])
def test_what_is_not_here_is_a_mistake(name: str) -> None:
    with pytest.raises(ConfigError, match="none to count"):
        load_named_tokenizer(name)


def test_the_root_of_a_model_names_it_and_strangers_do_not(tmp_path: Path) -> None:
    root = {"root": str(bundled_intent_model_folder())}
    assert find_tokenizer_of_models([ModelCard("any", None, root), ModelCard("tuned", "any")]) is not None
    assert find_tokenizer_of_models([ModelCard(BUNDLED_NAME)]) is not None
    assert find_tokenizer_of_models([ModelCard("one", None, root), ModelCard("two")]) is None
    assert find_tokenizer_of_models([ModelCard("unknown/model")]) is find_tokenizer_of_models([]) is None
    (tmp_path / "tokenizer.json").write_text("{")
    assert find_tokenizer_of_models([ModelCard("m", None, {"root": str(tmp_path)})]) is None
