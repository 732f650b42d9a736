"""Start SMG (PyPI `smg`), the successor of SGLang's router, in front of plain HTTP replicas.

It requests /health, /version, /v1/models and the like from each replica until it knows its kind, then its load.
"""

from start import Order, start


def command(order: Order) -> list[str]:
    """Return the command line. Its default policy is cache_aware. Its response history is off."""
    words = [order.script("smg"), "launch", "--host", "127.0.0.1", "--port", str(order.port)]
    words += ["--worker-urls", *order.replicas, "--policy", order.policy or "cache_aware", "--log-level", "warn"]
    words += ["--history-backend", "none", "--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
    return [*words, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(order.spare_port()), *order.flags]


if __name__ == "__main__":
    start("smg", "/readiness", command)
