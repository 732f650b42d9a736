"""Bounds of requests: the limits that depend on the model and the server's options.

Limits that are the same everywhere are part of the field they limit: generation_fields.py, cache_params.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headstart.bundled.packaged_models import packaged_model_of_file
from headstart.config.options import ServerOptions
from headstart.core.engine_info import EngineInfo
from headstart.core.request import NO_DEFAULTS, SamplingDefaults
from headstart.openai.canonical.prompt_rules import NO_RULES, PromptRules
from headstart.openai.chat.template_forms import ONE_TEXT, ContentForms
from headstart.openai.forms.skipped import SkippedNames
from headstart.openai.forms.treatments import NameKind

INT31_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
FLOAT32_MAX = 2.0**128 - 2.0**104  # logits are computed in float32


FULL_CHOICES = 16  # choices of a prompt that fills the context
MAX_JSON_VALUES = 128 * 1024  # strings, lists and objects of a body: each is a Python object of 50 to 100 bytes


def closes_objects_by_default(info: EngineInfo) -> bool:
    """Return whether a model's answers have only properties that a schema lists, unless an option says otherwise."""
    packaged = packaged_model_of_file(Path(info.model))
    return packaged is not None and packaged.closes_objects


def _one_text() -> ContentForms:
    return ONE_TEXT


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """The limits of one server; the error message of each limit contains its value."""

    vocab_size: int  # rows of the logits
    max_model_len: int  # tokens
    eos_token_ids: tuple[int, ...] = ()
    max_n: int = 128
    max_prompts: int = 64
    max_logprobs: int = 20
    clamp_max_tokens: bool = False  # lower max_tokens to what fits, as the Messages API does
    max_messages: int = 2048
    max_sequence_tokens: int = 4 << 20  # prompt tokens of a request, once per choice: each is a sequence in the engine
    max_answer_entries: int = 16 << 20  # see request_limits.py; 200 MB in memory, 500 MB of JSON
    scheduling_policy: str = "lpm"
    defaults: SamplingDefaults = NO_DEFAULTS  # of the model, for parameters that a request omits
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    prompt_rules: PromptRules = NO_RULES  # for chats
    closes_objects: bool = False  # in answers, objects have no properties but those that a schema lists
    content_forms: Callable[[], ContentForms] = _one_text  # of the chat template; asked only for other contents
    unreadable_parts: str = "placeholder"  # or refuse, or (at a router) digest: images, audio and files
    min_boundary: int = 0  # tokens of a prompt's beginning of which the engine is told the end; 0: of none
    skipped: SkippedNames | None = None  # collects what one request loses; None: not collected

    def note_omitted_from_prompt(self, place: NameKind, name: object) -> None:
        """Note what is left out of the prompt of the request that is read."""
        if self.skipped is not None:
            self.skipped.add(place, name)

    @property
    def max_numbers(self) -> int:
        """The numbers that any valid body may have: token ids of full prompts, and a value for each other item."""
        return max(self.max_prompts, FULL_CHOICES) * self.max_model_len + MAX_JSON_VALUES

    @classmethod
    def for_engine(
        cls, info: EngineInfo, options: ServerOptions, content_forms: Callable[[], ContentForms] = _one_text
    ) -> "RequestBounds":
        """Return the limits of one server with its engine. `content_forms`: of its tokenizer.

        For any context length, FULL_CHOICES choices of a full prompt are accepted, and one choice with all logprobs.
        """
        return cls(
            vocab_size=info.vocab_size,
            max_model_len=info.max_sequence_len,
            eos_token_ids=info.eos_token_ids,
            clamp_max_tokens=options.clamp_max_tokens,
            max_n=options.max_n,
            max_prompts=options.max_prompts,
            max_logprobs=options.max_logprobs,
            scheduling_policy=info.scheduling_policy,
            defaults=info.sampling_defaults,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            prompt_rules=frozenset(options.prompt_rule),
            closes_objects=closes_objects_by_default(info)
            if options.extra_properties == "auto"
            else options.extra_properties == "no",
            content_forms=content_forms,
            unreadable_parts=options.unreadable_parts,
            min_boundary=info.checkpoint_tokens,
            max_sequence_tokens=max(4 << 20, info.max_model_len * FULL_CHOICES),
            max_answer_entries=max(16 << 20, info.max_model_len * (1 + options.max_logprobs)),
        )
