"""SegmentedTokenizer: a text is tokenized in segments, and segments that came before are not tokenized again.

Tokenizers that first split a text into words, and merge within words only, give the tokens of a text as those of its
parts, if it is parted where one word ends and the next begins: between a letter and a space with a letter behind it.
Where that may not hold of a tokenizer, it is asked for the whole text. Segments end at the first such place after
SEGMENT_CHARS characters, so texts that begin alike are parted alike.
"""

import json
import re
import threading
from array import array
from collections import OrderedDict
from random import Random
from typing import Any

import tokenizers

from headstart.server.tokenizer import Tokenizer

SEGMENT_CHARS = 1024
MAX_CHARS = 16_000_000  # of segments that are remembered
SAMPLES = 64
_BORDER = re.compile(r"[A-Za-z](?= [A-Za-z])")
_SAMPLE_ALPHABET = "aZé中 \t\n\r0'._-,!\"(<|>{}/\\ "


class SegmentedTokenizer(Tokenizer):
    """The same tokens as `base` gives, sooner for texts whose beginnings came before. May be used by many threads."""

    def __init__(self, base: Tokenizer, *, segment_chars: int = SEGMENT_CHARS, max_chars: int = MAX_CHARS) -> None:
        self.__dict__.update(base.__dict__)
        self.num_hits = 0  # segments that were remembered
        self.num_misses = 0
        self._segment_chars = segment_chars
        self._max_chars = max_chars
        self._num_chars = 0
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self._around = _around(self.backend) if is_separable(self.backend) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> "array[int]":
        """Returns packed int32 token ids, as the base does."""
        if self._around is None or len(text) < 2 * self._segment_chars:
            return super().encode(text, add_special_tokens=add_special_tokens)
        before, after = self._around if add_special_tokens else ((), ())
        tokens = array("i", before)
        start = 0
        while start < len(text):
            border = _BORDER.search(text, start + self._segment_chars)
            end = border.end() if border is not None else len(text)
            if border is None:  # the rest ends nowhere: it will look different when the text goes on
                tokens += super().encode(text[start:], add_special_tokens=False)
            else:
                tokens += self._segment(text[start:end])
            start = end
        tokens.extend(after)
        return tokens

    def _segment(self, text: str) -> "array[int]":
        with self._lock:
            found = self._known.get(text)
            if found is not None:
                self._known.move_to_end(text)
                self.num_hits += 1
                return found
            self.num_misses += 1
        found = super().encode(text, add_special_tokens=False)
        with self._lock:
            if text not in self._known:
                self._known[text] = found
                self._num_chars += len(text)
            while self._num_chars > self._max_chars:
                gone, _ = self._known.popitem(last=False)
                self._num_chars -= len(gone)
        return found


def is_separable(backend: tokenizers.Tokenizer) -> bool:
    """Whether texts may be parted between words. Said of tokenizers that split by a pattern before they merge."""
    parts: dict[str, Any] = json.loads(backend.to_str())
    normalizer, splitter = parts.get("normalizer"), parts.get("pre_tokenizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        return False
    if splitter is None or parts["model"].get("type") != "BPE" or parts["model"].get("dropout"):
        return False
    if "(?<" in json.dumps(splitter) or not all(map(_keeps_words_apart, backend.get_added_tokens_decoder().values())):
        return False
    steps = splitter.get("pretokenizers", [splitter])
    if any(step["type"] not in ("ByteLevel", "Split", "Digits") or step.get("add_prefix_space") for step in steps):
        return False
    return _parts_words(backend)


def _keeps_words_apart(token: tokenizers.AddedToken) -> bool:
    """Whether an added token can neither hold a border nor take a space at one."""
    text = token.content
    edges = (token.lstrip and text[:1].isalpha()) or (token.rstrip and text[-1:].isalpha()) or token.single_word
    return not edges and _BORDER.search(text) is None and not text.endswith(" ") and not text.startswith(" ")


def _parts_words(backend: tokenizers.Tokenizer) -> bool:
    """Tries it: every border of sample texts is one of the pattern's."""
    assert backend.pre_tokenizer is not None
    rng = Random(0)
    for _ in range(SAMPLES):
        text = "".join(rng.choice(_SAMPLE_ALPHABET) for _ in range(24)) + "the end of a b's C9 d_e f"
        starts = {start for _, (start, _) in backend.pre_tokenizer.pre_tokenize_str(text)}
        if any(match.end() not in starts for match in _BORDER.finditer(text)):
            return False
    return True


def _around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens put before and behind a text."""
    inner, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    at = next(i for i in range(len(whole)) if whole[i : i + len(inner)] == inner)
    return tuple(whole[:at]), tuple(whole[at + len(inner) :])
