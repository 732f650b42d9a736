"""Ask and Prompt: a request as the router sees it, and the names of its prompt's blocks.

The engine's hashing (core/cache/hashing.py) with a root of the router's own: a router knows neither weights nor
secrets, so its names equal no engine's, and need not. Tenant, model and adapter are in the root. Full blocks only, as
in engines.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headstart.core.cache.hashing import BlockHash, extend_hashes, pack, root_hash

BYTES_PER_UNIT = 4  # of text that stand for one token where there is no tokenizer


def router_root(model: str, *, adapter: str | None = None, domain: bytes = b"") -> BlockHash:
    """The parent of every first block of one model, adapter and isolation domain; no engine's root equals it."""
    return root_hash(b"headstart-router/" + model.encode(), adapter=adapter, domain=domain)


def pack_text(text: bytes) -> "array[int]":
    """UTF-8 text as pseudo-tokens of four bytes each; what is left over at the end is filled up with zeros."""
    units = array("i")
    units.frombytes(text + b"\0" * (-len(text) % BYTES_PER_UNIT))
    return units


class Prompt:
    """A prompt and the names of its full blocks, worked out once for each block size there is.

    `exact`: its tokens are the engine's own; else they are pseudo-tokens of text, and what the engine counts has to be
    scaled.
    """

    __slots__ = ("_names", "_root", "_token_ids", "exact", "num_tokens")

    def __init__(self, token_ids: Iterable[int], root: BlockHash, *, exact: bool = True) -> None:
        self._token_ids = pack(token_ids)
        self._root = root
        self._names: dict[int, list[BlockHash]] = {}
        self.num_tokens = len(self._token_ids)
        self.exact = exact

    @property
    def token_ids(self) -> "array[int]":
        """Its tokens, or pseudo-tokens; not to be changed."""
        return self._token_ids

    @classmethod
    def of_names(cls, names: list[BlockHash], num_tokens: int, block_size: int) -> "Prompt":
        """A prompt of which only the names at one block size are known: traces, logs."""
        prompt = cls((), names[0] if names else BlockHash(b""))
        prompt.num_tokens = num_tokens
        prompt._names[block_size] = names
        return prompt

    def drop_tokens(self) -> None:
        """Forget the tokens: names at block sizes that were asked for stay, at others there are none from now on."""
        self._token_ids = array("i")

    def names(self, block_size: int) -> list[BlockHash]:
        """Names of its full blocks; not to be changed."""
        names = self._names.get(block_size)
        if names is None:
            names = self._names[block_size] = []
            extend_hashes(names, self._token_ids, block_size, self._root)
        return names

    def names_with(self, output: Sequence[int], block_size: int) -> list[BlockHash]:
        """Names of the full blocks of prompt and answer. The last token of an answer is sampled, not computed."""
        names = self.names(block_size)
        if len(output) < 2 or not self._token_ids:
            return names
        names = names[:]
        extend_hashes(names, self._token_ids + pack(output)[:-1], block_size, self._root)
        return names

    def tail_key(self) -> bytes:
        """What tells a prompt from others that is too short to have a full block."""
        return self._root + self._token_ids.tobytes()


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """One request to be routed. `subset`: names of the replicas that may serve it; None: all.

    `form`: the way in which the prompt became tokens ("chat": by a chat template). Where a replica counts the tokens of
    one form otherwise than the router, it may count those of others alike.
    """

    prompt: Prompt
    model: str = ""
    adapter: str | None = None
    session: str | None = None
    max_tokens: int = 0  # to be generated at most; 0: not known
    subset: frozenset[str] | None = None
    form: str = ""


class Usage(NamedTuple):
    """What an engine says of one request, in its own tokens."""

    prompt_tokens: int
    cached_tokens: int
