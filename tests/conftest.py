"""What holds for every test: one quiet compute thread, settled before torch is imported, and repeatable examples."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import HealthCheck, settings

# No deadline: two shared cores. Derandomised: a red run is red again; `--hypothesis-seed` explores.
settings.register_profile(
    "headstart", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("headstart")
