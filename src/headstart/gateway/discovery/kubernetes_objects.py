"""Kubernetes objects as far as discovery reads them, and the addresses of replicas that they contain.

Readiness is not read: the router probes /health of each replica itself, more often than a kubelet does, and a replica
that is removed from the list loses its prefix index. Listed is every pod that has an address and is not terminating.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import Raw, Struct, field

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.discovery import DiscoveredReplicas, replicas_at_endpoints

GONE_PHASES = ("Succeeded", "Failed")  # of pods whose containers have ended and are not started again
ADDRESS_TYPES = ("IPv4", "IPv6")  # of endpoint slices that are read, preferred first
EXAMPLE = "kubernetes:inferencepool/NAME, or kubernetes:service/NAMESPACE/NAME:PORT"
KINDS = ("inferencepool", "service")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")  # DNS subdomain, RFC 1123


@dataclass(frozen=True, slots=True)
class KubernetesTarget:
    """The object that selects the replicas. `namespace` None: that of the pod, or of the kubeconfig."""

    kind: str  # one of KINDS
    name: str
    namespace: str | None = None
    port: str = ""  # of a Service: the name or number of a port of its endpoints; empty: the only one

    def __str__(self) -> str:
        """Return the target as it is written in an option."""
        namespace = f"{self.namespace}/" if self.namespace else ""
        return f"kubernetes:{self.kind}/{namespace}{self.name}" + (f":{self.port}" if self.port else "")


def parse_target(text: str) -> KubernetesTarget:
    """Parse `KIND/[NAMESPACE/]NAME[:PORT]`. Raises ConfigError."""
    path, colon, port = text.partition(":")
    kind, *names = path.split("/")
    words = [*names, port] if colon else names
    is_known = kind in KINDS and len(names) in (1, 2) and (kind == "service" or not colon)
    if not is_known or not all(_NAME.fullmatch(word) for word in words):
        raise ConfigError(f"discover is {f'kubernetes:{text}'!r}; write it like {EXAMPLE}")
    return KubernetesTarget(kind, names[-1], names[0] if len(names) == 2 else None, port)


class Metadata(Struct, frozen=True, rename="camel"):
    """The metadata of an object or of a list."""

    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    continuation: str = field(default="", name="continue")


class ListPage(Struct, frozen=True):
    """One page of a list."""

    metadata: Metadata = Metadata()
    items: list[Raw] = []


class WatchEvent(Struct, frozen=True):
    """One line of a watch."""

    type: str
    object: Raw


class ApiStatus(Struct, frozen=True):
    """An error of the API server."""

    code: int = 0
    reason: str = ""
    message: str = ""


class Bookmark(Struct, frozen=True):
    """An object of which only the resource version counts."""

    metadata: Metadata


class PodStatus(Struct, frozen=True):
    """The status of a pod."""

    phase: str = ""
    pod_ip: str = field(default="", name="podIP")


class Pod(Struct, frozen=True):
    """A pod."""

    metadata: Metadata
    status: PodStatus = PodStatus()


class TargetPort(Struct, frozen=True):
    """A port of an InferencePool's pods."""

    number: int


class LabelSelector(Struct, frozen=True, rename="camel"):
    """The labels of an InferencePool's pods."""

    match_labels: dict[str, str] = {}


class InferencePoolSpec(Struct, frozen=True, rename="camel"):
    """The specification of an InferencePool."""

    selector: LabelSelector
    target_ports: list[TargetPort]


class InferencePool(Struct, frozen=True):
    """An InferencePool of the Gateway API inference extension, version v1."""

    metadata: Metadata
    spec: InferencePoolSpec

    @property
    def label_selector_param(self) -> str:
        """The selector of its pods as a query parameter."""
        return ",".join(f"{key}={value}" for key, value in sorted(self.spec.selector.match_labels.items()))


class SliceConditions(Struct, frozen=True):
    """The conditions of an endpoint; None: unknown."""

    terminating: bool | None = None


class TargetRef(Struct, frozen=True):
    """The object behind an endpoint."""

    kind: str = ""
    name: str = ""


class SliceEndpoint(Struct, frozen=True, rename="camel"):
    """An endpoint of a slice. All its addresses are of one pod."""

    addresses: list[str] = []
    conditions: SliceConditions = SliceConditions()
    target_ref: TargetRef | None = None


class SlicePort(Struct, frozen=True):
    """A port of a slice's endpoints."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(Struct, frozen=True, rename="camel"):
    """A part of the endpoints of a Service."""

    metadata: Metadata
    address_type: str = ""
    endpoints: list[SliceEndpoint] | None = None
    ports: list[SlicePort] | None = None


def replicas_of_pool(pool: InferencePool, pods: Iterable[Pod], *, allow_loopback: bool = False) -> DiscoveredReplicas:
    """Return a replica for each target port of each pod that has an address and is not terminating."""
    hosts = [host for pod in pods if _is_listed(pod) and (host := url_host(pod.status.pod_ip)) is not None]
    ports = dict.fromkeys(port.number for port in pool.spec.target_ports)
    return replicas_at_endpoints([(host, port) for host in hosts for port in ports], allow_loopback=allow_loopback)


def replicas_of_slices(
    slices: Iterable[EndpointSlice], port: str, *, allow_loopback: bool = False
) -> DiscoveredReplicas:
    """Return a replica for each endpoint that is not terminating.

    `port` is the name or number of one of the slices' ports; empty: their only one. Slices without it list nothing. A
    pod with addresses of both families is listed once, by its IPv4 address.
    """
    slices = tuple(slices)
    if not port and len(port_names(slices)) > 1:
        return DiscoveredReplicas()
    found: dict[tuple[str, str], tuple[str, int]] = {}
    for part in sorted(slices, key=lambda part: (_rank(part.address_type), part.metadata.name)):
        number = _port_of(part, port)
        for endpoint in part.endpoints or ():
            host = url_host(endpoint.addresses[0]) if endpoint.addresses else None
            if number is None or host is None or endpoint.conditions.terminating or part.address_type == "FQDN":
                continue
            target = endpoint.target_ref or TargetRef(name=host)
            found.setdefault((target.kind, target.name), (host, number))
    return replicas_at_endpoints(found.values(), allow_loopback=allow_loopback)


def port_names(slices: Iterable[EndpointSlice]) -> list[str]:
    """Return the ports of the slices as they may be named: by name, else by number."""
    ports = [port for part in slices for port in part.ports or ()]
    return sorted({port.name or str(port.port) for port in ports if port.port is not None})


def url_host(address: str) -> str | None:
    """Return an IP address as the host of a URL; None for anything else."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address):
        return None if parsed.scope_id else f"[{parsed}]"
    return str(parsed)


def _is_listed(pod: Pod) -> bool:
    is_ending = pod.metadata.deletion_timestamp is not None or pod.status.phase in GONE_PHASES
    return bool(pod.status.pod_ip) and not is_ending


def _port_of(part: EndpointSlice, wanted: str) -> int | None:
    ports = [port for port in part.ports or () if port.port is not None]
    if wanted:
        ports = [port for port in ports if wanted in (port.name, str(port.port))]
    return ports[0].port if len(ports) == 1 else None


def _rank(address_type: str) -> int:
    return ADDRESS_TYPES.index(address_type) if address_type in ADDRESS_TYPES else len(ADDRESS_TYPES)
