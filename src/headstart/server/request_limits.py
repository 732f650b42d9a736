"""Admission limits: the maximum size of one request, and the memory that all admitted requests may hold.

Sizes are known once a request is tokenized. An entry is one token of a response with its log-probability, or one of its
alternatives. Bytes are estimates for both processes, from measured object sizes. Output is charged up to
RESERVED_TOKENS per choice at admission, and beyond that as it is generated: `max_tokens` is only an upper bound, and
charging all of it would refuse requests that finish early.
"""

import sys
from collections.abc import Mapping, Sequence

from headstart.config.options import ServerOptions
from headstart.core.engine_info import EngineInfo
from headstart.core.errors import InvalidRequestError
from headstart.core.request import Request
from headstart.openai.bounds import RequestBounds
from headstart.openai.generation_params import GenerationParams

PROMPT_TOKEN_BYTES = 12  # token id in both processes and in transit to the engine, once per prompt
SEQUENCE_TOKEN_BYTES = 10  # the engine's own copy of the tokens and the hashes of their blocks, once per choice
CHOICE_BYTES = 8 * 1024  # objects of one choice in both processes
OUTPUT_TOKEN_BYTES = 64
ENTRY_BYTES = 12  # of an alternative in a LogprobTable
ENTRY_JSON_BYTES = 26  # of an alternative in the JSON of an echo, kept while choices share it
ENTRY_TOKEN_BYTES = 40  # of a token in a LogprobTable
BIAS_BYTES = 240  # of one logit_bias entry in both processes, once per request
RESERVED_TOKENS = 256
MIN_HELD_BYTES = 96 << 20  # of all requests, in addition to the tokens of a full queue and of the KV pool


def admitted_requests_byte_budget(info: EngineInfo, options: ServerOptions, num_shares: int = 1) -> int:
    """Return the byte budget for admitted requests: twice the KV pool's tokens, a full queue, and MIN_HELD_BYTES.

    The latter two are divided by `num_shares`, the number of processes on this machine that hold requests.
    """
    token_bytes = PROMPT_TOKEN_BYTES + SEQUENCE_TOKEN_BYTES
    pool = 2 * info.num_blocks * info.block_size * token_bytes
    return pool + (MIN_HELD_BYTES + options.max_num_queued_tokens * token_bytes) // num_shares


def check_request_size(requests: Sequence[Request], params: GenerationParams, bounds: RequestBounds) -> None:
    """Raise InvalidRequestError if one client request could exceed the limits on prompt tokens or response entries."""
    num_tokens = sum(len(request.prompt) for request in requests)
    if num_tokens > bounds.max_sequence_tokens:
        raise InvalidRequestError(
            f"the prompts have {num_tokens} tokens, counted once for each of {params.n} choices; one request may have "
            f"at most {bounds.max_sequence_tokens}: send fewer prompts at a time, or lower n",
            param="prompt" if params.n == 1 else "n",
            code="request_too_large",
        )
    num_entries = num_possible_logprob_entries(requests, params)
    if num_entries > bounds.max_answer_entries:
        raise InvalidRequestError(
            f"the answer could have {num_entries} entries, which are (prompt tokens shown + max_tokens) x "
            f"(1 + logprobs) of every choice; the limit is {bounds.max_answer_entries}: lower max_tokens, n or "
            "logprobs, or send fewer prompts at a time",
            param="logprobs" if params.wants_logprobs else "n",
            code="request_too_large",
        )


def num_possible_logprob_entries(requests: Sequence[Request], params: GenerationParams) -> int:
    """Return the maximum number of entries of the response.

    Output without log-probabilities does not count: it is plain text and grows no faster than it is computed.
    """
    prompt_width, output_width = _widths(params)
    return sum(len(request.prompt) * prompt_width + request.sampling.max_tokens * output_width for request in requests)


def num_logprob_entries(num_prompt_tokens: int, num_tokens: int, params: GenerationParams) -> int:
    """Return the number of entries of a whole response with these token counts; plain text has none."""
    prompt_width, output_width = _widths(params)
    shown = num_prompt_tokens * params.n * prompt_width if params.sampling.prompt_logprobs is not None else 0
    return shown + num_tokens * output_width


def bytes_at_admission(requests: Sequence[Request], params: GenerationParams) -> int:
    """Return the bytes charged for one client request at admission."""
    prompt_width, _ = _widths(params)
    per_entry = ENTRY_BYTES + (ENTRY_JSON_BYTES if params.n > 1 and params.echo and params.wants_logprobs else 0)
    per_prompt_token = PROMPT_TOKEN_BYTES + (ENTRY_TOKEN_BYTES + per_entry * prompt_width if prompt_width else 0)
    per_output_token = bytes_per_output_token(params)
    prompts = sum(len(request.prompt) for request in requests[:: params.n])
    choices = sum(
        CHOICE_BYTES
        + SEQUENCE_TOKEN_BYTES * len(request.prompt)
        + per_output_token * min(request.sampling.max_tokens, RESERVED_TOKENS)
        for request in requests
    )
    return prompts * per_prompt_token + choices + BIAS_BYTES * len(params.sampling.logit_bias)


def bytes_of_params(params: GenerationParams) -> int:
    """Return the memory of the parameters of any length, which are kept until the answer is complete."""
    definitions = () if params.tools is None else params.tools.definitions
    return bytes_of_json_value(
        (definitions, params.ignored, params.stop, params.template_options, params.sampling.grammar)
    )


def bytes_of_json_value(value: object, limit: int = sys.maxsize) -> int:
    """Return the memory of a parsed JSON value. Ends early above `limit`, and then returns more than it."""
    num_bytes, values = 0, [value]
    while values and num_bytes <= limit:
        item = values.pop()
        num_bytes += sys.getsizeof(item)
        if isinstance(item, Mapping):
            values.extend(item.keys())
            values.extend(item.values())
        elif isinstance(item, list | tuple):
            values.extend(item)
    return num_bytes


def bytes_per_output_token(params: GenerationParams) -> int:
    """Return the bytes held per output token until the response is sent; a stream keeps no log-probabilities."""
    _, width = _widths(params)
    return OUTPUT_TOKEN_BYTES + (ENTRY_TOKEN_BYTES + ENTRY_BYTES * width if width and not params.stream else 0)


def _widths(params: GenerationParams) -> tuple[int, int]:
    """Return the entries per prompt token and per output token."""
    sampling = params.sampling
    prompt = 1 if params.echo else 0
    if sampling.prompt_logprobs is not None:
        prompt = 1 + sampling.prompt_logprobs
    return prompt, 0 if sampling.logprobs is None else 1 + sampling.logprobs
