"""PrefixRouter: Headstart's router over the deployments of a gateway that sends the requests itself.

The gateway names the servers that may take a request, sends it, and reports how it ended. It need not report first
tokens and lost requests: a `CallProgress` is asked for both before anything else changes. Knows nothing of LiteLLM.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from headstart.core.cache.hashing import BlockHash
from headstart.gateway.proxy.request_reader import conversation_text
from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight
from headstart.router.routing_request import (
    ReportedTokenUsage,
    RoutingPrompt,
    RoutingRequest,
    router_root,
    text_as_pseudo_tokens,
)

MAX_CALLS = 8_192  # in flight; the oldest is taken for lost
MAX_PROMPTS = 64  # whose hashes are kept between the choice and the sending
MAX_FAILED = 1_024  # requests whose failed servers are remembered
UNUSED_SECONDS = 3_600.0  # after which a server that no request may use is forgotten
_TEXT_PARTS = ("text", "input_text", "output_text")


class CallProgress(NamedTuple):
    """The state of a call in flight, as its gateway knows it."""

    is_lost: bool = False  # its client is gone, and no other report will come
    first_token_at: float | None = None


@dataclass(frozen=True, slots=True)
class PromptKey:
    """A prompt, as far as its reuse is concerned. `root`: the model and salt, which share nothing with others."""

    root: BlockHash
    body: bytes  # text, or token ids in the machine's order
    is_tokens: bool = False

    @classmethod
    def of(cls, group: str, values: Mapping[str, Any]) -> "PromptKey":
        """Return the prompt of a request of the Completions, Chat Completions, Messages or Responses API."""
        salt = values.get("cache_salt") or (values.get("extra_body") or {}).get("cache_salt") or ""
        root = router_root(group, domain=str(salt).encode())
        prompt = values.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
            prompt = prompt[0]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return cls(root, b"".join(token.to_bytes(4, "little", signed=True) for token in prompt), is_tokens=True)
        if isinstance(prompt, list):
            prompt = prompt[0] if prompt else ""
        return cls(root, (str(prompt) if prompt else _chat_text(values)).encode(errors="replace"))

    def prompt(self) -> RoutingPrompt:
        """Return it with the hashes of its blocks, which are computed when they are needed."""
        units = text_as_pseudo_tokens(self.body)
        return RoutingPrompt(units, self.root, exact=self.is_tokens)


@dataclass(eq=False, slots=True)
class _Call:
    """A call in flight."""

    in_flight: RoutedInFlight
    key: PromptKey
    trace: str
    progress: Callable[[], CallProgress]
    is_stream: bool


class PrefixRouter:
    """The servers, their modelled caches and loads, and the calls in flight. Only one method may run at a time."""

    def __init__(self) -> None:
        self.router = Router()
        self._seen: dict[str, float] = {}  # servers, and when a request could last use them
        self._calls: OrderedDict[str, _Call] = OrderedDict()
        self._prompts: OrderedDict[PromptKey, RoutingPrompt] = OrderedDict()
        self._failed: OrderedDict[tuple[str, PromptKey], frozenset[str]] = OrderedDict()  # by trace and prompt

    @property
    def num_calls(self) -> int:
        """The calls in flight."""
        return len(self._calls)

    def pick(self, group: str, key: PromptKey, servers: Iterable[str], now: float, *, trace: str = "") -> str:
        """Return the server that should take a request, one that has not failed it if there is one.

        `trace` is the same for all attempts of one request. Raises NoReplicaError if there are no servers.
        """
        self._advance(now)
        names = frozenset(servers)
        self._meet(names, group, now)
        tried = self._failed.get((trace, key), frozenset())
        request = RoutingRequest(self._prompt(key), subset=(names - tried) or names)
        return self.router.pick(request, now).endpoint.name

    def record_sent(
        self,
        call_id: str,
        group: str,
        key: PromptKey,
        server: str,
        now: float,
        *,
        progress: Callable[[], CallProgress] = CallProgress,
        trace: str = "",
        is_stream: bool = False,
        max_tokens: int = 0,
    ) -> None:
        """Record that an attempt is sent to a server, whether it was picked or not."""
        self._advance(now)
        self._meet(frozenset((server,)), group, now)
        self.record_failed(call_id, now, blame=False)  # a second attempt under one id
        request = RoutingRequest(self._prompt(key), subset=frozenset((server,)), max_tokens=max_tokens)
        in_flight = self.router.record_sent(self.router.pick(request, now), now)
        self._calls[call_id] = _Call(in_flight, key, trace, progress, is_stream)
        if len(self._calls) > MAX_CALLS:
            self.router.record_client_disconnect(self._calls.popitem(last=False)[1].in_flight, now)

    def record_finished(
        self, call_id: str, now: float, usage: ReportedTokenUsage | None = None, num_output: int = 0
    ) -> None:
        """Record a complete answer. `usage` None: the server did not report cached tokens."""
        self._advance(now)
        call = self._calls.pop(call_id, None)
        if call is None:
            return
        self._failed.pop((call.trace, call.key), None)
        if num_output != 1:  # otherwise the end of an answer in one piece is its first token
            self.router.assume_first_token(call.in_flight, now)
        self.router.record_finished(call.in_flight, now, usage, num_output=num_output)

    def record_failed(self, call_id: str, now: float, *, blame: bool = True) -> None:
        """Record a failed attempt. `blame` False: it says nothing about the server."""
        self._advance(now)
        call = self._calls.pop(call_id, None)
        if call is None:
            return
        self.router.record_failed(call.in_flight, now, blame=blame)
        index = (call.trace, call.key)
        self._failed[index] = self._failed.pop(index, frozenset()) | {call.in_flight.endpoint.name}
        if len(self._failed) > MAX_FAILED:
            self._failed.popitem(last=False)

    # ------------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Report what has happened to the calls in flight, in order."""
        states = {call_id: call.progress() for call_id, call in self._calls.items()}
        for call_id, state in states.items():
            if state.is_lost:
                self.router.record_client_disconnect(self._calls.pop(call_id).in_flight, now)
        began: list[tuple[float, RoutedInFlight, bool]] = []
        for call_id, call in self._calls.items():
            flight, at = call.in_flight, states[call_id].first_token_at
            if flight.first_token is not None:
                continue
            if call.is_stream and at is not None:
                began.append((min(max(at, flight.sent_at), now), flight, True))
            elif not call.is_stream and now > flight.sent_at + flight.flight.expected_ttft_ms / 1e3:
                began.append((flight.sent_at + flight.flight.expected_ttft_ms / 1e3, flight, False))
        for at, flight, is_seen in sorted(began, key=lambda item: item[0]):
            if is_seen:
                self.router.record_first_token(flight, at)
            else:
                self.router.assume_first_token(flight, at)

    def _meet(self, names: frozenset[str], group: str, now: float) -> None:
        """Add servers that are new, and forget those that were not named for long."""
        new = names - self._seen.keys()
        self._seen.update(dict.fromkeys(names, now))
        for name in new:
            self.router.add(Endpoint(name, ApproximateIndex(), models=frozenset((group,))))
        if new:
            for name in [name for name, at in self._seen.items() if now - at > UNUSED_SECONDS]:
                del self._seen[name]
                self.router.remove(name)

    def _prompt(self, key: PromptKey) -> RoutingPrompt:
        prompt = self._prompts.pop(key, None) or key.prompt()
        self._prompts[key] = prompt
        if len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return prompt


def _chat_text(values: Mapping[str, Any]) -> str:
    """Return the text of a chat; equal beginnings give equal beginnings."""
    plain = {name: _builtins(values.get(name)) for name in ("tools", "system", "instructions", "messages", "input")}
    messages: list[Any] = []
    for name in ("system", "instructions"):
        if plain[name]:
            messages.append({"role": "system", "content": plain[name]})
    for given in (plain["messages"] or plain["input"],):
        messages += [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    return conversation_text({"tools": plain["tools"], "messages": [_message(item) for item in messages]})


def _message(item: Any) -> dict[str, Any]:
    """Return a message; an item of the Responses API that is none becomes one."""
    if not isinstance(item, dict):
        return {"role": "item", "content": str(item)}
    if "content" not in item:
        return {"role": "item", "content": [item]}
    return {**item, "content": _joined(item["content"])}


def _joined(content: Any) -> Any:
    """Return the parts of a message without their cache markers, which move from turn to turn; texts as one text."""
    if not isinstance(content, list):
        return content
    parts = [
        {k: v for k, v in part.items() if k != "cache_control"} if isinstance(part, dict) else part for part in content
    ]
    if all(isinstance(part, dict) and part.get("type") in _TEXT_PARTS for part in parts):
        return "".join(str(part.get("text") or "") for part in parts)
    return parts


def _builtins(value: Any) -> Any:
    """Return a value of LiteLLM's or pydantic's classes as plain data."""
    return msgspec.to_builtins(
        value, enc_hook=lambda other: other.model_dump() if hasattr(other, "model_dump") else str(other)
    )
