"""Data-parallel ranks: the engines of one server, each of which is a replica with a cache and a load of its own."""

from typing import Any

import pytest
from aiohttp import web
from gateway.harness import Replica, front, run

from headstart.core.errors import ConfigError
from headstart.gateway.replicas.probes import parse_metrics
from headstart.gateway.replicas.replica_address import RANK_HEADER, ReplicaAddress, parse_replica_address

PAGE = """vllm:num_requests_waiting{engine="0"} 3.0
vllm:num_requests_waiting{engine="1"} 1.0
vllm:num_requests_running{engine="0"} 5.0
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="200"} 1.0
"""


class TwoEngines(Replica):
    """A vLLM with two data-parallel ranks: each caches what was sent to it, and one server answers for both."""

    def __init__(self) -> None:
        super().__init__("m")
        self.ranks = 2
        self.seen: dict[str, list[str]] = {"0": [], "1": []}
        self.script = self._serve

    async def _serve(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        seen, prompt = self.seen[request.headers[RANK_HEADER]], body["prompt"]
        self.cached = len(prompt) - 1 if prompt in seen else 0
        seen.append(prompt)
        return None


def test_each_rank_is_a_replica_with_an_index_of_its_own() -> None:
    async def scenario() -> None:
        server = TwoEngines()
        async with front(server) as router:
            await router.up(2)
            names = [f"{server.url}#0", f"{server.url}#1"]
            endpoints = router.state.router.endpoints
            assert sorted(endpoints) == names
            prompts = [f"{number} " + "word " * 400 for number in range(20)]  # all to one rank: 2 in a million
            for _ in range(3):
                for prompt in prompts:
                    answer = await router.complete(prompt, headers={RANK_HEADER: "7"}, max_tokens=1)
                    assert answer.status_code == 200
            for rank, name in zip("01", names, strict=True):
                own = [prompt for prompt in prompts if prompt in server.seen[rank]]
                assert own and len(server.seen[rank]) == 3 * len(own), "a prompt comes back to its rank"
                assert len(endpoints[name].index) > 0
            assert set(server.seen["0"]).isdisjoint(server.seen["1"])
            assert router.state.server_urls_of_up_replicas == [server.url], (
                "administrators' requests are sent once to a server"
            )

    run(scenario())


def test_the_metrics_of_a_rank_are_those_of_its_engine() -> None:
    first, second, both = parse_metrics(PAGE, "0"), parse_metrics(PAGE, "1"), parse_metrics(PAGE)
    assert (first.waiting, first.running, first.kv_usage, first.num_blocks) == (3, 5, 0.0, 100)
    assert (second.waiting, second.running, second.kv_usage, second.num_blocks) == (1, 0, 0.5, 200)
    assert (both.waiting, both.running) == (4, 5)
    assert parse_metrics("sglang:num_queue_reqs 2.0\n", "1").waiting == 2, "a server that does not tell its ranks apart"


def test_an_address_with_ranks_stands_for_one_of_each() -> None:
    found = parse_replica_address("http://10.0.0.7:8000,ranks=2,events=tcp://10.0.0.7:5557,replay=tcp://10.0.0.7:5600")
    assert found.expand_ranks() == [
        ReplicaAddress("http://10.0.0.7:8000#0", "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5600"),
        ReplicaAddress("http://10.0.0.7:8000#1", "tcp://10.0.0.7:5558", "tcp://10.0.0.7:5601"),
    ]
    assert parse_replica_address("http://h:1").expand_ranks() == [ReplicaAddress("http://h:1")]
    for wrong in ("ranks=1", "ranks=0", "ranks=65", "ranks=x", "ranks=", "ranks=2,ranks=2", "ranks=2,events=ipc:///x"):
        with pytest.raises(ConfigError):
            parse_replica_address(f"http://h:1,{wrong}")
