"""Makes a store on disk as patient as tests need it: what is stored is loaded, however busy or slow the machine is.

By rule an engine computes what it could load when loading was measured to be slower, or takes longer than expected. On
busy cores that is right, and it is no business of a test that asks *what* is loaded. The rule has tests of its own, in
core/test_transfers.py and store/test_estimate.py, in time that they make up.
"""

from collections.abc import Callable

from headstart.core.cache import transfers
from headstart.store import block_loader as loader
from headstart.store import disk

SECONDS = 3600.0


def prefer_the_store(put: Callable[[object, str, object], object]) -> None:
    """Loading is thought to take no time and never given up; closing writes all. `put` is setattr, or monkeypatch's."""
    put(transfers, "GRACE_SECONDS", SECONDS)
    put(transfers, "WAIT_SECONDS", SECONDS)
    put(loader, "OVERDUE_SECONDS", SECONDS)
    put(disk, "CLOSE_SECONDS", SECONDS)
    put(disk.LoadTimeEstimate, "expected", lambda self, num_blocks, now: 0.0)
