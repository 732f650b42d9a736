"""OutputHistory: earlier outputs, by isolation domain and adapter, as a source of drafts.

Agents repeat what they wrote in earlier calls, whether or not those began with the same prompt
(benchmarks/speculation). No request is timed by the outputs of another domain. Memory is bounded: the least recently
used entry is removed, and an entry keeps between one and two generations of tokens.
"""

from array import array
from collections import OrderedDict

from headstart.core.sequence import Sequence
from headstart.core.speculation.draft import END, Draft, draft_from_match, draft_of_longer_match
from headstart.core.speculation.ngram_index import NgramIndex

MAX_ENTRIES = 64
GENERATION_TOKENS = 32_768
OUTPUT_TOKENS = 8_192  # of one output, its last ones: they are indexed in one step, in about 6 ms

Key = tuple[bytes, str | None]


class _Entry:
    """The latest outputs of one key: the generation that is being filled, and the full one before it."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._generations = [(array("i"), NgramIndex(length, GENERATION_TOKENS))]

    def add(self, tokens: "array[int]") -> None:
        """Append an output; of a long one its end."""
        kept = tokens[-OUTPUT_TOKENS:]
        if len(self._generations[0][0]) + len(kept) > GENERATION_TOKENS:
            fresh = array("i"), NgramIndex(self._length, GENERATION_TOKENS)
            self._generations = [fresh, self._generations[0]]
        text, index = self._generations[0]
        text.extend(kept)
        text.append(END)
        index.index_tokens(text, len(text))

    def find(self, last: "array[int]", num: int) -> Draft | None:
        """Return up to `num` tokens behind the longest occurrence of the end of `last`."""
        best: Draft | None = None
        for text, index in self._generations:
            match = index.find_longest(text, last)
            if match is not None:
                best = draft_of_longer_match(best, draft_from_match(text, match, num))
        return best


class OutputHistory:
    """The latest outputs of each domain and adapter."""

    def __init__(self, length: int, context: int) -> None:
        """`length`: least number of matching tokens. `context`: prompt tokens that are kept before an output."""
        self._length = length
        self._context = context
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add_output(self, seq: Sequence) -> None:
        """Keep the output of a sequence, unless it is too short to be found."""
        if seq.num_output_tokens < self._length:
            return
        key = _key(seq)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(self._length)
            if len(self._entries) > MAX_ENTRIES:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        entry.add(seq.token_ids[max(seq.num_prompt_tokens - self._context, 0) :])

    def find_draft(self, seq: Sequence, last: "array[int]", num: int) -> Draft | None:
        """Return up to `num` tokens that followed the end of `last` in an earlier output of its key."""
        entry = self._entries.get(_key(seq))
        return None if entry is None else entry.find(last, num)

    def clear(self) -> None:
        """Forget all outputs."""
        self._entries.clear()


def _key(seq: Sequence) -> Key:
    """Return the isolation domain and the adapter."""
    return seq.request.domain, seq.request.adapter
