"""Start vLLM's router (PyPI `vllm-router`) in front of plain HTTP replicas.

With cache_aware a replica first tokenizes each prompt for it: POST /v1/completions/render, else POST /tokenize.
"""

from start import Order, start


def command(order: Order) -> list[str]:
    """Return the command line. Its default policy is cache_aware."""
    words = [order.script("vllm-router"), "--host", "127.0.0.1", "--port", str(order.port)]
    words += ["--worker-urls", *order.replicas, "--policy", order.policy or "cache_aware", "--log-level", "warning"]
    words += ["--worker-startup-check-interval", "1"]
    return [*words, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(order.spare_port()), *order.flags]


if __name__ == "__main__":
    start("vllm-router", "/readiness", command)
