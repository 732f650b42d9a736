"""RedisNodes: the servers behind a URL, one or the primary nodes of a cluster, and which of them has a key.

redis-py knows the cluster: it learns which node has which slots from any node, and follows a redirection. Commands are
sent here node by node, since its own pipeline repeats each of hundreds of them on its own when a node does not answer.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import parse_url
from redis.exceptions import AskError, MovedError, TryAgainError
from redis.retry import Retry

from headstart.core.errors import ConfigError
from headstart.store.tiers.tier import CLUSTER, parse_node_urls

REDIRECTIONS = (MovedError, AskError, TryAgainError)


class RedisNodes:
    """Clients of these servers by name, for one thread. In a cluster all but `close` may wait for answers of nodes."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        """`options`: of connections. Connects to nothing. Raises ConfigError for an invalid URL."""
        self.is_cluster = url.partition("://")[0].endswith(CLUSTER)
        self._urls, self._options = parse_node_urls(url), options
        self._cluster: Any = None  # until it is known
        self._is_stale = False  # what is known of it
        try:
            self._places = [parse_url(one) for one in self._urls]
            pool: redis.ConnectionPool = redis.ConnectionPool.from_url(
                self._urls[0], retry=Retry(NoBackoff(), 0), **options
            )
        except ValueError as error:
            raise ConfigError(f"--kv-store {url}: {error}") from error
        self._single = {"": redis.Redis(connection_pool=pool)}

    @property
    def has_current_topology(self) -> bool:
        """Return whether the functions below need no answer."""
        return not self.is_cluster or (self._cluster is not None and not self._is_stale)

    def primary_clients(self) -> dict[str, redis.Redis]:
        """Return the server, or the primary nodes."""
        if not self.is_cluster:
            return self._single
        cluster = self._known()
        return {node.name: cluster.get_redis_connection(node) for node in cluster.get_primaries()}

    def key_indices_by_server(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        """Return which of these keys each server has, by their index; the server of the last key is the last."""
        if not self.is_cluster:
            return {"": list(range(len(keys)))}
        cluster, found = self._known(), dict[str, list[int]]()
        for place, key in enumerate(keys):
            found.setdefault(cluster.get_node_from_key(key).name, []).append(place)
        if keys:
            last = cluster.get_node_from_key(keys[-1]).name
            found[last] = found.pop(last)
        return found

    def execute_following_redirects(self, command: Sequence[Any]) -> Any:
        """Return the answer to a command that its server does not answer, since the key moves or has moved."""
        return self._cluster.execute_command(*command)

    def mark_topology_stale(self) -> None:
        """Learn the nodes anew before the next command: one of them failed."""
        self._is_stale = True

    def disconnect(self) -> None:
        """Close all connections, also from another thread in the middle of a call."""
        for server in [*self._single.values(), *self._clients()]:
            server.connection_pool.disconnect()

    def _clients(self) -> list[redis.Redis]:
        nodes = [] if self._cluster is None else self._cluster.get_nodes()
        return [node.redis_connection for node in nodes if node.redis_connection is not None]

    def _known(self) -> Any:
        """Return the cluster as it is."""
        if self._cluster is not None and self._is_stale:
            old, self._cluster = self._cluster, None  # if no node that was known answers, those of the URL are asked
            with suppress(redis.RedisError, OSError):
                old.nodes_manager.initialize()
                self._cluster = old
        if self._cluster is None:
            others = [ClusterNode(place["host"], place.get("port", 6379)) for place in self._places[1:]]
            retry = Retry(NoBackoff(), 1)  # it asks one node for its commands, which may be down
            self._cluster = redis.RedisCluster(
                url=self._urls[0], startup_nodes=others, require_full_coverage=False, retry=retry, **self._options
            )
        self._is_stale = False
        return self._cluster
