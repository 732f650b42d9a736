"""The likeliest reason why no KV event of a replica is of use, and the remedy, from the counters of its listener."""

from collections.abc import Mapping

from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.router.index.kv_event_index import NOT_USED


def likely_cause(counts: Mapping[str, int], address: ReplicaAddress, is_connected: bool, block_size: int) -> str:
    """The likeliest reason why nothing is of use, and what to do."""
    where = address.events
    worst = max(NOT_USED, key=lambda key: counts[key])
    if not is_connected:
        return f"nobody is at {where}; are events enabled there (--kv-events-config), and is it the right port?"
    if not counts["batches"]:
        return f"not one batch came from {where}; is enable_kv_cache_events on, and does its endpoint bind the port?"
    if counts["stored"]:
        return "what others computed is told, what these requests computed is not"
    if counts["undecodable"] or counts["malformed"]:
        return f"{counts['undecodable']} batches and {counts['malformed']} events cannot be read; another topic?"
    if counts["other_groups"] or not counts[worst]:
        return "there are no events of layers that keep the whole prefix"
    if worst == "other_block_size":
        return f"its blocks are not of {block_size} tokens, which is what the router takes them for"
    remedy = "name its replay endpoint, too" if address.replay is None else "let it keep more (buffer_steps)"
    return f"events hang on blocks that were stored before we came, or that we missed; {remedy}"
