"""FleetScenario: events of a simulated fleet while it runs: failures, changes of speed, autoscaling, an offload tier.

A scenario is a TOML or JSON file:

    [[event]]                    # any number of them
    at = 60.0                    # seconds
    kind = "slow"                # stop, restart, drain, add, flush, slow, jump
    replica = "r1"               # or a list of names, or "*"
    factor = 3.0                 # slow: times the duration of a step; 1 is normal

    [[event]]
    at = 0.0
    kind = "jump"                # changes the factor again and again
    replica = "*"
    factors = [1.0, 2.0]         # replica i begins with the i-th
    every = 30.0                 # seconds

    [autoscale]
    min = 4
    max = 16
    high = 24.0                  # requests in flight per replica: add one above, drain one below `low`
    low = 6.0
    interval = 15.0              # seconds
    startup = 60.0               # seconds until a new replica serves

    [offload]
    blocks = 20000               # per replica
    tokens_per_s = 200000.0      # of loads
    latency = 0.005              # seconds per load
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from headstart.core.errors import ConfigError
from headstart.sim.sim_fleet import VirtualFleet
from headstart.sim.sim_replica import SimReplica
from headstart.sim.sim_store import OffloadTier

KINDS = ("stop", "restart", "drain", "add", "flush", "slow", "jump")
ALL = "*"
MakeReplica = Callable[[str, float], SimReplica]
"""Map (name, present time) to a new replica."""


@dataclass(frozen=True, slots=True)
class ScenarioEvent:
    """One event. `replicas` are names; "*" is every replica at that time. `add` needs none: names follow."""

    at: float
    kind: str
    replicas: tuple[str, ...] = (ALL,)
    factor: float = 1.0
    factors: tuple[float, ...] = ()
    every: float = 0.0


@dataclass(frozen=True, slots=True)
class AutoscalerSettings:
    """Bounds and thresholds of an autoscaler, which looks at the mean number of requests in flight per replica."""

    min: int
    max: int
    high: float
    low: float
    interval: float = 15.0
    startup: float = 60.0


@dataclass(frozen=True, slots=True)
class FleetScenario:
    """All events of one run."""

    events: tuple[ScenarioEvent, ...] = ()
    autoscale: AutoscalerSettings | None = None
    offload: OffloadTier | None = None


MAX_NUMBER = 1e12
PERIODS, MIN_PERIOD = ("every", "interval"), 0.01  # seconds
MAX_REPLICAS = 4096
NOTHING_HAPPENS = FleetScenario()


def read_scenario(path: Path) -> FleetScenario:
    """Return the scenario of a file. Raises ConfigError, which names the entry and the field."""
    try:
        text = path.read_text(encoding="utf-8")
        document: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--scenario {path}: {error}") from error
    try:
        return parse_scenario(document)
    except ConfigError as error:
        raise ConfigError(f"--scenario {path}: {error}") from None


def parse_scenario(document: Any) -> FleetScenario:
    """Return the scenario of a parsed document. Raises ConfigError."""
    if not isinstance(document, Mapping):
        raise ConfigError("a scenario is a table")
    _known("the scenario", document, ("event", "autoscale", "offload"))
    rows = document.get("event", [])
    if not isinstance(rows, list):
        raise ConfigError("event is a list of tables: write [[event]]")
    events = tuple(_event(f"event {number}", row) for number, row in enumerate(rows, 1))
    autoscale, offload = document.get("autoscale"), document.get("offload")
    return FleetScenario(
        events,
        None if autoscale is None else _autoscale(_table("autoscale", autoscale)),
        None if offload is None else _offload(_table("offload", offload)),
    )


def _event(where: str, row: Any) -> ScenarioEvent:
    row = _table(where, row)
    kind = row.get("kind")
    if kind not in KINDS:
        raise ConfigError(f"{where}: kind is {kind!r}; there are {', '.join(KINDS)}")
    extra = {"slow": ("factor",), "jump": ("factors", "every")}.get(kind, ())
    _known(where, row, ("at", "kind", "replica", *extra))
    missing = [name for name in ("at", *extra) if name not in row]
    if missing:
        raise ConfigError(f"{where}: a {kind} needs {missing[0]}")
    factors = row.get("factors", [])
    if not isinstance(factors, list) or (kind == "jump" and not factors):
        raise ConfigError(f"{where}: factors is {factors!r}; it must be a list of numbers")
    return ScenarioEvent(
        at=_number(where, "at", row["at"]),
        kind=kind,
        replicas=_names(where, row.get("replica", ALL)),
        factor=_number(where, "factor", row.get("factor", 1.0), positive=True),
        factors=tuple(_number(where, "factors", value, positive=True) for value in factors),
        every=_number(where, "every", row.get("every", 0.0), positive=kind == "jump"),
    )


def _autoscale(row: Mapping[str, Any]) -> AutoscalerSettings:
    names = [field.name for field in fields(AutoscalerSettings)]
    _known("autoscale", row, names)
    missing = [field.name for field in fields(AutoscalerSettings) if field.default is MISSING and field.name not in row]
    if missing:
        raise ConfigError(f"autoscale: {missing[0]} is missing")
    values = {name: _number("autoscale", name, row[name], positive=name != "low") for name in row}
    for name in ("min", "max"):
        if values[name] != int(values[name]):
            raise ConfigError(f"autoscale: {name} is {values[name]:g}; it must be a whole number")
    if not values["min"] <= values["max"] or not values["low"] < values["high"]:
        raise ConfigError("autoscale: min must not exceed max, and low must be less than high")
    return AutoscalerSettings(**{**values, "min": int(values["min"]), "max": int(values["max"])})  # type: ignore[arg-type]


def _offload(row: Mapping[str, Any]) -> OffloadTier:
    _known("offload", row, ("blocks", "tokens_per_s", "latency"))
    for name in ("blocks", "tokens_per_s"):
        if name not in row:
            raise ConfigError(f"offload: {name} is missing")
    return OffloadTier(
        int(_number("offload", "blocks", row["blocks"], positive=True)),
        _number("offload", "tokens_per_s", row["tokens_per_s"], positive=True),
        _number("offload", "latency", row.get("latency", 0.0)),
    )


def _table(where: str, row: Any) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is {row!r}; it must be a table")
    return row


def _known(where: str, row: Mapping[str, Any], names: "tuple[str, ...] | list[str]") -> None:
    unknown = [name for name in row if name not in names]
    if unknown:
        raise ConfigError(f"{where}: there is no field {unknown[0]!r}; there are {', '.join(names)}")


def _number(where: str, name: str, value: Any, *, positive: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        shown = f"{value!r}"[:60]
        raise ConfigError(f"{where}: {name} is {shown}; it must be a number between 0 and {MAX_NUMBER:g}")
    if name in PERIODS and 0 < value < MIN_PERIOD:
        raise ConfigError(f"{where}: {name} is {value:g}; at least {MIN_PERIOD:g} seconds, which take time to simulate")
    if name in ("min", "max") and value > MAX_REPLICAS:
        raise ConfigError(f"{where}: {name} is {value:g}; at most {MAX_REPLICAS} replicas")
    if positive and not value:
        raise ConfigError(f"{where}: {name} is {value!r}; it must be above 0")
    return float(value)


def _names(where: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: replica is {value!r}; it must be a name, a list of names, or {ALL!r}")
    return tuple(names)


class ScenarioEventRunner:
    """The events of one run. `make` makes replicas that join later."""

    def __init__(self, scenario: FleetScenario, fleet: VirtualFleet, make: MakeReplica) -> None:
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

    def _check_names(self, scenario: FleetScenario) -> None:
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

    def _apply(self, event: ScenarioEvent, now: float) -> None:
        if event.kind == "add":
            self._join(now)
            return
        fleet = self.fleet
        names = list(fleet.replicas) if ALL in event.replicas else [n for n in event.replicas if n in fleet.replicas]
        for index, name in enumerate(names):
            replica = fleet.replicas[name]
            if event.kind == "stop" and replica.is_up:
                fleet.stop_replica(name, now)
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

    def _jump(self, replica: SimReplica, event: ScenarioEvent, turn: int, now: float) -> None:
        replica.speed.factor = event.factors[turn % len(event.factors)]
        self.fleet.at(now + event.every, lambda then: self._jump(replica, event, turn + 1, then))

    def _join(self, now: float) -> None:
        self.fleet.add(self._make(f"r{next(self._numbers)}", now))

    def _started(self, now: float) -> None:
        self._num_starting -= 1
        self._join(now)

    def _autoscale(self, now: float) -> None:
        """Add or drain one replica by the load, and remove drained ones that are idle."""
        scale: AutoscalerSettings = self._scale
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
