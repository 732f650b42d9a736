"""The likeliest reason why no KV event of a replica is usable, and the remedy, from the counters of its consumer."""

from collections.abc import Mapping

from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.router.index.kv_event_index import NOT_USED


def likely_cause(counts: Mapping[str, int], address: ReplicaAddress, is_connected: bool, block_size: int) -> str:
    """Return the likeliest reason why no event is usable, and what to do."""
    where = address.events
    worst = max(NOT_USED, key=lambda key: counts[key])
    if not is_connected:
        return f"nothing listens at {where}; are events enabled there (--kv-events-config), and is the port right?"
    if not counts["batches"]:
        return f"not one batch came from {where}; is enable_kv_cache_events on, and does its endpoint bind the port?"
    if counts["stored"]:
        return "there are events of blocks that others computed, but none of what these requests computed"
    if counts["undecodable"] or counts["malformed"]:
        return f"{counts['undecodable']} batches and {counts['malformed']} events cannot be read; another topic?"
    if counts["other_groups"] or not counts[worst]:
        return "there are no events of layers that keep the whole prefix"
    if worst == "other_block_size":
        return f"its blocks are not of {block_size} tokens, which is what the router expects"
    remedy = "give its replay endpoint, too" if address.replay is None else "let it keep more (buffer_steps)"
    return f"events refer to blocks that were stored before the router connected, or missed; {remedy}"
