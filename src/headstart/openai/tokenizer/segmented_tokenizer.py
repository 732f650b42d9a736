"""SegmentedTokenizer: tokenizes texts in segments and caches the tokens of each segment.

For tokenizers that first split a text into words and merge only within words, the tokens of a text are those of its
parts if it is cut at word ends. If word_borders.py cannot prove this for a tokenizer, texts are tokenized whole.
Segments end at the first border after SEGMENT_CHARS characters, so texts with a common beginning are cut alike.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

import tokenizers

from headstart.core.request import CacheMode
from headstart.openai.tokenizer.tenant_cache import CacheScope, TenantPartitionedCache
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tokenizer.word_borders import BORDER, is_safe_to_cut_at_borders

SEGMENT_CHARS = 1024
BATCH_SEGMENTS = 64  # per call of the library, which releases the interpreter lock once
MAX_TENANT_BYTES = 8 << 20  # the tokens of about 6 million characters
MAX_BYTES = 64 << 20
ENTRY_BYTES = 320  # overhead per entry: key, array object, table slot
_PROBES = ("", "a", "the end of it", " A\n1 <>")


class SegmentedTokenizer(Tokenizer):
    """A tokenizer with the same tokens as `base`, faster for texts whose beginnings are cached. Thread-safe."""

    def __init__(
        self,
        base: Tokenizer,
        memory: "SegmentCache | None" = None,
        *,
        segment_chars: int = SEGMENT_CHARS,
    ) -> None:
        self.__dict__.update(base.__dict__)
        self.memory = SegmentCache() if memory is None else memory
        self._scope = CacheScope()
        self._segment_chars = segment_chars
        written = self.backend.to_str()
        self._digest = hashlib.sha256(written.encode()).hexdigest()
        self._around = _around(self.backend) if is_safe_to_cut_at_borders(self.backend, written) else None
        self._handed: array[int] | None = None

    @property
    def is_segmented(self) -> bool:
        """Whether texts are cut into segments: proven to leave the tokens unchanged."""
        return self._around is not None

    @property
    def digest(self) -> str:
        """A digest of all its settings; "": it takes no token ids beside a text."""
        return self._digest if self.is_segmented and self.vocabulary.byte_level else ""

    @property
    def tenant_name(self) -> str:
        """The tenant whose requests it is for, "" for all."""
        return self._scope.tenant

    def for_domain(self, tenant: str, domain: bytes, mode: CacheMode = CacheMode.READ_WRITE) -> Tokenizer:
        """Return this tokenizer with the cached segments of `domain` of `tenant`.

        As with KV blocks, READ_ONLY stores nothing, and BYPASS neither reads nor stores.
        """
        own = object.__new__(SegmentedTokenizer)  # copy.copy takes five times as long, which matters for short prompts
        own.__dict__ = self.__dict__.copy()
        own._scope = CacheScope(tenant, domain, remembers=mode is CacheMode.READ_WRITE)
        if mode is CacheMode.BYPASS:
            own._around = None
        return own

    def with_precomputed_tokens(self, token_ids: "array[int]") -> Tokenizer:
        """Return this tokenizer with ids that another process made of a text with a tokenizer of the same digest.

        They are used for a text only if they are tokens of exactly that text.
        """
        own = object.__new__(SegmentedTokenizer)
        own.__dict__ = {**self.__dict__, "_handed": token_ids if self.digest else None}
        return own

    def encode(self, text: str, *, add_special_tokens: bool = True) -> "array[int]":
        """Return packed int32 token ids, the same as the base tokenizer's."""
        if self._handed is not None and self._is_text_of(self._handed, text, add_special_tokens):
            return self._handed
        if self._around is None or len(text) < 2 * self._segment_chars:
            return super().encode(text, add_special_tokens=add_special_tokens)
        *segments, rest = self._parts(text)
        before, after = self._around if add_special_tokens else ((), ())
        token_ids = array("i", before)
        for start in range(0, len(segments), BATCH_SEGMENTS):
            for part in self._encoded(segments[start : start + BATCH_SEGMENTS]):
                token_ids += part
        if rest:  # not cached: it does not end at a border, and differs when the text continues
            token_ids += super().encode(rest, add_special_tokens=False)
        token_ids.extend(after)
        return token_ids

    def _is_text_of(self, token_ids: "array[int]", text: str, add_special_tokens: bool) -> bool:
        """Return whether these are tokens of the text, and of nothing more."""
        before, after = self._around if add_special_tokens and self._around is not None else ((), ())
        end = len(token_ids) - len(after)
        inner = token_ids[len(before) : end]
        if (*token_ids[: len(before)],) != before or (*token_ids[end:],) != after or not inner:
            return False
        if not 0 <= min(inner) <= max(inner) < self.vocab_size:
            return False
        written = self.vocabulary.decode_bytes(inner)
        return written == text.encode("utf-8", "surrogatepass") and all(map(self.vocabulary.token_bytes, {*inner}))

    def _parts(self, text: str) -> Iterator[str]:
        """Yield the segments of a text, and last the rest, possibly empty."""
        start = 0
        while (border := BORDER.search(text, start + self._segment_chars)) is not None:
            yield text[start : border.end()]
            start = border.end()
        yield text[start:]

    def _encoded(self, segments: list[str]) -> "list[array[int]]":
        """Return the token ids of each segment, and store those of new segments."""
        found = self.memory.find_keys_and_tokens(self._scope, segments)
        new = [index for index, (_, token_ids) in enumerate(found) if token_ids is None]
        encodings = self.backend.encode_batch_fast([segments[index] for index in new], add_special_tokens=False)
        parts = [token_ids for _, token_ids in found]
        for index, encoding in zip(new, encodings, strict=True):
            parts[index] = token_ids = array("i", encoding.ids)
            self.memory.remember(self._scope, found[index][0], token_ids)
        return [part for part in parts if part is not None]


def _around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the special tokens added before and after a text; None if they are not the same for every text."""
    pairs = [[backend.encode(text, add_special_tokens=special).ids for special in (False, True)] for text in _PROBES]
    inner, whole = pairs[1]
    for at in range(len(whole) - len(inner) + 1):
        before, after = whole[:at], whole[at + len(inner) :]
        if all(whole == [*before, *inner, *after] for inner, whole in pairs):
            return tuple(before), tuple(after)
    return None


class SegmentCache:
    """The cached segments of all tenants. Above `max_bytes`, the least recently used tenant's oldest are evicted.

    Entries of one isolation domain (a tenant, narrowed by a `cache_salt`) are found by requests of that domain only,
    so that tokenization times reveal nothing about other tenants. The domains of a tenant share its byte limit, so
    salts add no second share. Texts are not stored: the key of an entry is a SHA-256 of domain and text. Thread-safe.
    """

    def __init__(self, max_tenant_bytes: int = MAX_TENANT_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self._segments: TenantPartitionedCache[array[int]] = TenantPartitionedCache(max_tenant_bytes, max_bytes, _size)

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def num_bytes(self) -> int:
        """The bytes held for all tenants."""
        return self._segments.num_bytes

    def find_keys_and_tokens(self, scope: CacheScope, texts: Sequence[str]) -> "list[tuple[bytes, array[int] | None]]":
        """Return the key of each text, and its token ids if they are cached. The arrays must not be modified."""
        hashed = hashlib.sha256(len(scope.domain).to_bytes(8, "little") + scope.domain)
        keys: list[bytes] = []
        for text in texts:
            own = hashed.copy()
            own.update(text.encode("utf-8", "surrogatepass"))
            keys.append(own.digest())
        found = self._segments.find_values(scope.tenant, keys)
        num_hits = sum(token_ids is not None for token_ids in found)
        self.num_hits += num_hits
        self.num_misses += len(found) - num_hits
        return list(zip(keys, found, strict=True))

    def remember(self, scope: CacheScope, key: bytes, token_ids: "array[int]") -> None:
        """Store the token ids of a text under its key from `find`, for requests of the same scope."""
        if scope.remembers:
            self._segments.put(scope.tenant, key, token_ids)


def _size(token_ids: "array[int]") -> int:
    return ENTRY_BYTES + token_ids.itemsize * len(token_ids)
