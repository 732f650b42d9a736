"""Tokenizer: text <-> token ids of one model, with the `tokenizers` library only (no transformers, no torch).

Of a folder it reads tokenizer.json for the tokens, and tokenizer_config.json, special_tokens_map.json,
generation_config.json and chat_template.jinja for special tokens and the chat template; of a GGUF file its metadata. It
behaves like transformers' AutoTokenizer on the same folder, except that it never removes spaces before punctuation. No
code from the folder is run. Encoding releases the interpreter lock and is thread-safe.
"""

import json
import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from headstart.bundled.packaged_models import packaged_model_of_file
from headstart.core.errors import ConfigError, InvalidRequestError
from headstart.core.request import CacheMode
from headstart.gguf.gguf_reader import has_gguf_suffix, read_gguf
from headstart.gguf.metadata import read_end_token_ids, read_string
from headstart.gguf.tokenizer_json import gguf_tokenizer_json, special_tokens_by_name
from headstart.openai.chat.chat_renderer import ChatRenderer
from headstart.openai.chat.chat_template import MAX_SOURCE_CHARS
from headstart.openai.chat.template_forms import ONE_TEXT, ContentForms

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Tokens, special tokens and chat template of one model."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        tool_call_parser: str = "auto",
    ) -> None:
        """`tool_call_parser`: of a model whose chat template does not tell it; auto: of the template."""
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.named_tokens = dict(named_tokens or {})
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_ids = eos_token_ids or tuple(i for i in [self._id_of("eos_token")] if i is not None)
        self.vocabulary = Vocabulary(backend)
        self.chat_template = chat_template
        self.tool_call_parser = tool_call_parser
        self._template = None if chat_template is None else ChatRenderer(chat_template, self.named_tokens)
        self.max_token_chars = _max_token_chars(backend, self.vocabulary)

    @classmethod
    def from_folder(cls, folder: Path | str) -> "Tokenizer":
        """Return the tokenizer of a model folder or GGUF file. Raises ConfigError for none, or an unreadable one."""
        folder = Path(folder)
        if has_gguf_suffix(folder):
            return _from_gguf(folder)
        config = _read_json(folder / "tokenizer_config.json")
        backend = _load_backend(folder)
        named = _named_tokens(config, _read_json(folder / "special_tokens_map.json"))
        special = [token for token in (*named.values(), *_extra_tokens(config)) if token]
        backend.add_special_tokens(list(dict.fromkeys(special)))
        return cls(
            backend,
            named_tokens=named,
            eos_token_ids=_eos_token_ids(folder, backend, named),
            chat_template=_chat_template(folder, config),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> "array[int]":
        """Return packed int32 token ids; `add_special_tokens` adds the model's own around the text (often <s>)."""
        # "fast": without offsets of the tokens in the text, which takes a third of the time
        return array("i", self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    @property
    def tenant_name(self) -> str:
        """The tenant whose requests it is for, "" for all."""
        return ""

    @property
    def digest(self) -> str:
        """A digest of all its settings; "": it takes no token ids beside a text."""
        return ""

    def with_precomputed_tokens(self, token_ids: "array[int]") -> "Tokenizer":
        """Return the tokenizer for a text of which these may be the token ids."""
        return self

    def for_domain(self, tenant: str, domain: bytes, mode: CacheMode = CacheMode.READ_WRITE) -> "Tokenizer":
        """Return the tokenizer for requests of one isolation domain: itself, since this class caches nothing."""
        return self

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the tokens; ids without a token have no text."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, also of special tokens; b"" for an id without a token."""
        return self.vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; bytes that are not valid UTF-8 become U+FFFD."""
        return self.vocabulary.token_bytes(token_id).decode("utf-8", errors="replace")

    def start_chat_renderer(self) -> None:
        """Start the chat renderer ahead of the first conversation. Raises ConfigError for an invalid template."""
        if self._template is not None:
            self._template.start()

    def render_chat_text(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Return the conversation as one prompt text, rendered by the model's template in a separate process.

        Blocks: call it off the event loop. Raises InvalidRequestError and QueueFullError as ChatRenderer does.
        """
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions with a prompt instead", param="messages"
            )
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            options=options or {},
            tools=tools,
            tenant=self.tenant_name,
        )

    def content_forms(self) -> ContentForms:
        """Return the forms of content that the chat template takes. Blocks at first, raises, as `render_chat_text`."""
        return ONE_TEXT if self._template is None else self._template.content_forms()

    def _id_of(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


# ------------------------------------------------------------------------------------------ reading a GGUF or a folder


def _from_gguf(path: Path) -> Tokenizer:
    file = read_gguf(path)
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(gguf_tokenizer_json(file), ensure_ascii=False))
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"the tokenizer of {path.name!r} cannot be read: {error}") from error
    packaged = packaged_model_of_file(path)
    return Tokenizer(
        backend,
        named_tokens=special_tokens_by_name(file),
        eos_token_ids=read_end_token_ids(file),
        chat_template=read_string(file, "tokenizer.chat_template", None),
        tool_call_parser="auto" if packaged is None else packaged.tool_call_parser,
    )


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"tokenizer.json of {folder.name!r} cannot be read: {error}") from error
    # Old checkpoints have a sentencepiece model only. transformers can convert it but imports torch, which costs this
    # process half a gigabyte: so it is imported only in this case.
    try:
        from transformers import AutoTokenizer

        converted: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        return tokenizers.Tokenizer.from_str(converted.backend_tokenizer.to_str())
    except Exception as error:  # transformers may raise anything for an unknown folder
        raise ConfigError(
            f"no tokenizer in {folder.name!r}: there is no tokenizer.json, and converting another kind failed "
            f"({type(error).__name__}); save one with transformers' tokenizer.save_pretrained"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path.name} is not valid JSON: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path.name} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} is not a JSON object")
    return value


def _content(token: object) -> str | None:
    """Return the text of a token, which is a string or {"content": text, ...}; else None."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for name in NAMED_TOKENS:
        content = _content(config.get(name)) or _content(special_map.get(name))
        if content is not None:
            named[name] = content
    return named


def _extra_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the special tokens of the configuration beyond NAMED_TOKENS, and those of its added tokens."""
    extra: list[str] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(name)
        tokens = list(tokens.values()) if isinstance(tokens, Mapping) else tokens
        extra.extend(text for text in map(_content, tokens if isinstance(tokens, list) else []) if text)
    added = config.get("added_tokens_decoder")
    for token in added.values() if isinstance(added, Mapping) else []:
        if isinstance(token, Mapping) and token.get("special") and isinstance(token.get("content"), str):
            extra.append(token["content"])
    return extra


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> tuple[int, ...]:
    """Return all end-of-text ids: those of generation_config.json (else of config.json), and the tokenizer's own."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        found.extend(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
        if found:
            break
    own = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return tuple(dict.fromkeys([*found, *([] if own is None else [own])]))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        size = path.stat().st_size
        if size > 4 * MAX_SOURCE_CHARS:
            raise ConfigError(f"{path.name} has {size} bytes; at most {4 * MAX_SOURCE_CHARS} are read: shorten it")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path.name} is not UTF-8: {error}") from error
    template = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _max_token_chars(backend: tokenizers.Tokenizer, vocabulary: "Vocabulary") -> int:
    """Return the maximum characters per token; 0 if unbounded (runs of unknown characters, removed spaces)."""
    tidied = any(part["type"] != "NFC" for part in flattened_component_settings(backend.normalizer))
    stripping = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if tidied or stripping or not vocabulary.byte_level:
        return 0
    longest = max((len(token) for token in backend.get_vocab(with_added_tokens=True)), default=0)
    return 4 * longest  # NFC can compose one character from up to four


class Vocabulary:
    """The bytes of tokens, computed once each. `byte_level`: a text is exactly its tokens' bytes, concatenated."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        kinds = [part["type"] for part in flattened_component_settings(backend.decoder)]
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}  # filled on demand

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes in the middle of a text; b"" for an id without a token."""
        written = self._bytes.get(token_id)
        if written is None:
            token = self._backend.id_to_token(token_id)
            written = b"" if token is None else self._written(token)
            self._bytes[token_id] = written
        return written

    def decode_bytes(self, token_ids: Collection[int]) -> bytes:
        """Return the bytes of many tokens, each below the size of the vocabulary, as `token_bytes` does."""
        for token_id in {*token_ids} - self._bytes.keys():
            self.token_bytes(token_id)
        return b"".join(map(self._bytes.__getitem__, token_ids))

    def is_byte_token(self, token_id: int) -> bool:
        """Return whether the token is one raw byte, <0x00> to <0xFF>, of a vocabulary with byte fallback."""
        if not self.byte_fallback:
            return False
        token = self._backend.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def _written(self, token: str) -> bytes:
        if self.byte_level:
            # As in the decoder: a token with any character outside the table is plain text (added tokens).
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        decoder = self._backend.decoder
        if decoder is None:
            return token.encode()
        probe = "a"  # any token before it, so that a leading space survives
        return decoder.decode([probe, token]).removeprefix(probe).encode()


def flattened_component_settings(component: Any) -> list[dict[str, Any]]:
    """Return the settings of a decoder or normalizer of the library, with sequences flattened; [] for None."""
    return [] if component is None else list(_flat(json.loads(component.__getstate__())))


def _flat(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = settings.get("decoders") or settings.get("normalizers")
    if inner is None:
        yield settings
    for part in inner or ():
        yield from _flat(part)


def _byte_table() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes map to themselves, the other 68 to the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_table()
