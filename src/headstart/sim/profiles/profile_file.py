"""Profiles by name or file: the reference, datasheet profiles, and files that `simulate calibrate` writes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from headstart.core.errors import ConfigError
from headstart.core.sched.step_time import MaxStepTime
from headstart.sim.profile import REFERENCE, SERIAL, Profile
from headstart.sim.profiles.datasheet import datasheet_profile
from headstart.sim.sim_store import Offload
from headstart.sim.step_cost import PaddedCost, RooflineCost, StepCost, SumCost, SuperlinearCost

SHAPES: dict[str, type[SumCost | RooflineCost | PaddedCost | SuperlinearCost]] = {
    "sum": SumCost,
    "roofline": RooflineCost,
    "padded": PaddedCost,
    "superlinear": SuperlinearCost,
}
"""Step costs by the name of their shape."""
NAMED = {"reference": REFERENCE, "serial": SERIAL}


def load_profile(name: str) -> Profile:
    """Return a profile by name (reference, serial, MODEL@GPU) or from a .json file.

    `NAME+padded`, `NAME+superlinear` and `NAME+roofline` are the same profile with another shape of step cost. Raises
    ConfigError.
    """
    plain, _, shape = name.partition("+")
    found = read_profile(Path(plain)) if plain.endswith(".json") else NAMED.get(plain) or datasheet_profile(plain)
    return replace(found, name=name, cost=_shaped(found.cost, shape)) if shape else found


def read_profile(path: Path) -> Profile:
    """Return the profile of a file. Raises ConfigError."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"profile {path}: {error}") from error
    try:
        _check_finite(document)
        values = dict(document)
        values["cost"] = _cost(values["cost"])
        if values.get("offload") is not None:
            values["offload"] = Offload(**values["offload"])
        if values.get("step_bound") is not None:
            values["step_bound"] = MaxStepTime(**values["step_bound"])
        values = {field.name: values[field.name] for field in fields(Profile) if field.name in values}
        unknown = [name for name in document if name not in values and name != "error"]
        if unknown:
            raise ConfigError(f"there is no field {unknown[0]!r}")
        found = Profile(**values)
        found.scheduler_config()  # checks its limits
        return found
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"profile {path}: {error}") from error


def write_profile(profile: Profile, path: Path, error: Mapping[str, float]) -> None:
    """Write a profile and the `error` of its fit."""
    document = asdict(profile)
    document["cost"] = _document(profile.cost)
    path.write_text(json.dumps({**document, "error": dict(error)}, indent=2) + "\n", encoding="utf-8")


def _check_finite(value: Any) -> None:
    """Raise ValueError if there is a NaN or an infinite number anywhere."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inner:
        _check_finite(one)
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"there is the number {value}")


def _cost(row: Any) -> Any:
    """Return a step cost from its shape and parts."""
    row = dict(row)
    shape = row.pop("shape", None)
    if shape not in SHAPES:
        raise ConfigError(f"cost: shape is {shape!r}; there are {', '.join(SHAPES)}")
    if "inner" in row:
        row["inner"] = _cost(row["inner"])
    return SHAPES[shape](**row)


def _document(cost: StepCost) -> dict[str, Any]:
    shape = next(name for name, kind in SHAPES.items() if isinstance(cost, kind))
    row = {field.name: getattr(cost, field.name) for field in fields(SHAPES[shape])}
    if "inner" in row:
        row["inner"] = _document(row["inner"])
    return {"shape": shape, **row}


def _shaped(cost: StepCost, shape: str) -> StepCost:
    """Return a step cost of about the same size in another shape."""
    if not isinstance(cost, SumCost | RooflineCost):
        raise ConfigError(f"+{shape}: the profile has that form already, or another; use it as it is")
    if shape == "padded":
        return PaddedCost(cost)
    if shape == "superlinear":
        return SuperlinearCost(cost)
    if shape == "roofline" and isinstance(cost, SumCost):
        return RooflineCost(0.0, cost.step, cost.token, cost.pair, cost.resident, cost.stream)
    raise ConfigError(f"there is no shape {shape!r} for this profile; there are padded, roofline, superlinear")
