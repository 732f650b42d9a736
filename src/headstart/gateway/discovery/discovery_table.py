"""make_discovery: the Discovery for a value of --discover."""

from pathlib import Path

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.discovery import Discovery
from headstart.gateway.discovery.dns_discovery import DnsDiscovery
from headstart.gateway.discovery.file_discovery import FileDiscovery
from headstart.gateway.discovery.kubernetes.kubernetes_discovery import KubernetesDiscovery
from headstart.gateway.discovery.kubernetes.kubernetes_target import parse_target

_EXAMPLE = "file:replicas.txt, dns:replicas.default.svc:8000, or kubernetes:inferencepool/NAME"


def make_discovery(text: str) -> Discovery:
    """Return the discovery for `file:PATH`, `dns:NAME:PORT` or `kubernetes:TARGET`. Raises ConfigError for others."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileDiscovery(Path(rest).expanduser())
    if kind == "kubernetes" and rest:
        return KubernetesDiscovery(parse_target(rest))
    name, colon, port = rest.rpartition(":")
    if kind == "dns" and colon and port.isascii() and port.isdigit():
        return DnsDiscovery(name.removeprefix("[").removesuffix("]"), int(port))
    raise ConfigError(f"discover is {text!r}; write it like {_EXAMPLE}")
