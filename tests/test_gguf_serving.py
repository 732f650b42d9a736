"""A GGUF file in place of a model folder: `headstart.LLM`, the checks before torch, router, grammars and store."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model.tiny_gguf import write_gguf

from headstart import LLM
from headstart.bundled.packaged_models import PACKAGED_MODELS, SMOLLM2
from headstart.cli.replicas import router_options_with_tokenizer
from headstart.config.options import EngineOptions, RouterOptions
from headstart.core.errors import ConfigError
from headstart.core.request import NO_DEFAULTS
from headstart.engine.engine_checks import check_engine_can_start
from headstart.gateway.replica_tokenizers import load_named_tokenizer
from headstart.openai.sampling_defaults import read_sampling_defaults

POOL = {"num_blocks": 64, "dtype": "float32"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "tiny.gguf"


def test_greedy_tokens_and_chats_equal_transformers(path: Path) -> None:
    oracle = write_gguf(path, "llama", "Q4_K", std=0.2)
    with LLM(str(path), **POOL) as llm:
        assert llm.info.served_name == "tiny" and llm.info.eos_token_ids == (1,)
        found = llm.chat([{"role": "user", "content": "the fox"}], {"temperature": 0, "max_tokens": 12}, progress=False)
        text = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
        assert found[0].prompt_token_ids == list(llm.tokenizer.encode(text, add_special_tokens=False))
        expected = oracle.generate(torch.tensor([found[0].prompt_token_ids]), max_new_tokens=12, do_sample=False,
                                   eos_token_id=1, pad_token_id=0)[0].tolist()  # fmt: skip
        assert found[0].prompt_token_ids + list(found[0].token_ids) == expected
        chosen = {"temperature": 0, "max_tokens": 9, "structured_outputs": {"choice": ["red", "blue"]}}
        assert llm.generate("a colour:", chosen, progress=False)[0].text in ("red", "blue")


def test_the_router_takes_the_tokenizer_of_the_file(path: Path) -> None:
    write_gguf(path)
    router = router_options_with_tokenizer(RouterOptions(), EngineOptions(model=str(path)))
    assert router.tokenizer == str(path)
    assert (
        load_named_tokenizer(router.tokenizer).decode([300, 301])
        == load_named_tokenizer(str(path)).decode([300, 301])
        != ""
    )


def test_an_architecture_that_is_not_supported_is_refused_before_torch(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", metadata={"general.architecture": "mamba2"})
    with pytest.raises(
        ConfigError, match=r"m\.gguf: the architecture 'mamba2' is not supported in GGUF; supported are"
    ):
        check_engine_can_start(EngineOptions(model=str(path)))


def test_sampling_defaults_are_those_of_the_metadata(path: Path) -> None:
    write_gguf(path)
    assert read_sampling_defaults(path) == NO_DEFAULTS
    write_gguf(path, metadata={"general.sampling.temp": 0.6, "general.sampling.top_k": 20})
    assert read_sampling_defaults(path) == replace(NO_DEFAULTS, temperature=0.6, top_k=20)
    assert read_sampling_defaults(path, "none") == NO_DEFAULTS
    write_gguf(path, metadata={"general.sampling.top_p": 7.0})
    with pytest.raises(ConfigError, match=r"tiny\.gguf: top_p .*--generation-config none"):
        read_sampling_defaults(path)


def test_a_packaged_model_has_the_sampling_its_authors_recommend(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(path)
    sampling = {"temperature": 0.2, "top_p": 0.9}
    packaged = replace(SMOLLM2, file=path.name, num_bytes=path.stat().st_size, sampling=sampling)
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", packaged)
    assert read_sampling_defaults(path) == replace(NO_DEFAULTS, **sampling)
    assert read_sampling_defaults(path, "none") == NO_DEFAULTS
    write_gguf(path, metadata={"general.sampling.temp": 0.6})
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", replace(packaged, num_bytes=path.stat().st_size))
    assert read_sampling_defaults(path) == replace(NO_DEFAULTS, temperature=0.6, top_p=0.9)
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", packaged)  # a file of this name with another size is another model
    assert read_sampling_defaults(path) == replace(NO_DEFAULTS, temperature=0.6)
