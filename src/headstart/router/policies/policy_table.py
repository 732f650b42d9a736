"""The policies by name, as used in options and explanations."""

from collections.abc import Callable
from importlib.metadata import entry_points

from headstart.core.errors import ConfigError
from headstart.router.policies.cost import LeastCostPolicy
from headstart.router.policies.policy import Policy
from headstart.router.policies.simple import (
    LeastLoadPolicy,
    LeastUncachedTokensPolicy,
    PrefixThresholdPolicy,
    RoundRobinPolicy,
)
from headstart.router.policies.weighted import WeightedPolicy

POLICIES: dict[str, Callable[[], Policy]] = {
    "cost": LeastCostPolicy,
    "weighted": WeightedPolicy,
    "work": LeastUncachedTokensPolicy,
    "prefix-threshold": PrefixThresholdPolicy,
    "least-load": LeastLoadPolicy,
    "round-robin": RoundRobinPolicy,
}
PEERS = ("llm-d", "dynamo", "smg", "ray", "lmetric", "dualmap")
"""Policies of other routers and of papers, from the entry points of the laboratory (headstart-lab)."""
GROUP = "headstart.policies"


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies that are installed."""
    return (*POLICIES, *(name for name in PEERS if entry_points(group=GROUP, name=name)))


def make_policy(name: str) -> Policy:
    """Return a new policy of that name with its default settings. Raises ConfigError."""
    if name in POLICIES:
        return POLICIES[name]()
    if name not in PEERS:
        raise ConfigError(f"there is no routing policy {name!r}; there are {', '.join((*POLICIES, *PEERS))}")
    for found in entry_points(group=GROUP, name=name):
        return found.load()()
    raise ConfigError(
        f"the routing policy {name} is part of Headstart's laboratory, which is not installed; in a checkout: "
        "pip install -e lab"
    )
