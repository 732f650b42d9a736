"""Conversion of a validated body to engine requests: tokens, one request per prompt and choice, domain, seeds."""

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headstart.common_prefix import common_prefix_length
from headstart.core.errors import InvalidRequestError, QueueFullError, RequestTooLargeError, prompt_too_long_error
from headstart.core.request import Request
from headstart.openai.bounds import INT64_MAX, RequestBounds
from headstart.openai.canonical.prompt_rules import applied_rules
from headstart.openai.chat.placed_messages import fit_messages_to_template
from headstart.openai.chat.template_forms import REASONING_KEYS, SYSTEM_ROLES
from headstart.openai.forms.treatments import NameKind
from headstart.openai.generation_params import GenerationParams, lower_max_tokens, sampling_params_for_prompt
from headstart.openai.request_bodies import ChatBody, CompletionBody, Message, Prompt
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tools.call_grammar import keywords_dropped_by_tool
from headstart.openai.tools.chat_format import (
    TOOL_FAMILIES,
    ChatFormat,
    ToolCallFormat,
    find_chat_format,
    is_reasoning_open_at_end,
    make_chat_output_format,
)
from headstart.openai.tools.default_prompt import convert_calls_to_text, messages_with_tools
from headstart.openai.tools.tool_fields import ToolParams
from headstart.openai.tools.tool_grammar import answer_grammar

PROBE_CHARS = 16 * 1024
PROBE_CHARS_PER_TOKEN = 8
END_TOKENS = 16  # of a prompt, which may open its reasoning
WORD_CHARS = 256  # of a content, in which a word is chosen that the prompt must have
OTHER_MESSAGE = "\u00a7"  # with which few messages begin
_WORD = re.compile(r"[a-zA-Z0-9]{1,32}")
_TOOL_ROLE = re.compile(r"""["']tool(?:_response)?["']""")


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Origin of a client request: the values that its engine requests share beside the parameters."""

    request_id: str  # generated, unique
    arrival: float = 0.0  # seconds, the engine's clock
    domain: bytes = b""  # isolation domain of the tenant
    tenant: str = ""  # the tenant whose share of the cache it uses
    tokens: "array[int] | None" = None  # of the prompt, from a router (tokenizer/handed_tokens.py); not to be believed


def tokenizer_for_request(tokenizer: Tokenizer, origin: RequestOrigin, params: GenerationParams) -> Tokenizer:
    """Return the tokenizer for one client request, with the cached segments of its own isolation domain."""
    own = tokenizer.for_domain(origin.tenant, salted_domain(origin.domain, params.cache_salt), params.cache)
    return own if origin.tokens is None else own.with_precomputed_tokens(origin.tokens)


def encode_completion(body: CompletionBody, tokenizer: Tokenizer, bounds: RequestBounds) -> "list[array[int]]":
    """Return one list of token ids per prompt. Thread-safe and slow for long texts: call it off the event loop."""
    special = body.params.add_special_tokens
    return [encode_prompt(prompt, tokenizer, bounds, special is None or special) for prompt in body.prompts]


class ChatPrompt(NamedTuple):
    """The prompt of a chat, the placements made for its chat template (PLACEMENT_TEXTS), and its boundary."""

    token_ids: "array[int]"
    placed: Counter[str]
    boundary: int  # tokens up to the end of tools and system messages; 0: not known, or too few to matter


class TemplateChat(NamedTuple):
    """Messages and tools for the chat template, and the placements that were made."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    placed: Counter[str]


def encode_chat(body: ChatBody, tokenizer: Tokenizer, bounds: RequestBounds) -> "array[int]":
    """Return the token ids of the rendered conversation. By default only the template adds special tokens."""
    return render_and_tokenize_chat(body, tokenizer, replace(bounds, min_boundary=0)).token_ids


def render_and_tokenize_chat(body: ChatBody, tokenizer: Tokenizer, bounds: RequestBounds) -> ChatPrompt:
    """Return the rendered conversation. Blocks. Raises InvalidRequestError and QueueFullError."""
    text, placed = _rendered(body, tokenizer, bounds)
    check_all_messages_rendered(body.messages, text)
    try:
        special = bool(body.params.add_special_tokens)
        token_ids = encode_prompt(text, tokenizer, bounds, add_special_tokens=special)
    except InvalidRequestError as error:
        error.param = "messages"
        raise
    note_dropped_reasoning(body.messages, text, bounds)
    return ChatPrompt(token_ids, placed, _boundary(body, text, token_ids, tokenizer, bounds))


def _rendered(body: ChatBody, tokenizer: Tokenizer, bounds: RequestBounds) -> tuple[str, Counter[str]]:
    """Return the text of a chat, and the placements that were made."""
    messages, tools, placed = chat_for_template(body.messages, body.params.tools, tokenizer, bounds)
    options: dict[str, str | int | bool] = dict(body.params.template_options)
    effort = body.params.reasoning_effort
    if effort is not None and "reasoning_effort" in (tokenizer.chat_template or ""):
        options.setdefault("reasoning_effort", effort)
    text = tokenizer.render_chat_text(
        messages,
        add_generation_prompt=body.params.add_generation_prompt,
        continue_final_message=body.params.continue_final_message,
        options=options,
        tools=tools,
    )
    return text, placed


def _boundary(body: ChatBody, text: str, prompt: "array[int]", tokenizer: Tokenizer, bounds: RequestBounds) -> int:
    """Return the number of tokens up to the end of tools and system messages, 0 if they are too few. Renders again.

    The prompt is compared with that of a chat with another message behind them, so it is right with any template. If
    the last token would differ in front of other text, the checkpoint there is not found; more does not depend on it.
    """
    leading = body.messages[: next((i for i, one in enumerate(body.messages) if one["role"] not in SYSTEM_ROLES), 0)]
    if not 0 < bounds.min_boundary < len(prompt) or not (leading or body.params.tools):
        return 0
    other = replace(body, messages=[*leading, {"role": "user", "content": OTHER_MESSAGE}])
    try:
        shared = text[: common_prefix_length(text, _rendered(other, tokenizer, bounds)[0])]
        special = bool(body.params.add_special_tokens)
        num_tokens = common_prefix_length(prompt, encode_prompt(shared + OTHER_MESSAGE, tokenizer, bounds, special))
    except (InvalidRequestError, QueueFullError):  # the boundary saves time only; the prompt itself is right
        return 0
    return num_tokens if num_tokens >= bounds.min_boundary else 0


def chat_for_template(
    messages: list[Message], tools: ToolParams | None, tokenizer: Tokenizer, bounds: RequestBounds
) -> TemplateChat:
    """Return the messages and the tools in forms that the chat template shows.

    A template without tools gets them in a system message, and earlier calls as text, if a parser is chosen; else
    InvalidRequestError is raised for tools that may be called.
    """
    form = _format_of(tokenizer, bounds)
    definitions = None if tools is None else tools.definitions
    if not form.shows_tools:
        if form.family is not None and form.is_chosen:
            messages = convert_calls_to_text(messages, form.family)
            messages = messages if tools is None else messages_with_tools(messages, tools, form.family)
        elif tools is not None and tools.choice.mode != "none":
            raise InvalidRequestError(
                "this model's chat template has no tools; leave them out, or start the server with --tool-call-parser "
                "hermes (or llama3_json, mistral, pythonic, qwen3_coder, glm45: what the model was trained on)",
                param="tools",
                code="unsupported_parameter",
            )
        definitions = None
    forms = tokenizer.content_forms()
    placed = fit_messages_to_template(
        messages, forms, tool_family_of(form), shows_results=renders_tool_role(form.template)
    )
    return TemplateChat(
        placed.messages, definitions if forms.shows_probe("no tools") else definitions or [], placed.counts
    )


def check_all_messages_rendered(messages: Sequence[Message], prompt: str) -> None:
    """Raise InvalidRequestError if a template drops a message after all, as one whose texts matter to it may.

    Looks for one word of each; answers may be shown in part, since templates drop the reasoning in them.
    """
    at = 0
    for index, message in enumerate(messages):
        content = message["content"]
        is_checked = content and message["role"] != "assistant"
        words: Sequence[str] = _WORD.findall(content, 0, WORD_CHARS) if is_checked else ()
        word = max(words, key=len, default="")
        found = prompt.find(word, at)
        if found < 0 and word not in prompt:
            name = f"messages[{index}].content"
            remedy = "leave the message out, or send it with another role"
            raise InvalidRequestError(f"{name} is dropped by the model's chat template; {remedy}", param=name)
        at = max(found, at)


def note_dropped_reasoning(messages: Sequence[Message], prompt: str, bounds: RequestBounds) -> None:
    """Note each reasoning that the prompt does not have, since templates leave out that of earlier turns.

    A text is looked for behind those of the messages before it, as far as these are in the prompt as they were sent.
    """
    at = 0
    for message in messages if bounds.skipped is not None else ():
        content, reasoning = message["content"], message.get(REASONING_KEYS[0], "").strip()
        if (found := prompt.find(reasoning, at)) < 0:
            bounds.note_omitted_from_prompt(NameKind.ITEM, "reasoning")
        else:
            at = found + len(reasoning)
        if isinstance(content, str) and (found := prompt.find(content.strip(), at)) >= 0:
            at = found + len(content.strip())


def tool_family_of(form: ChatFormat) -> ToolCallFormat:
    """Return the family in which calls are written as text."""
    return form.family or TOOL_FAMILIES["hermes"]


def renders_tool_role(template: str) -> bool:
    """Return whether a chat template knows messages of role `tool`, rather than printing any role."""
    return _TOOL_ROLE.search(template) is not None


def _format_of(tokenizer: Tokenizer, bounds: RequestBounds) -> ChatFormat:
    """Return the formats of a model, by the options first."""
    chosen = bounds.tool_call_parser if bounds.tool_call_parser != "auto" else tokenizer.tool_call_parser
    return find_chat_format(tokenizer.chat_template, chosen, bounds.reasoning_parser)


def build_chat_requests(
    body: ChatBody, tokenizer: Tokenizer, bounds: RequestBounds, origin: RequestOrigin, *, shortens: bool = False
) -> tuple[GenerationParams, list[Request]]:
    """Return the engine requests of a chat, and its parameters with the formats of its output.

    `tokenizer` is from `tokenizer_of`. `shortens`: max_tokens is lowered to what fits behind the prompt. Placements
    that were made for the prompt are among the applied rules. Blocks: renders the conversation. Raises
    InvalidRequestError and QueueFullError.
    """
    prompt, params = render_and_tokenize_chat(body, tokenizer, bounds), body.params
    if prompt.placed:
        params = replace(params, applied_rules=applied_rules(prompt.placed + Counter(dict(params.applied_rules))))
    if shortens:
        params = lower_max_tokens(params, len(prompt.token_ids), bounds)
    params = with_chat_output_format(params, prompt.token_ids, tokenizer, bounds)
    return params, build_requests([prompt.token_ids], params, bounds, origin, [prompt.boundary])


def with_chat_output_format(
    params: GenerationParams, prompt: "array[int]", tokenizer: Tokenizer, bounds: RequestBounds
) -> GenerationParams:
    """Return the parameters of a chat with the formats of its output, and the grammar of the whole answer.

    Raises InvalidRequestError if the family of the model is not known but needed, or a schema is too large.
    """
    form = _format_of(tokenizer, bounds)
    end = tokenizer.decode(prompt[-END_TOKENS:], skip_special_tokens=False)
    output = make_chat_output_format(
        form, params.tools, is_reasoning_open_at_end(end), tokenizer, params.skip_special_tokens
    )
    tools = params.tools
    if tools is not None and tools.is_constrained and (output is None or output.family is None):
        raise InvalidRequestError(
            "the form of this model's tool calls is not known, so they cannot be constrained; send tool_choice auto "
            "and no strict tools, or start the server with --tool-call-parser and its format, as hermes",
            param="tool_choice" if tools.choice.mode == "required" else "tools",
            code="unsupported_parameter",
        )
    if output is None or params.prewarm:  # no output, so it needs no format
        return params
    content = params.sampling.grammar
    grammar = answer_grammar(tools, form, output, tokenizer.backend.token_to_id, content)
    stops = params.sampling.stop_token_ids
    if grammar is not None:  # its end is an end
        stops = tuple(dict.fromkeys((*stops, *bounds.eos_token_ids)))
    sampling = replace(params.sampling, grammar=grammar, stop_token_ids=stops)
    field, dropped = params.grammar_field or "tools", params.dropped
    if grammar is not None and tools is not None and output.family is not None:
        dropped += keywords_dropped_by_tool(tools)
    return replace(params, chat=output, sampling=sampling, grammar_field=field, dropped=dropped)


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, bounds: RequestBounds, add_special_tokens: bool
) -> "array[int]":
    """Return the token ids of one prompt, at least one. Raises InvalidRequestError.

    A text that is too long for the context even with the longest tokens is refused without being tokenized.
    """
    if isinstance(prompt, array):
        return prompt
    _check_length(prompt, tokenizer, bounds)
    token_ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise InvalidRequestError("the prompt is empty: it has no tokens; send some text", param="prompt")
    return token_ids


def _check_length(prompt: str, tokenizer: Tokenizer, bounds: RequestBounds) -> None:
    """Raise RequestTooLargeError if a text is too long for the context, as far as is known before it is tokenized."""
    longest = tokenizer.max_token_chars
    if longest and len(prompt) > bounds.max_model_len * longest:
        remedy = (
            f"its {len(prompt)} characters are more than any {bounds.max_model_len} tokens have; shorten the prompt"
        )
        raise prompt_too_long_error(-(-len(prompt) // longest), bounds.max_model_len, remedy, counted="at least ")
    _probe_length(prompt, tokenizer, bounds)


def _probe_length(text: str, tokenizer: Tokenizer, bounds: RequestBounds) -> None:
    """Raise RequestTooLargeError if the beginning of a very long text already exceeds the context.

    Tokenizing needs about 200 bytes per character, so the first probe is a text that fits if tokens are twice as long
    as usual. The margin of an eighth of the context covers the few tokens that the cut may change.
    """
    limit = bounds.max_model_len
    size = max(PROBE_CHARS, PROBE_CHARS_PER_TOKEN * limit)
    while size < len(text):
        num_tokens = len(tokenizer.encode(text[:size], add_special_tokens=False))
        if num_tokens > limit + limit // 8 + 64:
            remedy = f"these are the tokens of the first {size} of {len(text)} characters; shorten the prompt"
            raise prompt_too_long_error(num_tokens, limit, remedy, counted="at least ")
        size *= 2


def build_requests(
    prompts: "list[array[int]]",
    params: GenerationParams,
    bounds: RequestBounds,
    origin: RequestOrigin,
    boundaries: Sequence[int] | None = None,
) -> list[Request]:
    """Return len(prompts) * n engine requests; the n choices of a prompt are adjacent (choice index = position).

    `boundaries`: `Request.boundary` of each prompt.

    Raises RequestTooLargeError if a prompt and its output exceed the context. With a seed, choice i uses seed + i.
    Only the first choice of a prompt requests the prompt's log-probabilities, which are the same for all choices.
    A cache_salt narrows the domain, not the tenant: it does not add a second share of the cache.
    """
    requests: list[Request] = []
    domain = salted_domain(origin.domain, params.cache_salt)
    for index, prompt in enumerate(prompts):
        try:
            sampling = sampling_params_for_prompt(params, len(prompt), bounds)
        except RequestTooLargeError as error:
            if len(prompts) == 1:
                raise
            raise RequestTooLargeError(f"prompt {index}: {error}", param=error.param, code=error.code) from None
        others = replace(sampling, prompt_logprobs=None) if sampling.prompt_logprobs is not None else sampling
        for choice in range(params.n):
            seeded = others if choice else sampling
            if seeded.seed is not None:
                seed = (seeded.seed + choice + INT64_MAX + 1) % (2 * (INT64_MAX + 1)) - INT64_MAX - 1
                seeded = replace(seeded, seed=seed)
            single = len(prompts) * params.n == 1
            requests.append(
                Request(
                    request_id=origin.request_id if single else f"{origin.request_id}-{len(requests)}",
                    prompt=prompt,
                    sampling=seeded,
                    arrival=origin.arrival,
                    domain=domain,
                    priority=params.priority,
                    cache=params.cache,
                    tenant=origin.tenant,
                    retention=params.retention,
                    boundary=0 if boundaries is None else boundaries[index],
                )
            )
    return requests


def salted_domain(domain: bytes, cache_salt: str | None) -> bytes:
    """Return the isolation domain of `cache_salt` inside the tenant's domain; a salt can only narrow sharing."""
    if cache_salt is None:
        return domain
    return hashlib.sha256(b"salt" + len(domain).to_bytes(8, "little") + domain + cache_salt.encode()).digest()
