"""The policies by name, as used in options and explanations."""

from collections.abc import Callable

from headstart.core.errors import ConfigError
from headstart.router.policies.cost import CostPolicy
from headstart.router.policies.peers import DynamoPolicy, LlmdPolicy, RayPolicy, SmgPolicy, WorkPolicy
from headstart.router.policies.policy import Policy
from headstart.router.policies.simple import LeastLoadPolicy, PrefixThresholdPolicy, RoundRobinPolicy
from headstart.router.policies.weighted import WeightedPolicy

POLICIES: dict[str, Callable[[], Policy]] = {
    "cost": CostPolicy,
    "weighted": WeightedPolicy,
    "work": WorkPolicy,
    "llm-d": LlmdPolicy,
    "dynamo": DynamoPolicy,
    "smg": SmgPolicy,
    "ray": RayPolicy,
    "prefix-threshold": PrefixThresholdPolicy,
    "least-load": LeastLoadPolicy,
    "round-robin": RoundRobinPolicy,
}


def make_policy(name: str) -> Policy:
    """Return a new policy of that name with its default settings. Raises ConfigError."""
    if name not in POLICIES:
        raise ConfigError(f"there is no routing policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]()
