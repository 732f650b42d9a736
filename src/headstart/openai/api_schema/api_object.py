"""ApiObject: the base of the models of response bodies, and the objects that several routes share."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ApiObject(BaseModel):
    """An object of a response. A field without default is always present; one with default None may be absent."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class ErrorDetail(ApiObject):
    """A description of the error: `code` is stable, `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ApiObject):
    """OpenAI's error object."""

    error: ErrorDetail


class Status(ApiObject):
    """The answer of a probe, and of an action without result."""

    status: Literal["ok"]


class Version(ApiObject):
    """The version of the server."""

    version: str


class CachedTokens(ApiObject):
    """Cached prompt tokens, and by source: the other four add up to the first."""

    cached_tokens: int
    pinned_tokens: int
    shared_tokens: int
    store_tokens: int
    followed_tokens: int


class WrittenTokens(CachedTokens):
    """Cached prompt tokens by source, and those that were computed and published in the cache."""

    cache_write_tokens: int


class Usage(ApiObject):
    """Numbers of tokens of a request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: WrittenTokens


class CacheDiagnostics(ApiObject):
    """The end of the reuse of an earlier prompt, in numbers and names only; tokens."""

    compared_id: str
    result: Literal["hit", "miss", "not_found"]
    cause: str | None
    field: str | None
    compared_tokens: int
    common_tokens: int
    reusable_tokens: int
    cached_tokens: int
    evicted_tokens: int
    rules: dict[str, int]
