"""RequestParser: turns a client's body into a routing request with its prompt, and the body that is forwarded.

The prompt is what the replica will compute: in its own tokens if its tokenizer is available here, else in bytes of the
rendered or written text. An invalid body is forwarded all the same: the replica's error message is better. The body
changes in three places only: a stream requests its usage, from which the router learns, the tenant's salt is added if
replicas do not see the tenant's own key, and rules for prompts change what they are meant to.
"""

import re
import sys
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec

from headstart.apis.api import EVENTS, Api, StoredResponseRef
from headstart.apis.api_table import COMPLETIONS, UNCACHED, generation_api_of_path
from headstart.apis.ollama_api import LATEST
from headstart.core.cache.hashing import HashChain
from headstart.core.errors import InvalidRequestError, QueueFullError, RequestTooLargeError
from headstart.gateway.kv_events.kv_event_decoding import domain_of_cache_salt
from headstart.http.spooled_body import SpooledBody, spool_to_file
from headstart.openai.bounds import MAX_JSON_VALUES, RequestBounds
from headstart.openai.canonical.canonical_body import canonical_body
from headstart.openai.canonical.prompt_rules import NO_RULES, AppliedRules, PromptRules
from headstart.openai.chat.template_forms import ContentForms
from headstart.openai.engine_requests import encode_chat, encode_completion
from headstart.openai.forms.carried_text import DIGEST, digest_placeholder
from headstart.openai.forms.skipped import SkippedNames
from headstart.openai.forms.treatments import UNREADABLE, NameKind
from headstart.openai.request_bodies import parse_chat, parse_completion
from headstart.openai.request_json import parse_json, parse_json_object
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.value_checks import raise_invalid_value, raise_unsupported, safe_repr
from headstart.router.routing_request import RoutingPrompt, RoutingRequest, router_root, text_as_pseudo_tokens

_anything = partial(
    RequestBounds,
    vocab_size=2**31 - 1,
    max_model_len=2**40,
    max_n=2**20,
    max_prompts=2**20,
    max_logprobs=2**20,
    max_messages=2**20,
)
_ANYTHING = _anything()
_USAGE_ASKED = b'{"stream_options":{"include_usage":true},'
_OPENING = re.compile(rb"\s*\{")
_RUN = re.compile(r"\w+|[^\w\s]+|\s+")
_WINDOW = 32 * 1024  # characters; a run of twice as many contains a whole window
LONGEST_TOKEN = 64  # characters; a longer text than this for each token of the context is taken as too long for it
_LONG_BYTES = 256 << 10  # of a body
_SHORT_BYTES = 16 << 10  # of a field
_ANY_PROMPTS = 128  # in one body; the default of --max-prompts is 64
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_OF_REPLICAS = "kv_transfer_params"  # vLLM's: which server a replica gets KV from
_SESSION_HEADERS = (b"x-session-id", b"x-claude-code-session-id", b"x-session-affinity", b"x-correlation-id")
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
_SESSION_CHARS = 256  # of its name; policies and logs keep many


@dataclass(frozen=True, slots=True)
class ResolvedModelName:
    """A model name: the model whose weights it refers to, and the adapter on top of it, if it is one."""

    model: str
    adapter: str | None = None
    default_max_tokens: int = 0  # of a request without a limit; 0: not known
    max_model_len: int = 0  # tokens; 0: not known
    reads_parts: bool = True  # its replicas may read images, audio and files; Headstart's do not


@dataclass(frozen=True, slots=True)
class SenderRoutingInfo:
    """The sender of a request, as far as routing is concerned."""

    domain: bytes = b""  # isolation domain: prompts of different domains share no cache
    is_salted: bool = False  # replicas see one key for all tenants: a salt keeps the domain separate there
    session: str | None = None  # from a header
    reads_answer: bool = True  # the router reads the answer: a stream is asked for its usage


@dataclass(slots=True)
class ParsedRequest:
    """A parsed body. Belongs to one call, which drops the parts that it no longer needs."""

    request: RoutingRequest
    body: bytes | SpooledBody  # to be forwarded; large ones are in files
    stream: bool = False
    hides_usage: bool = False  # the client's stream must not contain the usage that the router requested
    text: str | None = None  # the prompt as text, for the explainer; None: it came as token ids
    domain: bytes = b""  # isolation domain: the tenant's, narrowed by a salt
    is_single: bool = True  # one prompt: the engine's usage is about the prompt that was routed
    used: StoredResponseRef | None = None  # the stored response that it needs
    applied_rules: AppliedRules = ()  # that changed the prompt, or were reported about it
    session: str | None = None  # as the client named it
    tokenizer: str = ""  # the digest of the one that made the prompt's tokens of its text, if replicas take them

    def drop_body(self) -> None:
        """Free the body."""
        if isinstance(self.body, SpooledBody):
            self.body.close()
        self.body = b""


class RequestParser:
    """Parses bodies for one fleet. `tokenizer` None: prompts are counted in bytes.

    `served` maps model names; `chain` computes block hashes (None: in Python). Slow for long prompts: call it off the
    event loop.
    """

    def __init__(
        self, tokenizer: Tokenizer | None = None, rules: PromptRules = NO_RULES, chain: HashChain | None = None
    ) -> None:
        self._chain = chain
        self.tokenizer = tokenizer
        self.rules = rules
        self.served: Mapping[str, ResolvedModelName] = {}
        self.default_model = ""

    def read_spooled(self, path: str, body: SpooledBody, sender: SenderRoutingInfo) -> ParsedRequest:
        """Parse a body in a file as `read` does; that of the result is in a file, too: this one or another."""
        data = body.read()
        reading = self.read(path, data, sender)
        changed = reading.body
        if changed is data:
            reading.body = body
        elif isinstance(changed, bytes):
            body.close()
            reading.body = spool_to_file(changed) or changed
        return reading

    def read(self, path: str, body: bytes, sender: SenderRoutingInfo) -> ParsedRequest:
        """Parse the body of a POST. Raises InvalidRequestError if it is no JSON object, or has fields of replicas."""
        body = body.removeprefix(BOM_UTF8)
        api, values = generation_api_of_path(path), self._values(path, body)
        if values.get(_OF_REPLICAS):
            raise_unsupported(
                _OF_REPLICAS, "it makes a replica fetch KV from an address of the client's choice; leave it out"
            )
        applied: AppliedRules = ()
        if self.rules:
            body, values, applied = canonical_body(path, body, values, self.rules, self._forms())
        model = values.get("model")
        name = model if isinstance(model, str) else ""
        name = name if name in self.served else name.removesuffix(LATEST)
        served = self.served.get(name) or ResolvedModelName(name or self.default_model)
        model_info = self.served.get(name or self.default_model, served)
        salt = _salt(sender, values.get("cache_salt"))
        domain = domain_of_cache_salt(salt) if sender.is_salted else sender.domain + domain_of_cache_salt(salt)
        root = router_root(served.model, adapter=served.adapter, domain=domain)
        scoped = None if self.tokenizer is None else self.tokenizer.for_domain(sender.domain.hex(), domain)
        limit = model_info.max_model_len or sys.maxsize  # the replica refuses a longer prompt
        skipped = SkippedNames()
        unreadable = DIGEST if model_info.reads_parts else _ANYTHING.unreadable_parts
        bounds = _anything(skipped=skipped, unreadable_parts=unreadable)
        tokens, text, count = self._prompt(path, api, values, scoped, limit, bounds)
        if tokens is not None:
            prompt = RoutingPrompt(tokens if len(tokens) <= limit else tokens[:limit], root, chain=self._chain)
        else:
            packed = text_as_pseudo_tokens((text or "")[: limit * LONGEST_TOKEN].encode())
            prompt = RoutingPrompt(packed, root, exact=False, chain=self._chain)
        sent_stream = values.get("stream")
        stream = api.streams_by_default if sent_stream is None else sent_stream is True
        asks_usage = stream and not api.end.is_named and api.end.media_type == EVENTS and sender.reads_answer
        sent, hides_usage = _asking_for_usage(body, values) if asks_usage else (body, False)
        if sender.is_salted and path not in UNCACHED:
            sent = _with(sent, "cache_salt", salt)
        limits = (values.get(name) for name in _LIMITS)
        most = next((given for given in limits if given is not None), model_info.default_max_tokens)
        session = _session(sender, values)
        request = RoutingRequest(
            prompt,
            model=name,
            adapter=served.adapter,
            session=f"{sender.domain.hex()}/{session}" if session and sender.domain else session,
            max_tokens=min(most, limit) if isinstance(most, int) and most > 0 else 0,
            form="chat" if api.chat_values is not None else "ids" if text is None else "text",
            has_parts=model_info.reads_parts and skipped.has_kind(NameKind.PART),
        )
        used = api.used_response(values)
        is_text = tokens is not None and text is not None and len(tokens) <= limit
        tokenizer = scoped.digest if scoped is not None and is_text else ""
        single = count == 1
        return ParsedRequest(
            request, sent, stream, hides_usage, text, domain, single, used, applied, session, tokenizer
        )

    def _forms(self) -> ContentForms | None:
        """Return the forms of messages that the replicas' chat template takes; None: not known, or not needed."""
        if "inline_system" not in self.rules or self.tokenizer is None:
            return None
        try:
            return self.tokenizer.content_forms()
        except (InvalidRequestError, QueueFullError):
            return None

    def _values(self, path: str, body: bytes) -> Mapping[str, Any]:
        """Return the fields of a body, without the long ones if they do not matter. Raises InvalidRequestError."""
        if path in UNCACHED:
            return _short_fields(body)
        if len(body) < _LONG_BYTES:
            return parse_json_object(body)
        model = self.served.get(str(_short_fields(body).get("model") or self.default_model))
        if model is None or not model.max_model_len:
            return parse_json_object(body)
        try:
            return parse_json_object(body, _ANY_PROMPTS * model.max_model_len + MAX_JSON_VALUES)
        except RequestTooLargeError:  # by the replica, too
            return _short_fields(body)

    def _prompt(
        self,
        path: str,
        api: Api,
        values: Mapping[str, Any],
        tokenizer: Tokenizer | None,
        limit: int,
        bounds: RequestBounds,
    ) -> "tuple[array[int] | None, str | None, int]":
        """Return the first prompt's token ids if known, its text if it has one, and the number of prompts.

        A text that is too long for `limit` tokens is not tokenized.
        """
        if api.used_response(values) is not None:
            return None, "", 0  # only its replica knows the prompt
        if api.chat_values is not None:
            try:
                return self._chat(dict(api.chat_values(values, bounds)), tokenizer, limit, bounds)
            except InvalidRequestError:  # another engine's API, or invalid: the replica decides
                return None, msgspec.json.encode(values).decode(), 1
        if api is COMPLETIONS:
            return self._completion(values, tokenizer, limit)
        return None, "" if path in UNCACHED else msgspec.json.encode(values).decode(), 1

    def _chat(
        self, values: dict[str, Any], tokenizer: Tokenizer | None, limit: int, bounds: RequestBounds
    ) -> "tuple[array[int] | None, str | None, int]":
        text = conversation_text(values)
        if tokenizer is not None and is_safe_to_tokenize(text, limit):
            try:
                bounds = replace(bounds, content_forms=tokenizer.content_forms)
                return encode_chat(parse_chat(dict(values), bounds), tokenizer, bounds), text, 1
            except (InvalidRequestError, QueueFullError):  # another engine's API, or invalid: the replica decides
                pass
        return None, text, 1

    def _completion(
        self, values: Mapping[str, Any], tokenizer: Tokenizer | None, limit: int
    ) -> "tuple[array[int] | None, str | None, int]":
        prompt = values.get("prompt")
        if isinstance(prompt, list) and prompt:
            if isinstance(prompt[0], int):
                return _token_ids(prompt[:limit]), None, 1
            first, count = prompt[0], len(prompt)
            if isinstance(first, list):
                return _token_ids(first[:limit]), None, count
        else:
            first, count = prompt, 1
        if not isinstance(first, str):
            return None, "", count
        if tokenizer is not None and is_safe_to_tokenize(first, limit):
            try:
                body = parse_completion({**values, "prompt": first}, _ANYTHING)
                return encode_completion(body, tokenizer, _ANYTHING)[0], first, count
            except InvalidRequestError:
                pass
        return None, first, count


def is_safe_to_tokenize(text: str, limit: int) -> bool:
    """Return whether a text may have at most `limit` tokens, and takes no extreme time and memory to tokenize."""
    return len(text) <= limit * LONGEST_TOKEN and not has_endless_word(text)


def has_endless_word(text: str) -> bool:
    """Return whether a text has 64 Ki characters in a row that a tokenizer may take as one word.

    A word of 2 million characters takes a tokenizer 500 MB and seconds; such prompts are routed by their bytes.
    """
    return any(_RUN.fullmatch(text, at, at + _WINDOW) for at in range(0, len(text) - _WINDOW + 1, _WINDOW))


def conversation_text(values: Mapping[str, Any]) -> str:
    """Return messages and tools as one text: conversations with a common beginning have texts with one."""
    parts = [msgspec.json.encode(values["tools"]).decode()] if values.get("tools") else []
    messages = values.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        if isinstance(content, list):
            content = [_shortened(part) for part in content]
        text = content if isinstance(content, str) else msgspec.json.encode(content).decode() if content else ""
        calls = message.get("tool_calls")
        parts.append(f"<{message.get('role')}>\n{text}{msgspec.json.encode(calls).decode() if calls else ''}")
    return "\n".join(parts)


def _shortened(part: object) -> object:
    """Return a part of a message, the digest of an image in place of its bytes."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return digest_placeholder(kind, part) if isinstance(kind, str) and kind in UNREADABLE else part


def _salt(sender: SenderRoutingInfo, cache_salt: object) -> str:
    """Return the salt that replicas see; empty: none. Raises InvalidRequestError for a client's salt of the wrong type.

    The tenant's domain and the client's own salt become one digest: 64 hexadecimal digits, valid at every engine. A
    domain without a client's salt has a digest as well. No salt of one tenant equals one of another.
    """
    own = cache_salt if isinstance(cache_salt, str) else ""
    if not sender.is_salted:
        return own
    if not isinstance(cache_salt, str | None):
        raise_invalid_value("cache_salt", f"is {safe_repr(cache_salt)}", "it must be a string")
    domain = sender.domain
    return sha256(b"headstart-router/salt" + len(domain).to_bytes(8, "little") + domain + own.encode()).hexdigest()


def _short_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a body but the long ones, which are not parsed. An invalid body has none."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {name: parse_json(raw) for name, raw in fields.items() if len(raw) < _SHORT_BYTES}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _token_ids(values: list[Any]) -> "array[int] | None":
    try:
        return array("i", values)
    except (TypeError, OverflowError):
        return None


def session_from_headers(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the name that headers give the session, the most specific of them; None: they give none."""
    values = dict(headers)
    return next((values[name].decode("latin-1") for name in _SESSION_HEADERS if values.get(name)), None)


def _session(sender: SenderRoutingInfo, values: Mapping[str, Any]) -> str | None:
    """Return the session's name, cut where it is long: a hint, on which no answer and no isolation depends."""
    fields = (value for name in _SESSION_FIELDS if isinstance(value := values.get(name), str) and value)
    return (sender.session or next(fields, ""))[:_SESSION_CHARS] or None


def _asking_for_usage(body: bytes, values: Mapping[str, Any]) -> tuple[bytes, bool]:
    """Return the body of a stream with its usage requested, and whether the router added that."""
    options = values.get("stream_options")
    if options is None and "stream_options" not in values:
        opening = _OPENING.match(body)
        return (_USAGE_ASKED + body[opening.end() :] if opening else body), True  # not empty: it contains "stream"
    if not isinstance(options, dict | None):
        return body, False  # invalid: the replica reports it
    if options and options.get("include_usage") is True:
        return body, False
    return _with(body, "stream_options", {**(options or {}), "include_usage": True}), True


def _with(body: bytes, name: str, value: object) -> bytes:
    """Return the body with one field set."""
    return msgspec.json.encode({**msgspec.json.decode(body, type=dict[str, msgspec.Raw]), name: value})
