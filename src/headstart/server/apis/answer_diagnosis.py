"""AnswerDiagnosis: the prompt of one client request, compared with an earlier one if requested, and remembered.

FingerprintCache has the fingerprints of answered requests by tenant and id of the answer, bounded in bytes.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from headstart.core.request import CacheMode
from headstart.openai.engine_requests import RequestOrigin
from headstart.openai.generation_params import GenerationParams
from headstart.openai.responses import Json
from headstart.openai.tokenizer.tenant_cache import TenantPartitionedCache
from headstart.reuse.cache_comparison import (
    CacheComparison,
    CacheDiagnosis,
    PromptFingerprint,
    PromptSourceHashes,
    compare_prompts,
    fingerprint_prompt,
)

KEY_BYTES = 128
TENANT_SHARE = 2  # a tenant may fill this part of the memory


class FingerprintCache(TenantPartitionedCache[PromptFingerprint]):
    """Fingerprints by the id of the answer."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` 0: nothing is kept."""
        super().__init__(max_bytes // TENANT_SHARE, max_bytes, lambda value: KEY_BYTES + value.num_bytes)


def chat_source_hashes(
    messages: Sequence[Mapping[str, Any]] | None, params: GenerationParams, domain: bytes
) -> PromptSourceHashes:
    """Return the shape of a chat; None: of a completion, which has none."""
    messages = messages or ()
    roles = (message["role"] for message in messages)
    num_system = next((at for at, role in enumerate(roles) if role not in ("system", "developer")), len(messages))
    system = hash(tuple(map(_message_hash, messages[:num_system]))) if num_system else 0
    hashes = array("q", map(_message_hash, messages[num_system:]))
    tools = params.tools
    options = dict(params.template_options)
    effort = options.pop("reasoning_effort", params.reasoning_effort), options.pop("enable_thinking", None)
    return PromptSourceHashes(
        tools=() if tools is None else tuple(map(_json_hash, tools.definitions)),
        system=system,
        messages=hashes,
        num_system=num_system,
        effort=hash(effort),
        options=hash((*options.items(), params.add_generation_prompt, params.continue_final_message)),
        domain=hash((domain, params.cache_salt)),
        is_published=params.cache is CacheMode.READ_WRITE,
    )


class AnswerDiagnosis:
    """The diagnosis of one prompt. `comparison` is None unless it was requested."""

    def __init__(
        self,
        memory: FingerprintCache | None,
        origin: RequestOrigin,
        prompt: tuple[PromptSourceHashes, "array[int]"],
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
            earlier = None if memory is None else memory.find_values(origin.tenant, [compared_id])[0]
            self.comparison = compare_prompts(compared_id, earlier, self._shape, self._token_ids)

    def cache_diagnosis(self, num_cached: int, num_evicted: int) -> CacheDiagnosis | None:
        """Return the diagnosis, given the tokens of the prompt that were cached or evicted; None: not requested."""
        if self.comparison is None:
            return None
        return CacheDiagnosis(self.comparison, self.block_size, num_cached, num_evicted)

    def cache_diagnostics_json(self, diagnosis: CacheDiagnosis) -> Json:
        """Return `cache_diagnostics` with the field as the client has sent it."""
        own = diagnosis.cache_diagnostics_json()
        index = (own["field"] or "").removeprefix("messages[").removesuffix("]")
        if index.isdecimal() and int(index) < len(self._names):
            own["field"] = self._names[int(index)]
        return own

    def remember(self) -> None:
        """Keep the fingerprint of the prompt for later comparisons; called once the answer is complete."""
        if self._memory is not None:
            value = fingerprint_prompt(self._shape, self._token_ids)
            self._memory.put(self._origin.tenant, self._origin.request_id, value)


def _message_hash(message: Mapping[str, Any]) -> int:
    calls = message.get("tool_calls")
    plain = (message["role"], message.get("content"), message.get("reasoning_content"), message.get("name"))
    return hash((*plain, None if calls is None else _json_hash(calls)))


def _json_hash(value: object) -> int:
    return hash(json.dumps(value))
