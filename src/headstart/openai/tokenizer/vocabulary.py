"""Vocabulary: the bytes of each single token, and the ids of added and special tokens."""

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """The bytes of tokens, computed once each. `byte_level`: a text is exactly its tokens' bytes, concatenated."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        kinds = [part["type"] for part in parts_of(backend.decoder)]
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


def parts_of(component: Any) -> list[dict[str, Any]]:
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
