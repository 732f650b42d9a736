"""KubernetesTarget: the object of a cluster that selects the replicas, as it is written in --discover."""

import re
from dataclasses import dataclass

from headstart.core.errors import ConfigError

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
