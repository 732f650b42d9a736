"""Tables of headstart.toml: tenants are right or stop everything, prefixes fail one by one."""

from pathlib import Path

import pytest

from headstart.config.config_file import merge_option_sources, read_config_file
from headstart.config.options import EngineOptions, PrefixEntry, ServerOptions, TenantEntry
from headstart.core.errors import ConfigError


def read(folder: Path, text: str) -> ServerOptions:
    path = folder / "headstart.toml"
    path.write_text(text, encoding="utf-8")
    values = read_config_file(path, Path("/nowhere"))
    assert merge_option_sources(EngineOptions, values) == EngineOptions()
    return merge_option_sources(ServerOptions, values)


def test_tables_are_read_beside_the_options(tmp_path: Path) -> None:
    options = read(
        tmp_path,
        """
port = 9000
[[tenant]]
name = "acme"
api_keys = ["k1", "k2"]
[[tenant]]
name = "solo"
api_keys = "k3"
[[prefix]]
name = "intent"
text = "You are"
[[prefix]]
name = "support"
tenant = "acme"
messages = [{role = "system", content = "Be kind"}]
""",
    )
    assert options.port == 9000
    assert options.tenants == (TenantEntry("acme", ("k1", "k2")), TenantEntry("solo", ("k3",)))
    assert options.prefixes == (
        PrefixEntry("intent", text="You are"),
        PrefixEntry("support", "acme", messages=({"role": "system", "content": "Be kind"},)),
    )


def test_a_file_is_found_beside_the_toml_and_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "intent.txt").write_bytes("Grüß\r\n".encode())
    options = read(tmp_path, '[[prefix]]\nname = "intent"\nfile = "prompts/intent.txt"')
    assert options.prefixes == (PrefixEntry("intent", text="Grüß\r\n"),)


@pytest.mark.parametrize(
    ("table", "name", "complaint"),
    [
        ('text = "x"', "#2", "it has no name"),
        ('name = "p"', "p", "exactly one of text, file and messages, and has none of them"),
        ('name = "p"\ntext = "x"\nfile = "y"', "p", "and has text and file"),
        ('name = "p"\ntext = 3', "p", "text must be a text in quotes"),
        ('name = "p"\ntext = ""', "p", "not empty"),
        ('name = "p"\nmessages = "x"', "p", "messages must be a list such as"),
        ('name = "p"\nfile = "nope.txt"', "p", "nope.txt: No such file"),
        ('name = "p"\nfile = "latin1.txt"', "p", "not valid UTF-8 at byte 1"),
        ('name = "p"\nfile = "."', "p", "Is a directory"),
        ('name = "p"\ntxt = "x"', "p", "unknown key 'txt'"),
        ('name = "p"\ntenant = 3\ntext = "x"', "p", "tenant is 3"),
    ],
)
def test_a_malformed_prefix_keeps_its_reason_and_the_others_stay(
    tmp_path: Path, table: str, name: str, complaint: str
) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"a\xff")
    good = '[[prefix]]\nname = "good"\ntext = "x"\n'
    first, bad, last = read(tmp_path, f"{good}[[prefix]]\n{table}\n{good}").prefixes
    assert first == last == PrefixEntry("good", text="x")
    assert bad.name == name and bad.error is not None and complaint in bad.error
    assert bad.text is None and bad.messages is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[[tenant]]\napi_keys = ["secret"]', "[[tenant]] 1 needs a name"),
        ('[[tenant]]\nname = "a"', "[[tenant]] 1 (a) needs api_keys, a list of texts"),
        ('[[tenant]]\nname = "a"\napi_keys = [1]', "needs api_keys, a list of texts"),
        ('[[tenant]]\nname = "a"\napi_keys = ["secret"]\nkeys = 1', "(a) has 'keys'; a tenant has name and api_keys"),
        ('[tenant]\nname = "a"', "tenant must be written as [[tenant]]"),
        ("prefix = 1", "prefix must be written as [[prefix]]"),
    ],
)
def test_a_malformed_tenant_is_an_error_without_its_keys(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert complaint in str(caught.value) and "headstart.toml" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_keys_of_tenants_are_not_shown(tmp_path: Path) -> None:
    options = read(tmp_path, '[[tenant]]\nname = "a"\napi_keys = ["secret"]')
    assert "secret" not in repr(options)
