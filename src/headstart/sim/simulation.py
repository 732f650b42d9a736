"""Simulation: one run of a workload on a simulated fleet, from values alone; the same values give the same records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headstart.router.policies.policy import Policy
from headstart.router.policies.policy_table import make_policy
from headstart.router.router import Router
from headstart.sim.oracle_policy import ORACLE, OraclePolicy
from headstart.sim.profile import Profile
from headstart.sim.scenarios.scenario import NOTHING_HAPPENS, Scenario
from headstart.sim.scenarios.scenario_run import ScenarioRun
from headstart.sim.sim_fleet import DEFAULTS, FleetOptions, SimRecord, VirtualFleet, endpoint_of
from headstart.sim.sim_replica import SimReplica
from headstart.sim.sim_request import SimRequest

MakePolicy = Callable[[Mapping[str, SimReplica]], Policy]
"""Map the replicas of a fleet, by name, to a policy: one with exact knowledge reads their state."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The settings of one run. Replicas are named r0, r1, ...; requests go to the routers in turn."""

    profile: Profile
    replicas: int = 8
    policy: str = "cost"
    seed: int = 0
    routers: int = 1
    believed_blocks: int = 0  # size of the routers' indexes; 0: the true one
    scenario: Scenario = NOTHING_HAPPENS
    options: FleetOptions = DEFAULTS

    def build(self, make: MakePolicy | None = None) -> VirtualFleet:
        """Return a fleet with its events, ready to run. `make`: the policy of each router, instead of the named one.

        Raises ConfigError for an unknown policy or replica.
        """
        profile = self.profile
        if self.scenario.offload is not None:
            profile = replace(profile, offload=self.scenario.offload)

        def new_replica(name: str, now: float) -> SimReplica:
            return SimReplica(name, profile, seed=self.seed, now=now)

        found = [new_replica(f"r{index}", 0.0) for index in range(self.replicas)]
        routers: list[Router] = []
        fleet = VirtualFleet(found, routers, self.options)
        for _ in range(self.routers):
            router = Router((make or self._policy)(fleet.replicas))
            for one in found:
                router.add(endpoint_of(one, self.believed_blocks))
            routers.append(router)
        ScenarioRun(self.scenario, fleet, new_replica)
        return fleet

    def _policy(self, replicas: Mapping[str, SimReplica]) -> Policy:
        return OraclePolicy(replicas) if self.policy == ORACLE else make_policy(self.policy)

    def run(self, requests: Sequence[SimRequest], on_record: Callable[[SimRecord], None] | None = None) -> VirtualFleet:
        """Run the workload; return the fleet in its final state."""
        fleet = self.build()
        fleet.on_record = on_record
        fleet.run(requests)
        return fleet
