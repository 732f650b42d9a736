"""AnswerDiagnosis: the prompt of one client request, compared with an earlier one if requested, and remembered."""

from array import array
from collections.abc import Sequence

from headstart.openai.diagnostics.cache_comparison import CacheComparison, CacheDiagnosis, compare_prompts
from headstart.openai.diagnostics.prompt_fingerprint import FingerprintMemory, PromptShape, fingerprint
from headstart.openai.engine_requests import Origin
from headstart.openai.responses import Json


class AnswerDiagnosis:
    """The diagnosis of one prompt. `comparison` is None unless it was requested."""

    def __init__(
        self,
        memory: FingerprintMemory | None,
        origin: Origin,
        prompt: tuple[PromptShape, "array[int]"],
        compared_id: str | None,
        block_size: int,
        names: Sequence[str] = (),
    ) -> None:
        """`names`: per message of the chat, the field of the request that it comes from."""
        self.comparison: CacheComparison | None = None
        self.block_size = block_size
        self._memory = memory
        self._origin = origin
        self._shape, self._token_ids = prompt
        self._names = names
        if compared_id is not None:
            earlier = None if memory is None else memory.find(origin.tenant, compared_id)
            self.comparison = compare_prompts(compared_id, earlier, self._shape, self._token_ids)

    def found(self, num_cached: int, num_evicted: int) -> CacheDiagnosis | None:
        """Return the diagnosis, given the tokens of the prompt that were cached or evicted; None: not requested."""
        if self.comparison is None:
            return None
        return CacheDiagnosis(self.comparison, self.block_size, num_cached, num_evicted)

    def own(self, diagnosis: CacheDiagnosis) -> Json:
        """Return `cache_diagnostics` with the field as the client has sent it."""
        own = diagnosis.own()
        index = (own["field"] or "").removeprefix("messages[").removesuffix("]")
        if index.isdecimal() and int(index) < len(self._names):
            own["field"] = self._names[int(index)]
        return own

    def remember(self) -> None:
        """Keep the fingerprint of the prompt for later comparisons; called once the answer is complete."""
        if self._memory is not None:
            value = fingerprint(self._shape, self._token_ids)
            self._memory.put(self._origin.tenant, self._origin.request_id, value)
