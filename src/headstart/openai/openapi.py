"""Schemas of request bodies for /openapi.json, with the ranges of bounds.py. Validation is in request_bodies.py."""

from typing import Any

from headstart.openai.bounds import INTEGERS, LOGIT_BIAS, NUMBERS

Schema = dict[str, Any]


def _body(properties: Schema, *required: str) -> Schema:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _number(name: str) -> Schema:
    """Return the schema of a number with its range from NUMBERS; null means its default."""
    low, high, _, above_low = NUMBERS[name]
    return {"type": ["number", "null"], "exclusiveMinimum" if above_low else "minimum": low, "maximum": high}


def _integer(name: str) -> Schema:
    low, high = INTEGERS[name]
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "number"}
_INTEGER: Schema = {"type": "integer"}
_TOKEN_IDS: Schema = {"type": "array", "items": _INTEGER}
_MESSAGES: Schema = {
    "type": "array",
    "items": {"type": "object", "properties": {"role": _TEXT, "content": _TEXT}, "required": ["role"]},
}
_GENERATION: Schema = {
    "model": _TEXT,
    "max_tokens": _integer("max_tokens"),
    "min_tokens": _INTEGER,
    "n": _INTEGER,
    "stream": _FLAG,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _FLAG, "continuous_usage_stats": _FLAG},
    },
    "stop": {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    "stop_token_ids": _TOKEN_IDS,
    "include_stop_str_in_output": _FLAG,
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "temperature": _number("temperature"),
    "top_p": _number("top_p"),
    "top_k": _integer("top_k"),
    "min_p": _number("min_p"),
    "presence_penalty": _number("presence_penalty"),
    "frequency_penalty": _number("frequency_penalty"),
    "repetition_penalty": _number("repetition_penalty"),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": LOGIT_BIAS.low, "maximum": LOGIT_BIAS.high},
    },
    "seed": _integer("seed"),
    "priority": _integer("priority"),
    "cache_salt": _TEXT,
    "cache": {"type": "string", "enum": ["read-write", "read-only", "bypass"]},
    "cache_priority": _INTEGER,
    "cache_ttl": _NUMBER,
    "prompt_cache_key": _TEXT,
    "prompt_cache_options": {
        "type": "object",
        "properties": {"mode": {"type": "string", "enum": ["implicit", "explicit"]}, "ttl": _TEXT},
    },
    "prompt_cache_retention": {"type": "string", "enum": ["in_memory", "24h"]},
    "return_token_ids": _FLAG,
    "user": _TEXT,
}
_PROMPT: Schema = {
    "oneOf": [_TEXT, {"type": "array", "items": _TEXT}, _TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS}]
}

BODIES: dict[str, Schema] = {
    "/v1/completions": _body({**_GENERATION, "prompt": _PROMPT, "echo": _FLAG, "logprobs": _INTEGER}, "prompt"),
    "/v1/chat/completions": _body(
        {
            **_GENERATION,
            "messages": _MESSAGES,
            "max_completion_tokens": _integer("max_completion_tokens"),
            "logprobs": _FLAG,
            "top_logprobs": _INTEGER,
            "add_generation_prompt": _FLAG,
            "continue_final_message": _FLAG,
        },
        "messages",
    ),
    "/v1/cache/explain": _body({"model": _TEXT, "prompt": _PROMPT, "messages": _MESSAGES, "cache_salt": _TEXT}),
    "/tokenize": _body(
        {
            "model": _TEXT,
            "prompt": _TEXT,
            "messages": _MESSAGES,
            "add_special_tokens": _FLAG,
            "return_token_strs": _FLAG,
        }
    ),
    "/v1/prefixes": _body(
        {"name": _TEXT, "tenant": _TEXT, "text": _TEXT, "messages": _MESSAGES, "token_ids": _TOKEN_IDS, "wait": _FLAG},
        "name",
    ),
    "/detokenize": _body({"model": _TEXT, "tokens": _TOKEN_IDS}, "tokens"),
}
