"""The Serve application: options by name, CPUs of a replica, and the keys between router and servers."""

from typing import Any

import pytest

from headstart.config.options import RouterOptions, ServerOptions, TenantEntry
from headstart.core.errors import ConfigError
from headstart.gateway.ray.ray_application import build, cpus_per_replica, options_with_replica_key


@pytest.mark.parametrize(
    ("nodes", "replicas", "cpus"),
    [([16, 16, 8], 2, 16), ([16, 16, 8], 3, 8), ([16, 16], 5, 5), ([2], 1, 2), ([1, 1], 3, 1), ([], 2, 1), ([0], 1, 1)],
)
def test_replicas_are_as_large_as_all_of_them_can_be_placed(nodes: list[int], replicas: int, cpus: int) -> None:
    assert cpus_per_replica(nodes, replicas) == cpus


def test_servers_check_the_clients_keys_or_one_that_only_the_router_has() -> None:
    tenants = (TenantEntry("red", ("r",)),)
    for keyed in (ServerOptions(api_key=("k",)), ServerOptions(tenants=tenants)):
        assert options_with_replica_key(keyed, RouterOptions()) == (keyed, RouterOptions())
    open_server = ServerOptions(admin_api_key=("boss",))
    server, router = options_with_replica_key(open_server, RouterOptions())
    other, _ = options_with_replica_key(open_server, RouterOptions())
    assert server.api_key and server.api_key != other.api_key
    assert server.admin_api_key == ("boss", router.replica_api_key)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"replica": 1, "nowhere": 2}, "unknown option 'nowhere'"),
        ({"replicas": "many"}, "replicas"),
        ({"replicas": 0}, "replicas is 0"),
        ({"kv_events_config": '{"enable_kv_cache_events": true}'}, "names one endpoint"),
        ({"envoy": "auto"}, "Envoy is not used"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(args)


def test_options_by_name_reach_the_deployments() -> None:
    app: Any = build({"replicas": 1, "max-replicas": 3, "num_blocks": 64, "threads": 2, "downscale_delay": 5})
    ingress = app._bound_deployment
    replica = ingress.init_args[2]._bound_deployment
    assert ingress.init_args[0].replica_api_key
    [settings] = replica.init_args
    assert (settings.engine.num_gpu_blocks_override, settings.cpus) == (64, 2)
    assert replica.ray_actor_options["num_cpus"] == 2
    scaling = replica._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.downscale_delay_s) == (1, 3, 5.0)
