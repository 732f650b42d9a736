"""The earlier prompts that have most text in common with a new one, wherever it stands. Bounded; pure.

SimilarPromptIndex indexes those of a log, PromptWindow holds the latest of a server. An entry of the window refers
to the
messages of a request as they were parsed, and to nothing once it is dropped. It becomes a LoggedPrompt, and its pieces
are hashed, only if it is compared. Prompts are compared within their group: a tenant's isolation domain.
"""

import re
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headstart.reuse.logged_prompt import CHARS_PER_TOKEN, LoggedPrompt, logged_prompt_of_entry
from headstart.reuse.prompt_changes import NOTHING, AvoidableText, avoidable_text, compare_logged_prompts

MIN_PIECE = 24  # characters of a piece that identifies a text
MAX_PER_PIECE = 4  # latest prompts remembered of a piece
_PIECES = re.compile(r"\n|(?<=[.!?]) |, ")
GROUP_PROMPTS = 32  # of one group
CANDIDATES = 2  # earlier prompts that one is compared with as a whole
MAX_CHARS = 256 * 1024  # of a prompt; longer ones are not examined
MAX_BYTES = 4 * MAX_CHARS  # of messages and tools in memory; larger ones are not kept
ENTRY_BYTES = 1024
HASH_BYTES = 8  # of a piece


class SimilarPromptIndex:
    """An index of prompts by their lines and sentences."""

    def __init__(self) -> None:
        self._found: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=MAX_PER_PIECE))

    def nearest_prompt_indices(self, prompt: LoggedPrompt, count: int) -> list[int]:
        """Return the indices of at most `count` earlier prompts, the nearest first, the latest of equals."""
        scores: Counter[int] = Counter()
        for piece, num_chars in prompt_piece_hashes(prompt):
            for index in self._found.get(piece, ()):
                scores[index] += num_chars
        return sorted(scores, key=lambda index: (-scores[index], -index))[:count]

    def add(self, index: int, prompt: LoggedPrompt) -> None:
        """Add a prompt; indices grow."""
        for piece, _ in prompt_piece_hashes(prompt):
            self._found[piece].append(index)


def prompt_piece_hashes(prompt: LoggedPrompt) -> Iterator[tuple[int, int]]:
    """Yield the hash and the length of each distinct piece of a prompt."""
    seen: set[int] = set()
    texts = [*prompt.tools, *(text for message in prompt.messages for text in (message.content, message.reasoning))]
    for text in texts:
        for piece in _PIECES.split(text):
            key = hash(piece)
            if len(piece) >= MIN_PIECE and key not in seen:
                seen.add(key)
                yield key, len(piece)


class WindowEntry:
    """One prompt of the window."""

    __slots__ = ("_pieces", "_sent", "group", "num_bytes", "num_tokens")

    def __init__(
        self,
        group: bytes,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        *,
        num_tokens: int,
        num_bytes: int,
    ) -> None:
        """`num_bytes`: the memory that messages and tools take."""
        self.group = group
        self.num_tokens = num_tokens
        self.num_bytes = ENTRY_BYTES + num_bytes + num_bytes * HASH_BYTES // MIN_PIECE
        self._sent = {"messages": messages, "tools": tools}
        self._pieces: array[int] | None = None

    @property
    def to_logged_prompt(self) -> LoggedPrompt:
        """The prompt in the form that is compared, made anew; that of a dropped entry is empty."""
        return logged_prompt_of_entry(0, self._sent) or LoggedPrompt(0, (), ())

    @property
    def piece_hashes(self) -> "array[int]":
        """The hashes of its distinct pieces."""
        if self._pieces is None:
            self._pieces = array("q", [piece for piece, _ in prompt_piece_hashes(self.to_logged_prompt)])
        return self._pieces

    def drop_messages(self) -> None:
        """Refer to no message any more."""
        self._sent = {}


class PromptWindow:
    """The latest prompts of all groups."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: deque[WindowEntry] = deque()
        self._groups: dict[bytes, deque[WindowEntry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: WindowEntry) -> bool:
        """Add a prompt and drop the oldest beyond the bounds; return False if it exceeds them alone."""
        if entry.num_bytes > self._max_bytes:
            return False
        group = self._groups.setdefault(entry.group, deque())
        group.append(entry)
        self._entries.append(entry)
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop(self._entries.popleft())
        return True

    def earlier_in_group(self, entry: WindowEntry) -> list[WindowEntry]:
        """Return the latest prompts of its group before an entry; none if it was dropped."""
        group = list(self._groups.get(entry.group, ()))
        at = next((index for index, other in enumerate(group) if other is entry), 0)
        return group[max(at - GROUP_PROMPTS, 0) : at]

    def _drop(self, entry: WindowEntry) -> None:
        self.num_bytes -= entry.num_bytes
        entry.drop_messages()
        group = self._groups[entry.group]
        group.popleft()
        if not group:
            del self._groups[entry.group]


def measure_avoidable_text(
    entry: WindowEntry, earlier: Sequence[WindowEntry], num_cached: int
) -> tuple[int, AvoidableText]:
    """Return the length of a prompt in characters, and its avoidable text. `num_cached` of its tokens were cached."""
    if not earlier or entry.num_tokens * CHARS_PER_TOKEN > MAX_CHARS:
        return 0, NOTHING
    prompt = entry.to_logged_prompt
    own = dict(prompt_piece_hashes(prompt))
    scores = [(sum(own.get(piece, 0) for piece in other.piece_hashes), at) for at, other in enumerate(earlier)]
    nearest = [earlier[at] for score, at in sorted(scores, reverse=True)[:CANDIDATES] if score]
    if not nearest:
        return 0, NOTHING
    num_chars = len(prompt.text)
    found = [compare_logged_prompts(prompt, other.to_logged_prompt) for other in nearest]
    best = max(found, key=lambda comparison: comparison.total_same_chars)
    return num_chars, avoidable_text(best, num_cached * num_chars // max(entry.num_tokens, 1))
