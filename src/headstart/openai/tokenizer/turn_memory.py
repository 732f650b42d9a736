"""TurnMemory: the token ids that were generated for the turns of conversations, to be used when a turn comes back.

A turn that a client sends back is text. Tokenized again, it may have other tokens than those that were generated, and
then no block behind the first different token is reused. A turn is found by the text of the whole prompt that it was
generated from: its key is a SHA-256 of isolation domain and prompt. So the prompt of the next turn consists of exactly
the tokens whose KV is cached, or, if anything before the turn differs, of the tokenizer's own. Bounded in bytes, per
tenant and in total. Thread-safe.
"""

import hashlib
import itertools
import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from headstart.openai.tokenizer.tenant_cache import Scope, TenantCache
from headstart.openai.tokenizer.vocabulary import Vocabulary

MAX_BYTES = 64 << 20
TENANT_SHARE = 4  # a tenant may use a quarter of them
ENTRY_BYTES = 400  # overhead per prompt: key, tuple, table slot
TURN_BYTES = 700  # overhead per turn: objects and cuts
MAX_TURNS = 8  # of one prompt: choices, and answers to repeated requests
MAX_CUTS = 64  # of one turn
MAX_ENDINGS = 8  # of one tenant
END_TOKENS = 16  # of a prompt, among which its last added token is looked for


class Cut(NamedTuple):
    """A place where a turn may be cut without a change of the tokens before it."""

    num_tokens: int
    num_chars: int


@dataclass(frozen=True, slots=True)
class GeneratedTurn:
    """One generated turn, and the piece of the prompt before it. `cuts`: the longest first; the first is the whole."""

    token_ids: "array[int]"
    text: str
    cuts: tuple[Cut, ...]
    before: "TokenizedPiece"


class TokenizedPiece(NamedTuple):
    """The tokens of a prompt from character `start` to its end, so that they are not tokenized again."""

    start: int
    token_ids: "array[int]"


class TurnStats(NamedTuple):
    """Counters of a TurnMemory since its start."""

    num_whole: int = 0  # turns that came back as the same text
    num_partial: int = 0  # turns of which only a beginning, up to an added token, came back
    num_changed: int = 0  # turns that came back with another text, or none of them
    num_tokens: int = 0  # generated tokens that were used in prompts
    num_bytes: int = 0


class Piece(NamedTuple):
    """A piece of a prompt: text, its tokens if they are known, and the generated tokens that follow it."""

    text: str
    text_ids: "array[int] | None"
    token_ids: "array[int]"


class ReadPrompt(NamedTuple):
    """A prompt in pieces, and the text behind the last generated tokens, which begins at `start`.

    `key` is that of the turn it asks for.
    """

    pieces: list[Piece]
    start: int
    rest: str
    key: bytes


class TurnMemory:
    """The generated turns of all tenants."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._turns: TenantCache[tuple[GeneratedTurn, ...]] = TenantCache(
            max(max_bytes // TENANT_SHARE, 1), max_bytes, _size
        )
        self._endings: TenantCache[tuple[str, ...]] = TenantCache(max_bytes, max(max_bytes // 8, 1), _endings_size)
        self._counts = TurnStats()
        self._lock = threading.Lock()

    @property
    def stats(self) -> TurnStats:
        """The counters, with the bytes held now."""
        return self._counts._replace(num_bytes=self._turns.num_bytes + self._endings.num_bytes)

    def read(self, scope: Scope, text: str) -> ReadPrompt:
        """Return a prompt with the generated tokens of the turns that are found in it."""
        places, keys = self._places(scope, text)
        # The last turns are marked as used first: if a conversation does not fit, its beginning is kept.
        found = self._turns.find(scope.tenant, keys[-2::-1])[::-1] if len(keys) > 1 else []
        pieces: list[Piece] = []
        at = num_whole = num_partial = num_changed = num_tokens = 0
        for place, turns in zip(places, found, strict=True):
            if turns is None or place < at:
                continue
            turn, cut = _longest(turns, text, place)
            if not cut.num_tokens:
                num_changed += 1
                continue
            num_whole += cut is turn.cuts[0]
            num_partial += cut is not turn.cuts[0]
            num_tokens += cut.num_tokens
            known = turn.before.token_ids if turn.before.start == at else None
            pieces.append(Piece(text[at:place], known, turn.token_ids[: cut.num_tokens]))
            at = place + cut.num_chars
        with self._lock:
            counts = zip(self._counts, (num_whole, num_partial, num_changed, num_tokens, 0), strict=True)
            self._counts = TurnStats(*(total + new for total, new in counts))
        return ReadPrompt(pieces, at, text[at:], keys[-1])

    def remember(self, scope: Scope, key: bytes, ending: str, turn: GeneratedTurn) -> None:
        """Store a turn. `key`: of the prompt, from `read`; `ending`: the end of the prompt, to find it again."""
        if not scope.remembers:
            return
        endings = self._endings.find(scope.tenant, [b""])[0] or ()
        if ending not in endings:
            self._endings.put(scope.tenant, b"", (ending, *endings)[:MAX_ENDINGS])
        before = self._turns.find(scope.tenant, [key])[0] or ()
        others = [other for other in before if other.token_ids != turn.token_ids]
        self._turns.put(scope.tenant, key, (turn, *others[: MAX_TURNS - 1]))

    def _places(self, scope: Scope, text: str) -> tuple[list[int], list[bytes]]:
        """Return the places where a turn may begin, and the keys of the text before each; last the key of all of it."""
        endings = self._endings.find(scope.tenant, [b""])[0] or ()
        places = sorted({place for ending in endings for place in _ends(text, ending) if place < len(text)})
        hashed = hashlib.sha256(len(scope.domain).to_bytes(8, "little") + scope.domain)
        keys: list[bytes] = []
        for start, end in itertools.pairwise((0, *places, len(text))):
            hashed.update(text[start:end].encode("utf-8", "surrogatepass"))
            keys.append(hashed.copy().digest())
        return places, keys


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A turn that is being generated, and the place where it is stored when it has ended."""

    memory: TurnMemory
    scope: Scope
    key: bytes
    ending: str
    before: TokenizedPiece
    vocabulary: Vocabulary

    def ended(self, token_ids: "array[int]") -> None:
        """Store the tokens of the turn."""
        turn = generated_turn(token_ids, self.before, self.vocabulary)
        if turn is not None:
            self.memory.remember(self.scope, self.key, self.ending, turn)


class Conversation(NamedTuple):
    """A rendered conversation as token ids, and the turn that it asks for; None: the turn is not stored."""

    token_ids: "array[int]"
    turn: OpenTurn | None = None


def ending_of(token_ids: "array[int]", text: str, vocabulary: Vocabulary) -> str:
    """Return the end of a prompt from its last added token on, as in "<|im_start|>assistant"; "" if it has none."""
    for index in range(len(token_ids) - 1, max(len(token_ids) - 1 - END_TOKENS, -1), -1):
        if token_ids[index] in vocabulary.added_ids:
            ending = b"".join(map(vocabulary.token_bytes, token_ids[index:])).decode("utf-8", "replace")
            return ending if text.endswith(ending) else ""
    return ""


def generated_turn(token_ids: "array[int]", before: TokenizedPiece, vocabulary: Vocabulary) -> GeneratedTurn | None:
    """Return the turn of generated tokens, without special tokens at its end; None if nothing is left.

    The text may be cut behind its last visible character, since many templates strip contents, and before each added
    token, at which tokenizers split texts first.
    """
    end = len(token_ids)
    while end and token_ids[end - 1] in vocabulary.special_ids:
        end -= 1
    if not end:
        return None
    token_ids = token_ids[:end]
    written = [vocabulary.token_bytes(token_id) for token_id in token_ids]
    joined = b"".join(written)
    text = joined.decode("utf-8", "replace")
    stripped = len(text.rstrip())
    num_bytes = len(joined)
    cuts: list[Cut] = [Cut(end, len(text))]
    stripped_bytes = len(text[:stripped].encode("utf-8", "replace")) if stripped < len(text) else num_bytes
    for index in range(end - 1, 0, -1):
        num_bytes -= len(written[index])
        is_stripped = len(cuts) == 1 and num_bytes == stripped_bytes < len(joined)
        if is_stripped or token_ids[index] in vocabulary.added_ids:
            cuts.append(Cut(index, len(joined[:num_bytes].decode("utf-8", "replace"))))
            if len(cuts) == MAX_CUTS:
                break
    return GeneratedTurn(token_ids, text, tuple(cuts), before)


def _longest(turns: tuple[GeneratedTurn, ...], text: str, place: int) -> tuple[GeneratedTurn, Cut]:
    """Return the turn with the longest cut that the text has at `place`, the newest of equals."""
    best, longest = turns[0], Cut(0, 0)
    for turn in turns:
        for cut in turn.cuts:
            if cut.num_chars <= longest.num_chars:
                break
            if text.startswith(turn.text[: cut.num_chars], place):
                best, longest = turn, cut
                break
    return best, longest


def _ends(text: str, ending: str) -> Iterator[int]:
    """Yield the end of each occurrence."""
    at = text.find(ending)
    while at >= 0:
        yield at + len(ending)
        at = text.find(ending, at + 1)


def _size(turns: tuple[GeneratedTurn, ...]) -> int:
    return ENTRY_BYTES + sum(
        TURN_BYTES
        + 4 * (len(turn.token_ids) + len(turn.before.token_ids))
        + _text_bytes(turn.text)
        + 80 * len(turn.cuts)
        for turn in turns
    )


def _endings_size(endings: tuple[str, ...]) -> int:
    return ENTRY_BYTES + sum(100 + _text_bytes(ending) for ending in endings)


def _text_bytes(text: str) -> int:
    """Return the bytes of a text in memory: 1, 2 or 4 per character."""
    return len(text) * (1 if text.isascii() else 4)
