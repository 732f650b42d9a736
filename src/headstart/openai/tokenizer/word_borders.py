"""Borders at which a text may be cut without changing its tokens: proven from the settings of a tokenizer.

A border is between an ASCII letter and a space that is followed by an ASCII letter. Cutting there changes no token if

- no added token spans a border, or depends on the text after it;
- the normalizer is one of Unicode's four forms, none of which composes across a border;
- no pattern that splits texts can read a letter and then a space, whether that leads to a match or not, or look around
  by more than one character, or at a space: so each match is the same with and without the text after the border;
- one of these patterns matches every single ASCII letter: so a match, and with it a word, ends at each border;
- the model merges within words only.

Patterns are read by a small parser, which refuses unknown syntax. A refused tokenizer may be safe nevertheless; its
texts are tokenized whole.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import tokenizers
from tokenizers import Regex, normalizers

BORDER = re.compile(r"[A-Za-z](?= [A-Za-z])")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CROSSING = re.compile(r"[A-Za-z] ")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel with use_regex
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_MODELS = ("BPE", "WordPiece", "WordLevel", "Unigram")
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?[A-Za-z_ ]+\}|u[0-9A-Fa-f]{4}|x\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{2}|[sSdDwWrntfv]|[^0-9A-Za-z])"
)
_REPEAT = re.compile(r"[?*+]|\{(\d*)(,?)(\d*)\}")
_MAX_DEPTH = 32


def is_safe_to_cut_at_borders(backend: tokenizers.Tokenizer, written: str = "") -> bool:
    """Return whether any text may be cut at any BORDER; False if this cannot be proven. `written`: as JSON."""
    parts: dict[str, Any] = json.loads(written or backend.to_str())
    model, splitter = parts["model"], parts.get("pre_tokenizer")
    if splitter is None or model.get("type") not in _MODELS or model.get("dropout"):
        return False
    if not _keeps_forms(parts.get("normalizer")):
        return False
    if not all(map(_stays_between_borders, backend.get_added_tokens_decoder().values())):
        return False
    return _ends_words(splitter)


def _keeps_forms(normalizer: dict[str, Any] | None) -> bool:
    """Return whether a normalizer leaves borders unchanged, in any context."""
    if normalizer is None:
        return True
    return all(step["type"] in _FORMS for step in normalizer.get("normalizers", [normalizer]))


def _stays_between_borders(token: tokenizers.AddedToken) -> bool:
    """Return whether an added token can neither contain a border nor consume, or look at, a space at one."""
    contents = {token.content, *(getattr(normalizers, form)().normalize_str(token.content) for form in _FORMS)}
    takes = token.single_word or (token.rstrip and any(text[-1:].isalpha() for text in contents))
    return not takes and not any(_CROSSING.search(text) or text.startswith(" ") for text in contents)


def _ends_words(splitter: dict[str, Any]) -> bool:
    """Return whether no step of a pre-tokenizer reads across a border, and one of them ends words there."""
    steps: list[dict[str, Any]] = splitter.get("pretokenizers", [splitter])
    ended = False
    for index, step in enumerate(steps):
        kind = step["type"]
        if kind == "ByteLevel":
            if step.get("add_prefix_space") or index != len(steps) - 1:
                return False
            ended |= bool(step.get("use_regex", True)) and _pattern_ends_words(_GPT2)
        elif kind == "Split":
            if step.get("behavior") not in ("Isolated", "Removed"):
                return False
            pattern = step["pattern"]
            try:
                found = _parse(pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"]))
            except _UnknownSyntaxError:
                return False
            if found.crosses or found.is_empty:
                return False
            ended |= found.letters >= set(_LETTERS)
        elif kind != "Digits":
            return False
    return ended


def _pattern_ends_words(pattern: str) -> bool:
    found = _parse(pattern)
    return not found.crosses and not found.is_empty and found.letters >= set(_LETTERS)


class _UnknownSyntaxError(ValueError):
    """A pattern with syntax that the parser does not support."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Properties of the possible matches of a part of a pattern; only `letters` is about certain matches."""

    is_empty: bool  # may match the empty string
    is_optional: bool  # can match the empty string at any position
    starts_with_space: bool
    ends_with_letter: bool
    crosses: bool  # an attempt at a match may read a letter and then a space
    letters: frozenset[str] = frozenset()  # letters that it matches alone, in any context


_NOTHING = _Part(True, True, False, False, False)


def _then(first: _Part, second: _Part) -> _Part:
    letters = (first.letters if second.is_optional else frozenset()) | (
        second.letters if first.is_optional else frozenset()
    )
    return _Part(
        first.is_empty and second.is_empty,
        first.is_optional and second.is_optional,
        first.starts_with_space or (first.is_empty and second.starts_with_space),
        second.ends_with_letter or (second.is_empty and first.ends_with_letter),
        first.crosses or second.crosses or (first.ends_with_letter and second.starts_with_space),
        letters,
    )


def _either(first: _Part, second: _Part) -> _Part:
    return _Part(
        first.is_empty or second.is_empty,
        first.is_optional or second.is_optional,
        first.starts_with_space or second.starts_with_space,
        first.ends_with_letter or second.ends_with_letter,
        first.crosses or second.crosses,
        first.letters | second.letters,
    )


def _parse(pattern: str) -> _Part:
    """Return the properties of a pattern. Raises _UnknownSyntaxError."""
    parser = _Parser(pattern)
    found = parser.alternatives(0, ignores_case=False)
    if parser.position != len(pattern):
        raise _UnknownSyntaxError
    return found


class _Parser:
    """Parser of the syntax of splitting patterns, without anchors, look-behind, back-references, possessive repeats.

    Between two characters that are read consecutively there are only parts that may be empty. So if a part that may end
    with a letter never directly precedes one that may start with a space, no attempt at a match reads across a border.
    """

    def __init__(self, pattern: str) -> None:
        self.position = 0
        self._pattern = pattern

    def alternatives(self, depth: int, *, ignores_case: bool) -> _Part:
        if depth > _MAX_DEPTH:
            raise _UnknownSyntaxError
        found = self._sequence(depth, ignores_case)
        while self._takes("|"):
            found = _either(found, self._sequence(depth, ignores_case))
        return found

    def _sequence(self, depth: int, ignores_case: bool) -> _Part:
        found = _NOTHING
        while self.position < len(self._pattern) and self._pattern[self.position] not in "|)":
            found = _then(found, self._repeated(self._atom(depth, ignores_case)))
        return found

    def _atom(self, depth: int, ignores_case: bool) -> _Part:
        if self._takes("(?!") or self._takes("(?="):
            return self._look_ahead(ignores_case)
        for opening, flag in (("(?:", ignores_case), ("(?i:", True)):
            if self._takes(opening):
                return self._group(depth, flag)
        if self._takes("("):
            if self._takes("?") or self._takes("*"):
                raise _UnknownSyntaxError
            return self._group(depth, ignores_case)
        return _character(self._character_text(), ignores_case)

    def _group(self, depth: int, ignores_case: bool) -> _Part:
        found = self.alternatives(depth + 1, ignores_case=ignores_case)
        self._expect(")")
        return found

    def _look_ahead(self, ignores_case: bool) -> _Part:
        """Parse a look-ahead of one character, not a space: for it a border and the end of a text are the same."""
        looked_at = _character(self._character_text(), ignores_case=False)
        self._expect(")")
        if looked_at.starts_with_space or ignores_case:
            raise _UnknownSyntaxError
        return replace(_NOTHING, is_optional=False)

    def _repeated(self, part: _Part) -> _Part:
        found = _REPEAT.match(self._pattern, self.position)
        if found is None:
            return part
        self.position = found.end()
        low, comma, high = found.groups() if found[0].startswith("{") else ("", ",", "")
        if self._pattern[self.position : self.position + 1] in ("?", "+", "*", "{"):
            raise _UnknownSyntaxError  # lazy, possessive, or repeated again
        if found[0] in ("?", "*", "+"):
            least, most = (1 if found[0] == "+" else 0), (1 if found[0] == "?" else 2)
        elif not low:
            raise _UnknownSyntaxError
        else:
            least = int(low)
            most = least if not comma else int(high) if high else least + 2
        if most == 0 or most < least:
            raise _UnknownSyntaxError
        return _Part(
            part.is_empty or least == 0,
            part.is_optional or least == 0,
            part.starts_with_space,
            part.ends_with_letter,
            part.crosses or (most > 1 and part.ends_with_letter and part.starts_with_space),
            part.letters if least <= 1 or part.is_optional else frozenset(),
        )

    def _character_text(self) -> str:
        """Return the text of a pattern of one character, and advance past it."""
        start, pattern = self.position, self._pattern
        first = pattern[start : start + 1]
        if first == "[":
            self._class()
        elif first == "\\":
            escape = _ESCAPE.match(pattern, start)
            if escape is None:
                raise _UnknownSyntaxError
            self.position = escape.end()
        elif not first or first in "^$?*+{})(|]":
            raise _UnknownSyntaxError
        else:
            self.position += 1
        return pattern[start : self.position]

    def _class(self) -> None:
        depth, at, pattern = 0, self.position, self._pattern
        while at < len(pattern):
            if pattern[at] == "\\":
                escape = _ESCAPE.match(pattern, at)
                if escape is None:
                    raise _UnknownSyntaxError
                at = escape.end()
                continue
            if pattern[at] == "[":
                depth += 1
                at += 2 if pattern[at + 1 : at + 2] == "^" else 1
                if pattern[at : at + 1] == "]":  # an empty class, or a literal bracket
                    raise _UnknownSyntaxError
                continue
            at += 1
            if pattern[at - 1] == "]":
                depth -= 1
                if not depth:
                    self.position = at
                    return
        raise _UnknownSyntaxError

    def _takes(self, text: str) -> bool:
        if not self._pattern.startswith(text, self.position):
            return False
        self.position += len(text)
        return True

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            raise _UnknownSyntaxError


def _character(pattern: str, ignores_case: bool) -> _Part:
    """Return the properties of a pattern of one character, tested with the library that will use it."""
    try:
        others = normalizers.Replace(Regex(pattern), "").normalize_str(_LETTERS + " ")
    except Exception as error:  # the library raises bare Exception
        raise _UnknownSyntaxError from error
    letters = frozenset(_LETTERS) - set(others)
    space = " " not in others
    if ignores_case:  # letters of other scripts may fold to ASCII letters: assume the worst
        return _Part(False, False, space, True, False)
    return _Part(False, False, space, bool(letters), False, letters)
