"""Configuration of an Envoy in front of a router's replicas: one listener, an external processing filter, one cluster.

The endpoint picker names the replicas of each request; Envoy tries them in that order. Without the picker, Envoy sends
requests to replicas in turn, unless the router has keys: then only the requests that the picker has replied to have a
route to a replica, since nothing would check the others.

HTTP filters of our own Envoy: the picker is asked once before a request is forwarded, and hears of its answer.

An answer waits for the picker only if it is no plain success: another status than 200, after a retry, or neither JSON
nor a stream of events. All others pass through two filters that do not wait: `observer` reports the head to the picker,
and a script removes the headers that are not meant for clients. Request bodies stay in Envoy until the picker has
replied, so that a request whose picker is lost can go on without it.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.gateway.picker.ext_proc_messages import ANSWER_HEADERS, DESTINATION, LB, SERVED
from headstart.gateway.proxy.upstream import SENT_BACK, SENT_BACK_PREFIXES
from headstart.http.answer_report import REPORT_HEADER

_MANY = 1 << 20  # connections, requests and retries: no circuit breaker opens
BOOTSTRAP, REPLICAS, SOCKET = "envoy.json", "replicas.json", "picker.sock"
"""Files in the folder of an Envoy: its configuration, the addresses of the replicas, the picker's socket."""
PROBE_SECONDS = 0.1  # between two probes of the picker
SILENCE_SECONDS = 3  # without a sign of the picker's process, after which it counts as lost, with what it was asked
TYPE = "type.googleapis.com/envoy"
MESSAGE_SECONDS = 60  # limit for one reply of the picker: requests may wait in it for a replica
_ATTEMPTS = "x-envoy-attempt-count"  # in the answers of replicas only, until these filters have removed it
_SKIPPED = {
    "request_header_mode": "SKIP",
    "request_body_mode": "NONE",
    "request_trailer_mode": "SKIP",
    "response_header_mode": "SKIP",
    "response_body_mode": "NONE",
    "response_trailer_mode": "SKIP",
}


def envoy_http_filters() -> list[dict[str, Any]]:
    """Return all filters in the order of requests; answers pass in the opposite order."""
    router = {"@type": f"{TYPE}.extensions.filters.http.router.v3.Router", "suppress_envoy_headers": True}
    is_answer = _matches(_ATTEMPTS, ".+")
    is_of_api = _matches("content-type", r"(application/json|text/event-stream)([ ;].*)?")
    is_plain = _all(_equals(":status", "200"), _equals(_ATTEMPTS, "1"), is_of_api)
    return [
        {"name": "headstart.picker", "typed_config": _picker()},
        {"name": "headstart.headers", "typed_config": _script()},
        _unless({"or_matcher": {"predicate": [{"not_matcher": is_answer}, is_plain]}}, "headstart.checker", _checker()),
        _unless({"not_matcher": is_plain}, "headstart.observer", _observer()),
        {"name": "router", "typed_config": router},
    ]


def _picker() -> dict[str, Any]:
    """Return the filter that asks the picker. Its stream stays open until the request has ended.

    Response trailers are requested for that reason only: over HTTP/1.1 there are none.
    """
    mode = {"request_header_mode": "SEND", "request_body_mode": "STREAMED", "response_trailer_mode": "SEND"}
    return {
        **_processor(mode),
        "request_attributes": ["source.address"],
        "send_body_without_waiting_for_header_response": True,
    }


def _checker() -> dict[str, Any]:
    """Return the filter that has the picker check and change the head of an answer."""
    return _processor({"response_header_mode": "SEND"})


def _observer() -> dict[str, Any]:
    """Return the filter that reports the head of an answer and does not wait."""
    names = (":status", "content-type", REPORT_HEADER.decode())
    return {
        **_processor({"response_header_mode": "SEND"}),
        "observability_mode": True,
        "deferred_close_timeout": "1s",
        "forward_rules": {"allowed_headers": {"patterns": [{"exact": name} for name in names]}},
    }


def _processor(mode: dict[str, str]) -> dict[str, Any]:
    return {
        "@type": f"{TYPE}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "failure_mode_allow": True,  # without the picker the route decides
        "message_timeout": f"{MESSAGE_SECONDS}s",
        "processing_mode": {**_SKIPPED, **mode},
        "metadata_options": {
            "forwarding_namespaces": {"untyped": [LB, f"{LB}.subset_hint"]},
            "receiving_namespaces": {"untyped": [LB]},
        },
    }


def _script() -> dict[str, Any]:
    """Return the filter that keeps the headers of `returned_response_headers` and sets those that the picker named."""
    kept = {name.decode() for name in SENT_BACK} | {"content-type", "content-length", "transfer-encoding", "date"}
    names = ", ".join(f'["{name}"] = true' for name in sorted(kept))
    prefixes = " or ".join(f'name:sub(1, {len(text)}) == "{text.decode()}"' for text in SENT_BACK_PREFIXES)
    code = _SCRIPT.format(names=names, prefixes=prefixes, attempts=_ATTEMPTS, lb=LB, headers=ANSWER_HEADERS)
    return {
        "@type": f"{TYPE}.extensions.filters.http.lua.v3.Lua",
        "default_source_code": {"inline_string": code},
    }


_SCRIPT = """
local kept = {{ {names} }}
local function is_kept(name)
  return kept[name] or name:sub(1, 1) == ":" or {prefixes}
end
function envoy_on_response(handle)
  local headers = handle:headers()
  local attempts = headers:get("{attempts}")
  if attempts == nil then return end
  local connection = "," .. (headers:get("connection") or ""):lower():gsub("%s", "") .. ","
  local removed = {{}}
  for name, value in pairs(headers) do
    if not is_kept(name) or value:find("[%c\\128-\\160\\173]") or connection:find("," .. name .. ",", 1, true) then
      removed[#removed + 1] = name
    end
  end
  for _, name in ipairs(removed) do headers:remove(name) end
  local told = handle:streamInfo():dynamicMetadata():get("{lb}")
  local own = told and told["{headers}"]
  local is_plain = attempts == "1" and headers:get(":status") == "200"
  for name, value in pairs(own or {{}}) do
    if is_plain or name:sub(1, 12) ~= "x-headstart-" then headers:replace(name, value) end
  end
end
"""


def _unless(predicate: dict[str, Any], name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a filter that is skipped for answers whose head matches."""
    skip = {"@type": f"{TYPE}.extensions.filters.common.matcher.action.v3.SkipFilter"}
    matchers = [{"predicate": predicate, "on_match": {"action": {"name": "skip", "typed_config": skip}}}]
    return {
        "name": name,
        "typed_config": {
            "@type": f"{TYPE}.extensions.common.matching.v3.ExtensionWithMatcher",
            "extension_config": {"name": name, "typed_config": config},
            "xds_matcher": {"matcher_list": {"matchers": matchers}},
        },
    }


def _equals(header: str, value: str) -> dict[str, Any]:
    return _predicate(header, {"exact": value})


def _matches(header: str, regex: str) -> dict[str, Any]:
    return _predicate(header, {"safe_regex": {"google_re2": {}, "regex": regex}})


def _all(*predicates: dict[str, Any]) -> dict[str, Any]:
    return {"and_matcher": {"predicate": list(predicates)}}


def _predicate(header: str, value: dict[str, Any]) -> dict[str, Any]:
    source = {"@type": f"{TYPE}.type.matcher.v3.HttpResponseHeaderMatchInput", "header_name": header}
    return {"single_predicate": {"input": {"name": header, "typed_config": source}, "value_match": value}}


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """Settings of an Envoy. Times in seconds. `fails_open`: requests are served while there is no picker."""

    folder: Path
    host: str
    port: int
    fails_open: bool
    max_attempts: int
    connect_timeout: float
    response_timeout: float
    max_body_bytes: int
    max_connections: int


def write_envoy_config(settings: EnvoySettings) -> Path:
    """Write the configuration and return its path."""
    path = settings.folder / BOOTSTRAP
    monitor = {
        "@type": f"{TYPE}.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        "max_active_downstream_connections": settings.max_connections,
    }
    name = "envoy.resource_monitors.global_downstream_max_connections"
    document = {
        "node": {"id": "headstart", "cluster": "headstart"},
        "static_resources": {"listeners": [_listener(settings)], "clusters": _clusters(settings)},
        "overload_manager": {"resource_monitors": [{"name": name, "typed_config": monitor}]},
    }
    _replace(path, document)
    return path


def write_envoy_endpoints(folder: Path, addresses: Sequence[str]) -> None:
    """Write the addresses of the replicas, IP:port; a running Envoy reads them again."""
    endpoints = [{"endpoint": {"address": _socket(address)}} for address in addresses]
    assignment = {
        "@type": f"{TYPE}.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": "replicas",
        "endpoints": [{"lb_endpoints": endpoints}],
    }
    _replace(folder / REPLICAS, {"resources": [assignment]})


def _replace(path: Path, document: dict[str, Any]) -> None:
    """Write a file under another name and rename it: a reader never sees a part of it."""
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(draft, path)


def _listener(settings: EnvoySettings) -> dict[str, Any]:
    retries = {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
        "num_retries": settings.max_attempts - 1,
        "retriable_status_codes": [429, 502, 503, 504],
        "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.005s"},
    }
    picked = {"filter": LB, "path": [{"key": DESTINATION}], "value": {"present_match": True}}
    kept = {"request_body_buffer_limit": settings.max_body_bytes}  # bodies are kept for retries, and without a picker
    routes: list[dict[str, Any]] = [
        {
            "match": {"prefix": "/"} if settings.fails_open else {"prefix": "/", "dynamic_metadata": [picked]},
            "route": {"cluster": "replicas", "timeout": "0s", "retry_policy": retries},
            **kept,
        }
    ]
    if not settings.fails_open:  # until the picker has replied
        routes.append({"match": {"prefix": "/"}, "direct_response": _refusal(), **kept, **_refusal_headers()})
    virtual_host = {"name": "all", "domains": ["*"], "routes": routes, "include_attempt_count_in_response": True}
    manager = {
        "@type": f"{TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "use_remote_address": True,
        "server_header_transformation": "PASS_THROUGH",
        "generate_request_id": False,
        "preserve_external_request_id": True,
        "normalize_path": False,
        "stream_idle_timeout": f"{settings.response_timeout:g}s",
        "route_config": {"virtual_hosts": [virtual_host]},
        "http_filters": envoy_http_filters(),
    }
    return {
        "name": "front",
        "address": _socket(
            f"[{settings.host}]:{settings.port}" if ":" in settings.host else f"{settings.host}:{settings.port}"
        ),
        # A body waits here until the picker has read all of it. Beyond the limit Envoy would stop reading it.
        "per_connection_buffer_limit_bytes": settings.max_body_bytes + (1 << 20),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def _clusters(settings: EnvoySettings) -> list[dict[str, Any]]:
    round_robin = {"@type": f"{TYPE}.extensions.load_balancing_policies.round_robin.v3.RoundRobin"}
    override = {
        "@type": f"{TYPE}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": LB, "path": [{"key": DESTINATION}]}}],
        "selected_host_key": {"key": LB, "path": [{"key": SERVED}]},
        "fallback_policy": {
            "policies": [{"typed_extension_config": {"name": "round_robin", "typed_config": round_robin}}]
        },
    }
    thresholds = {key: _MANY for key in ("max_connections", "max_pending_requests", "max_requests", "max_retries")}
    replicas = {
        "name": "replicas",
        "type": "EDS",
        "eds_cluster_config": {
            "eds_config": {
                "path_config_source": {"path": str(settings.folder / REPLICAS)},
                "resource_api_version": "V3",
            }
        },
        "connect_timeout": f"{settings.connect_timeout:g}s",
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "override_host", "typed_config": override}}]
        },
        "circuit_breakers": {"thresholds": [thresholds]},
        "per_connection_buffer_limit_bytes": 1 << 20,
    }
    http2 = {
        "@type": f"{TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {
            # A process that is stopped keeps its connections. What waits for it is released by an unanswered ping.
            "http2_protocol_options": {"connection_keepalive": {"interval": "1s", "timeout": f"{SILENCE_SECONDS}s"}}
        },
    }
    picker = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        # A request whose body waits for a connection to the picker cannot pass without it any more. So the first one
        # that finds no picker takes it out of service, until it answers probes again.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "outlier_detection": {
            "consecutive_5xx": 1,  # a failed connection counts as one
            "enforcing_consecutive_5xx": 100,
            "base_ejection_time": f"{PROBE_SECONDS}s",
            "max_ejection_time": f"{PROBE_SECONDS}s",
            "interval": f"{PROBE_SECONDS}s",
            "max_ejection_percent": 100,
        },
        "health_checks": [
            {
                "timeout": f"{SILENCE_SECONDS}s",
                "interval": f"{PROBE_SECONDS}s",
                "no_traffic_interval": f"{PROBE_SECONDS}s",
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": "liveness"},
            }
        ],
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "circuit_breakers": {"thresholds": [thresholds]},
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": {"pipe": {"path": str(settings.folder / SOCKET)}}}}]}
            ],
        },
    }
    return [replicas, picker]


def _socket(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def _refusal() -> dict[str, Any]:
    """Return the answer to requests that no picker has checked."""
    error = {"message": "the router is not running: try again later", "type": "server_error", "code": "no_router"}
    return {"status": 503, "body": {"inline_string": json.dumps({"error": error})}}


def _refusal_headers() -> dict[str, Any]:
    found = {"content-type": "application/json", "retry-after": "1"}
    actions = [
        {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        for key, value in found.items()
    ]
    return {"response_headers_to_add": actions}
