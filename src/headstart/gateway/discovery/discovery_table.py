"""make_discovery: the Discovery for a value of --discover."""

from pathlib import Path

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.discovery import Discovery
from headstart.gateway.discovery.dns_discovery import DnsDiscovery
from headstart.gateway.discovery.file_discovery import FileDiscovery
from headstart.gateway.discovery.kubernetes.kubernetes_discovery import KubernetesDiscovery
from headstart.gateway.discovery.kubernetes.kubernetes_target import parse_target

_EXAMPLE = "file:replicas.txt, dns:replicas.default.svc:8000, or kubernetes:inferencepool/NAME"


def make_discovery(text: str, *, allow_loopback: bool = False) -> Discovery:
    """Return the discovery for `file:PATH`, `dns:NAME:PORT` or `kubernetes:TARGET`. Raises ConfigError for others.

    `allow_loopback`: a cluster's and a name's endpoints may be at loopback addresses.
    """
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileDiscovery(Path(rest).expanduser())
    if kind == "kubernetes" and rest:
        return KubernetesDiscovery(parse_target(rest), allow_loopback=allow_loopback)
    name, colon, port = rest.rpartition(":")
    if kind == "dns" and colon and port.isascii() and port.isdigit():
        return DnsDiscovery(name.removeprefix("[").removesuffix("]"), int(port), allow_loopback=allow_loopback)
    raise ConfigError(f"discover is {text!r}; write it like {_EXAMPLE}")
