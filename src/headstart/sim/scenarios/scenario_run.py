"""ScenarioRun: applies the events of a scenario to a simulated fleet, and scales it."""

from collections.abc import Callable
from itertools import count

from headstart.core.errors import ConfigError
from headstart.sim.scenarios.scenario import ALL, Autoscale, Event, Scenario
from headstart.sim.sim_fleet import VirtualFleet
from headstart.sim.sim_replica import SimReplica

MakeReplica = Callable[[str, float], SimReplica]
"""Map (name, present time) to a new replica."""


class ScenarioRun:
    """The events of one run. `make` makes replicas that join later."""

    def __init__(self, scenario: Scenario, fleet: VirtualFleet, make: MakeReplica) -> None:
        """Schedule all events. Raises ConfigError for a replica that the fleet cannot have."""
        self.fleet = fleet
        self._make = make
        self._numbers = count(len(fleet.replicas))
        self._num_starting = 0
        self._check_names(scenario)
        for event in scenario.events:
            fleet.at(event.at, lambda now, event=event: self._apply(event, now))
        if scenario.autoscale is not None:
            self._scale = scenario.autoscale
            fleet.at(scenario.autoscale.interval, lambda now: self._autoscale(now))

    def _check_names(self, scenario: Scenario) -> None:
        """Refuse names that do not exist at the start and are not added later."""
        joining = sum(event.kind == "add" for event in scenario.events)
        if scenario.autoscale is not None:
            joining += 1_000_000
        last = len(self.fleet.replicas) + joining
        for number, event in enumerate(scenario.events, 1):
            for name in event.replicas:
                index = name[1:]
                if name != ALL and not (name.startswith("r") and index.isdecimal() and int(index) < last):
                    raise ConfigError(f"event {number}: there is no replica {name!r}; they are r0 to r{last - 1}")

    def _apply(self, event: Event, now: float) -> None:
        if event.kind == "add":
            self._join(now)
            return
        fleet = self.fleet
        names = list(fleet.replicas) if ALL in event.replicas else [n for n in event.replicas if n in fleet.replicas]
        for index, name in enumerate(names):
            replica = fleet.replicas[name]
            if event.kind == "stop" and replica.is_up:
                fleet.stop(name, now)
            elif event.kind == "restart":
                fleet.restart(name, now)
            elif event.kind == "drain":
                fleet.drain(name)
            elif event.kind == "flush":
                replica.flush()
            elif event.kind == "slow":
                replica.speed.factor = event.factor
            elif event.kind == "jump":
                self._jump(replica, event, index, now)

    def _jump(self, replica: SimReplica, event: Event, turn: int, now: float) -> None:
        replica.speed.factor = event.factors[turn % len(event.factors)]
        self.fleet.at(now + event.every, lambda then: self._jump(replica, event, turn + 1, then))

    def _join(self, now: float) -> None:
        self.fleet.add(self._make(f"r{next(self._numbers)}", now))

    def _started(self, now: float) -> None:
        self._num_starting -= 1
        self._join(now)

    def _autoscale(self, now: float) -> None:
        """Add or drain one replica by the load, and remove drained ones that are idle."""
        scale: Autoscale = self._scale
        active = [one for one in self.fleet.replicas.values() if one.is_up and not one.is_draining]
        for replica in self.fleet.replicas.values():
            if replica.is_up and replica.is_draining and not replica.num_requests:
                self.fleet.remove(replica.name, now)
        load = sum(replica.num_requests for replica in active) / max(len(active), 1)
        if len(active) + self._num_starting < scale.max and (load > scale.high or len(active) < scale.min):
            self._num_starting += 1
            self.fleet.at(now + scale.startup, self._started)
        elif load < scale.low and len(active) > scale.min and not self._num_starting:
            self.fleet.drain(min(active, key=lambda replica: replica.num_requests).name)
        self.fleet.at(now + scale.interval, self._autoscale)
