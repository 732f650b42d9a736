"""make_discovery: the Discovery for a value of --discover."""

from pathlib import Path

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.discovery import Discovery
from headstart.gateway.discovery.dns_discovery import DnsDiscovery
from headstart.gateway.discovery.file_discovery import FileDiscovery

_EXAMPLE = "file:replicas.txt, or dns:replicas.default.svc:8000"


def make_discovery(text: str) -> Discovery:
    """Return the discovery for `file:PATH` or `dns:NAME:PORT`. Raises ConfigError for anything else."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileDiscovery(Path(rest).expanduser())
    name, colon, port = rest.rpartition(":")
    if kind == "dns" and colon and port.isascii() and port.isdigit():
        return DnsDiscovery(name.removeprefix("[").removesuffix("]"), int(port))
    raise ConfigError(f"discover is {text!r}; write it like {_EXAMPLE}")
