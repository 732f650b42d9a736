"""Options from flags, environment, file and defaults."""

from pathlib import Path

import pytest

from headstart.config.config_file import all_option_fields, merge_option_sources, read_config_file, read_environment
from headstart.config.options import EngineOptions, ServerOptions
from headstart.core.errors import ConfigError
from headstart.model.kernels.library import VARIABLE


def write(folder: Path, text: str) -> Path:
    path = folder / "headstart.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_option_can_stand_in_the_file(tmp_path: Path) -> None:
    lines = []
    for field in all_option_fields():
        default = field.default
        one = field.metadata["choices"][0] if type(default) is tuple and "choices" in field.metadata else "k"
        text = {bool: str(default).lower(), tuple: f'["{one}"]', str: f'"{default}"', type(None): None}.get(
            type(default)
        )
        if text is None and default is not None:
            text = str(default)
        if text is None:
            text = '"x"' if "str" in str(field.type) else str(field.metadata.get("maximum", 64))
        lines.append(f"{field.name} = {text}")
    values = read_config_file(write(tmp_path, "\n".join(lines)), tmp_path)
    assert set(values) == {field.name for field in all_option_fields()}
    assert merge_option_sources(ServerOptions, values).api_key == ("k",)
    assert merge_option_sources(EngineOptions, values).num_gpu_blocks_override == 64


def test_the_file_in_the_working_folder_is_found_and_its_absence_is_no_error(tmp_path: Path) -> None:
    assert read_config_file(None, tmp_path) == {}
    write(tmp_path, "port = 9000")
    assert read_config_file(None, tmp_path) == {"port": 9000}


@pytest.mark.parametrize(("key", "name"), [("max-num-seqs", "max_num_seqs"), ("num-blocks", "num_gpu_blocks_override")])
def test_flag_spelling_and_alias_work_in_the_file(tmp_path: Path, key: str, name: str) -> None:
    assert read_config_file(write(tmp_path, f"{key} = 4"), tmp_path) == {name: 4}


def test_a_whole_number_is_a_number_and_one_key_is_a_list_of_keys(tmp_path: Path) -> None:
    values = read_config_file(write(tmp_path, 'drain_timeout = 5\napi_key = "k"'), tmp_path)
    assert values == {"drain_timeout": 5.0, "api_key": ("k",)}


@pytest.mark.parametrize(
    "text",
    ['speculative_config = \'{"method": "ngram"}\'', '[speculative_config]\nmethod = "ngram"'],
    ids=["text", "table"],
)
def test_an_option_that_is_json_may_be_a_table(tmp_path: Path, text: str) -> None:
    assert read_config_file(write(tmp_path, text), tmp_path) == {"speculative_config": '{"method": "ngram"}'}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("port = " + "[" * 100_000, "nested too deeply", id="lists"),
        pytest.param("port = " + "{a=" * 100_000, "nested too deeply", id="tables"),
        pytest.param(".".join("a" * 20_000) + " = 1", "line 1 has a name of more than 1000 parts", id="name"),
        pytest.param("[" + ".".join("a" * 20_000) + "]", "line 1 has a name of more than 1000 parts", id="table"),
        pytest.param("#" * (2**24 + 1), "more than 16 MiB", id="length"),
    ],
)
def test_an_absurd_file_is_refused_in_one_short_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_config_file(write(tmp_path, text), tmp_path)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_a_long_text_of_many_sentences_is_no_absurd_file(tmp_path: Path) -> None:
    text = 'prefix = [{name = "book", text = "' + "One sentence. " * 5_000 + '"}]'
    assert len(read_config_file(write(tmp_path, text), tmp_path)["prefixes"]) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot = 1", "unknown option 'prot'; did you mean port?"),
        ("[server]\nport = 1", "unknown option 'server'"),
        ("zzzzzz = 1", "--help lists"),
        ('port = "80"', "port is '80'; it must be a whole number"),
        ("port = true", "port is True; it must be a whole number"),
        ("offline = 1", "offline is 1; it must be true or false"),
        ("host = 1", "host is 1; it must be a text"),
        ("api_key = 12345", "api_key is (hidden); it must be a text or a list of texts"),
        ("max-num-seqs = 1\nmax_num_seqs = 2", "given twice"),
        ("port = ", "not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_the_file(tmp_path: Path, text: str, complaint: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config_file(path, tmp_path)
    assert complaint in str(caught.value) and str(path) in str(caught.value)


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nope\.toml: No such file"):
        read_config_file(tmp_path / "nope.toml", tmp_path)


def test_the_environment_is_converted_by_the_type_of_the_option() -> None:
    values, warnings = read_environment(
        {
            "HEADSTART_PORT": "9",
            "HEADSTART_OFFLINE": "yes",
            "HEADSTART_ENABLE_PREFIX_CACHING": "0",
            "HEADSTART_DRAIN_TIMEOUT": "1.5",
            "HEADSTART_API_KEY": "a, b",
            "HEADSTART_NUM_BLOCKS": "7",
            "HEADSTART_HOST": "",
            "HEADSTART_DEBUG": "1",
            "HEADSTART_CONFIG": "x",
            "PATH": "/",
        }
    )
    assert values == {
        "port": 9,
        "offline": True,
        "enable_prefix_caching": False,
        "drain_timeout": 1.5,
        "api_key": ("a", "b"),
        "num_gpu_blocks_override": 7,
    }
    assert warnings == []


@pytest.mark.parametrize(
    ("variable", "text", "complaint"),
    [
        ("HEADSTART_PORT", "x", "HEADSTART_PORT is 'x'; it must be a whole number"),
        ("HEADSTART_OFFLINE", "maybe", "HEADSTART_OFFLINE is 'maybe'; it must be 1 or 0"),
        ("HEADSTART_DRAIN_TIMEOUT", "soon", "it must be a number"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(variable: str, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_environment({variable: text})


def test_the_variable_that_chooses_kernels_is_known() -> None:
    assert read_environment({VARIABLE: "avx2"}) == ({}, [])


def test_a_misspelt_variable_is_warned_of_with_the_nearest_name() -> None:
    assert read_environment({"HEADSTART_PROT": "1"}) == (
        {},
        ["HEADSTART_PROT is not an option and has no effect; did you mean HEADSTART_PORT?"],
    )


def test_the_first_source_that_has_a_value_wins() -> None:
    flags, environment, file = {"port": 1}, {"port": 2, "max_n": 2}, {"port": 3, "max_n": 3, "host": "h", "seed": 9}
    options = merge_option_sources(ServerOptions, flags, environment, file)
    assert (options.port, options.max_n, options.host, options.max_prompts) == (1, 2, "h", 64)


@pytest.mark.parametrize(
    ("options", "values", "complaint"),
    [
        (ServerOptions, {"port": 65_536}, "port is 65536; it must be at most 65535"),
        (ServerOptions, {"max_n": 0}, "max_n is 0; it must be at least 1"),
        (ServerOptions, {"drain_timeout": float("nan")}, "drain_timeout is nan"),
        (EngineOptions, {"dtype": "f16"}, "dtype is 'f16'; choose one of auto, bfloat16, float32"),
        (EngineOptions, {"threads": -1}, "threads is -1; it must be at least 0"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_bound(
    options: type[EngineOptions], values: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        merge_option_sources(options, values)


def test_the_defaults_are_within_their_own_bounds() -> None:
    assert merge_option_sources(EngineOptions) == EngineOptions()
    assert merge_option_sources(ServerOptions) == ServerOptions()
