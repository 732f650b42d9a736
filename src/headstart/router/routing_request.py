"""RoutingRequest and Prompt: a request as the router sees it, and the hashes of its prompt's blocks.

The hashing is the engine's (core/cache/hashing.py) with a root of the router's own: a router has neither weights nor
secrets, so its hashes equal no engine's, and need not. Tenant, model and adapter are in the root. Full blocks only, as
in engines.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headstart.core.cache.hashing import BlockHash, HashChain, extend_block_hashes, pack_tokens_as_int32, root_hash

BYTES_PER_UNIT = 4  # bytes of text that count as one token where there is no tokenizer


def router_root(model: str, *, adapter: str | None = None, domain: bytes = b"") -> BlockHash:
    """Return the parent of every first block of one model, adapter and domain; no engine's root equals it."""
    return root_hash(b"headstart-router/" + model.encode(), adapter=adapter, domain=domain)


def text_as_pseudo_tokens(text: bytes) -> "array[int]":
    """Return UTF-8 text as pseudo-tokens of four bytes each, padded with zeros."""
    units = array("i")
    units.frombytes(text + b"\0" * (-len(text) % BYTES_PER_UNIT))
    return units


class RoutingPrompt:
    """A prompt and the hashes of its full blocks, computed once for each block size.

    `exact`: its tokens are the engine's own; otherwise they are pseudo-tokens of text, and the engine's counts have to
    be scaled.
    """

    __slots__ = ("_block_hashes", "_chain", "_root", "_token_ids", "exact", "num_tokens")

    def __init__(
        self, token_ids: Iterable[int], root: BlockHash, *, exact: bool = True, chain: HashChain | None = None
    ) -> None:
        """`chain` computes the hashes (core/cache/hashing.py); None: in Python."""
        self._chain = chain
        self._token_ids = pack_tokens_as_int32(token_ids)
        self._root = root
        self._block_hashes: dict[int, list[BlockHash]] = {}
        self.num_tokens = len(self._token_ids)
        self.exact = exact

    @property
    def token_ids(self) -> "array[int]":
        """Its tokens, or pseudo-tokens; read-only."""
        return self._token_ids

    @classmethod
    def from_block_hashes(cls, block_hashes: list[BlockHash], num_tokens: int, block_size: int) -> "RoutingPrompt":
        """Return a prompt of which only the hashes at one block size are known: traces, logs."""
        prompt = cls((), block_hashes[0] if block_hashes else BlockHash(b""))
        prompt.num_tokens = num_tokens
        prompt._block_hashes[block_size] = block_hashes
        return prompt

    def drop_tokens(self) -> None:
        """Drop the tokens: hashes at block sizes used so far stay; at others there are none from now on."""
        self._token_ids = array("i")

    def block_hashes(self, block_size: int) -> list[BlockHash]:
        """Return the hashes of its full blocks; read-only."""
        block_hashes = self._block_hashes.get(block_size)
        if block_hashes is None:
            block_hashes = self._block_hashes[block_size] = []
            extend_block_hashes(block_hashes, self._token_ids, block_size, self._root, chain=self._chain)
        return block_hashes

    def block_hashes_with_output(self, output: Sequence[int], block_size: int) -> list[BlockHash]:
        """Return the hashes of the full blocks of prompt and output. The last output token is sampled, not computed."""
        block_hashes = self.block_hashes(block_size)
        if len(output) < 2 or not self._token_ids:
            return block_hashes
        block_hashes = block_hashes[:]
        extend_block_hashes(
            block_hashes, self._token_ids + pack_tokens_as_int32(output)[:-1], block_size, self._root, chain=self._chain
        )
        return block_hashes

    def short_prompt_key(self) -> bytes:
        """Return a key that identifies a prompt without a full block."""
        return self._root + self._token_ids.tobytes()


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """One request to be routed. `subset`: names of the replicas that may serve it; None: all.

    `form`: the way in which the prompt became tokens ("chat": by a chat template). Where a replica counts the tokens of
    one form otherwise than the router, it may count those of others alike. `has_parts`: the prompt has digests in place
    of images, so that every engine counts its tokens otherwise.
    """

    prompt: RoutingPrompt
    model: str = ""
    adapter: str | None = None
    session: str | None = None
    max_tokens: int = 0  # upper bound of output tokens; 0: not known
    subset: frozenset[str] | None = None
    form: str = ""
    has_parts: bool = False


class ReportedTokenUsage(NamedTuple):
    """Token counts that an engine reports for one request, in its own tokens."""

    prompt_tokens: int
    cached_tokens: int
