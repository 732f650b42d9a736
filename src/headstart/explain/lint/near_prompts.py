"""NearPrompts: the earlier prompts of a log that have most text in common with a new one, wherever it stands. Pure."""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator

from headstart.explain.lint.logged_prompt import LoggedPrompt

MIN_PIECE = 24  # characters of a piece that identifies a text
MAX_PER_PIECE = 4  # latest prompts remembered of a piece
_PIECES = re.compile(r"\n|(?<=[.!?]) |, ")


class NearPrompts:
    """An index of prompts by their lines and sentences."""

    def __init__(self) -> None:
        self._found: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=MAX_PER_PIECE))

    def nearest(self, prompt: LoggedPrompt, count: int) -> list[int]:
        """Return the indices of at most `count` earlier prompts, the nearest first, the latest of equals."""
        scores: Counter[int] = Counter()
        for piece, num_chars in pieces_of(prompt):
            for index in self._found.get(piece, ()):
                scores[index] += num_chars
        return sorted(scores, key=lambda index: (-scores[index], -index))[:count]

    def add(self, index: int, prompt: LoggedPrompt) -> None:
        """Add a prompt; indices grow."""
        for piece, _ in pieces_of(prompt):
            self._found[piece].append(index)


def pieces_of(prompt: LoggedPrompt) -> Iterator[tuple[int, int]]:
    """Yield the hash and the length of each distinct piece of a prompt."""
    seen: set[int] = set()
    texts = [*prompt.tools, *(text for message in prompt.messages for text in (message.content, message.reasoning))]
    for text in texts:
        for piece in _PIECES.split(text):
            key = hash(piece)
            if len(piece) >= MIN_PIECE and key not in seen:
                seen.add(key)
                yield key, len(piece)
