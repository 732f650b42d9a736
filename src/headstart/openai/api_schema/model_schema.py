"""Models of the responses about the model and its tokenizer."""

from typing import Any, Literal

from headstart.openai.api_schema.api_object import ApiObject


class ExactReuse(ApiObject):
    """Whether logits are a function of the prefix alone, bit for bit (docs/invariants.md, 15), and what prevents it."""

    holds: bool
    exceptions: list[str]


class Model(ApiObject):
    """The served model. `max_model_len` in tokens; the KV cache has `num_gpu_blocks` x `block_size`.

    `max_num_batched_tokens` is the most that a step computes.
    """

    id: str
    object: Literal["model"]
    created: int  # seconds since 1970
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    block_size: int
    num_gpu_blocks: int
    max_num_batched_tokens: int
    default_sampling_params: dict[str, Any]
    exact_reuse: ExactReuse


class ModelList(ApiObject):
    """The models of a server: one."""

    object: Literal["list"]
    data: list[Model]


class TokenizeAnswer(ApiObject):
    """The tokens of a text or of a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class ServerLoad(ApiObject):
    """The number of requests in flight."""

    server_load: int


class TokenizerInfo(ApiObject):
    """The special tokens of the tokenizer, null without one, its chat template, and the model's context in tokens."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    sep_token: str | None
    cls_token: str | None
    mask_token: str | None
    chat_template: str | None
    model_max_length: int


class DetokenizeAnswer(ApiObject):
    """The text of token ids."""

    prompt: str
