"""PrefixRouting: the callback that narrows LiteLLM's healthy deployments to the server that should take a request.

In Python: `litellm.callbacks.append(PrefixRouting())`. In the proxy's configuration, under `litellm_settings`:
`callbacks: ["headstart_plugins.litellm.callback.prefix_routing"]`. Both have this plug point, and it comes after
cooldowns and the other filters of deployments, which a strategy of `set_custom_routing_strategy` would replace.
"""

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from threading import Lock
from typing import Any
from weakref import ref

from litellm.integrations.custom_logger import CustomLogger

from headstart.router.routing_request import ReportedTokenUsage
from headstart_plugins.litellm.prefix_router import CallProgress, PrefixRouter, PromptKey
from headstart_plugins.versions import check_version

check_version("litellm")

_PROMPTS = ("messages", "prompt", "input")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class PrefixRouting(CustomLogger):
    """Routes by cached prefixes and load. Deployments with the same `api_base` are one server.

    Requests without a prompt, and those for which LiteLLM leaves one server only, are not touched. The calls of
    LiteLLM may come from several threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._router = PrefixRouter()
        self._lock = Lock()

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list[dict[str, Any]],
        messages: Any,
        request_kwargs: dict[str, Any] | None = None,
        parent_otel_span: Any = None,
    ) -> list[dict[str, Any]]:
        """Return the deployments of the chosen server."""
        values = request_kwargs or {}
        servers = {_server(deployment) for deployment in healthy_deployments}
        if len(servers) < 2 or not any(values.get(name) for name in _PROMPTS):
            return healthy_deployments
        key = PromptKey.of(model, values)
        with self._lock:
            chosen = self._router.pick(model, key, servers, time.monotonic(), trace=_trace(values))
        return [deployment for deployment in healthy_deployments if _server(deployment) == chosen]

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> None:
        """Record an attempt that is about to be sent."""
        metadata = kwargs.get("metadata") or kwargs.get("litellm_metadata") or {}
        group, info = metadata.get("model_group"), kwargs.get("model_info") or {}
        if not group or not info.get("id") or not any(kwargs.get(name) for name in _PROMPTS):
            return
        key = PromptKey.of(group, kwargs)
        limits = (value for name in _LIMITS if isinstance(value := kwargs.get(name), int))
        with self._lock:
            self._router.record_sent(
                str(kwargs.get("litellm_call_id")),
                group,
                key,
                _server({"litellm_params": kwargs, "model_info": info}),
                time.monotonic(),
                progress=_progress_of(kwargs.get("litellm_logging_obj")),
                trace=_trace(kwargs),
                is_stream=kwargs.get("stream") is True,
                max_tokens=next(limits, 0),
            )

    async def async_post_call_success_deployment_hook(
        self, request_data: dict[str, Any], response: Any, call_type: Any
    ) -> None:
        """Record an answer in one piece."""
        self._finished(request_data, response)

    async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        """Record the end of a stream; that of an answer in one piece is already known."""
        self._finished(kwargs, response_obj)

    async def async_post_call_failure_deployment_hook(
        self,
        request_data: Mapping[str, Any],
        exception: Exception,
        call_type: Any,
        fallback_depth: int | None = None,
    ) -> None:
        """Record a failed attempt."""
        self._failed(request_data, exception)

    async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        """Record a stream that broke."""
        self._failed(kwargs, kwargs.get("exception"))

    def _finished(self, kwargs: Mapping[str, Any], response: Any) -> None:
        usage, num_output = _usage_of(getattr(response, "usage", None))
        with self._lock:
            self._router.record_finished(str(kwargs.get("litellm_call_id")), time.monotonic(), usage, num_output)

    def _failed(self, kwargs: Mapping[str, Any], exception: Any) -> None:
        status = getattr(exception, "status_code", None)
        blame = not isinstance(status, int) or status >= 500
        with self._lock:
            self._router.record_failed(str(kwargs.get("litellm_call_id")), time.monotonic(), blame=blame)


def _server(deployment: Mapping[str, Any]) -> str:
    """Return the name of a deployment's server: its address, or the deployment's id where a provider has none."""
    return deployment["litellm_params"].get("api_base") or deployment["model_info"]["id"]


def _trace(values: Mapping[str, Any]) -> str:
    """Return the id that all attempts of a request have."""
    return str(values.get("litellm_trace_id") or "")


def _progress_of(logging_obj: Any) -> Callable[[], CallProgress]:
    """Return a function that reads LiteLLM's record of a call, which is freed when the answer is no longer used."""
    if logging_obj is None:
        return CallProgress
    record = ref(logging_obj)

    def progress() -> CallProgress:
        known = record()
        if known is None:
            return CallProgress(is_lost=True)
        began = getattr(known, "completion_start_time", None)
        if not isinstance(began, datetime):
            return CallProgress()
        return CallProgress(first_token_at=time.monotonic() - (datetime.now(began.tzinfo) - began).total_seconds())

    return progress


def _usage_of(usage: Any) -> tuple[ReportedTokenUsage | None, int]:
    """Return the usage that a server reported, None without cached tokens, and the number of output tokens."""
    details = getattr(usage, "prompt_tokens_details", None) or getattr(usage, "input_tokens_details", None)
    cached = getattr(details, "cached_tokens", None)
    prompt = getattr(usage, "prompt_tokens", None) or getattr(usage, "input_tokens", None)
    output = getattr(usage, "completion_tokens", None) or getattr(usage, "output_tokens", None) or 0
    return (ReportedTokenUsage(prompt, cached) if isinstance(prompt, int) and isinstance(cached, int) else None), output


prefix_routing = PrefixRouting()
"""The callback of a proxy, whose configuration names it."""
