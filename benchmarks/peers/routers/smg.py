"""Starts SMG (PyPI `smg`), the successor of SGLang's router, in front of plain HTTP replicas.

It asks each replica for /health, /version, /v1/models and the like until it knows its kind, from then on for its load.
"""

from start import Order, start


def command(order: Order) -> list[str]:
    """Its default policy is cache_aware. Its history of responses is of no use to a proxy."""
    words = [order.script("smg"), "launch", "--host", "127.0.0.1", "--port", str(order.port)]
    words += ["--worker-urls", *order.replicas, "--policy", order.policy or "cache_aware", "--log-level", "warn"]
    words += ["--history-backend", "none", "--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
    return [*words, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(order.spare_port()), *order.flags]


if __name__ == "__main__":
    start("smg", "/readiness", command)
