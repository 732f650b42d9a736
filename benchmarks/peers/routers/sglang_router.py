"""Start SGLang's router (PyPI `sglang-router`) in front of plain HTTP replicas. Its successor is SMG."""

from start import Order, start


def command(order: Order) -> list[str]:
    """Return the command line. Its default policy is cache_aware."""
    words = [order.script("sglang-router"), "launch", "--host", "127.0.0.1", "--port", str(order.port)]
    words += ["--worker-urls", *order.replicas, "--policy", order.policy or "cache_aware", "--log-level", "warn"]
    words += ["--history-backend", "none", "--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
    return [*words, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(order.spare_port()), *order.flags]


if __name__ == "__main__":
    start("sglang-router", "/readiness", command)
