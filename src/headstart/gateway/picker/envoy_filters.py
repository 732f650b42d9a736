"""HTTP filters of our own Envoy: the picker is asked once before a request is forwarded, and hears of its answer.

An answer waits for the picker only if it is no plain success: another status than 200, after a retry, or neither JSON
nor a stream of events. All
others pass through two filters that do not wait: `observer` reports the head to the picker, and a script removes the
headers that are not meant for clients. Request bodies stay in Envoy until the picker has replied, so that a request
whose picker is lost can go on without it.
"""

from typing import Any

from headstart.gateway.picker.ext_proc_messages import ANSWER_HEADERS, LB
from headstart.gateway.proxy.upstream import SENT_BACK, SENT_BACK_PREFIXES
from headstart.http.answer_report import REPORT_HEADER

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


def http_filters() -> list[dict[str, Any]]:
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
    """Return the filter that keeps the headers of `headers_back` and sets those that the picker named."""
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
