"""KubernetesApi: reads lists and watches of objects from the API server of a cluster.

Inside a cluster the service account of the pod is used (its token is read again when it rotates), elsewhere the
kubeconfig. Objects are returned as JSON; kubernetes_asyncio does configuration, credentials and TLS.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.kubernetes.kubernetes_objects import Status

CONNECT_SECONDS = 10.0
LIST_SECONDS = 30.0  # for one page of a list
SLACK_SECONDS = 10.0  # by which a watch may outlast its timeout
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
MAX_ERROR = 65_536  # bytes of an error that are read

Query = dict[str, str]


class ApiError(Exception):
    """A request to the API server that was not answered with objects. `status` 0: there was no answer at all."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KubernetesApi:
    """A connection to the API server of a cluster. Close it at the end."""

    def __init__(self, client: Any, namespace: str, reload: Callable[[], Awaitable[None]] | None = None) -> None:
        """`client` is an ApiClient of kubernetes_asyncio, `namespace` the one of the pod or of the kubeconfig.

        `reload` reads the credentials again, after the server refused them.
        """
        self._client = client
        self.namespace = namespace
        self._reload = reload

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def list_page(self, path: str, query: Query) -> bytes:
        """Return one page of a list as JSON. Raises ApiError."""
        async with self._answer(path, query, aiohttp.ClientTimeout(total=LIST_SECONDS)) as response:
            return await response.read()

    async def watch(self, path: str, query: Query, seconds: int) -> AsyncGenerator[bytes]:
        """Yield the complete lines of a watch that the server ends after `seconds`. Raises ApiError.

        A line that the end of the connection cuts off is dropped.
        """
        timeout = aiohttp.ClientTimeout(
            sock_connect=CONNECT_SECONDS, sock_read=seconds + SLACK_SECONDS, total=seconds + 2 * SLACK_SECONDS
        )
        query = {**query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        async with self._answer(path, query, timeout) as response:
            while (line := await response.content.readline()).endswith(b"\n"):
                yield line

    @asynccontextmanager
    async def _answer(
        self, path: str, query: Query, timeout: aiohttp.ClientTimeout
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a GET and yield an answer of status 200; errors on the way, also later, become ApiError."""
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._client.call_api(
                path,
                "GET",
                query_params=list(query.items()),
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=timeout,
            )
            assert response is not None
            if response.status == 401 and self._reload is not None:
                await self._reload()
            if response.status != 200:
                raise _refusal(response.status, await response.content.read(MAX_ERROR))
            yield response
        except TimeoutError as error:
            raise ApiError(0, "the API server does not answer") from error
        except (HttpProcessingError, ValueError) as error:
            raise ApiError(500, f"the API server's answer cannot be read ({str(error)[:200]})") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, f"no connection to the API server ({error or type(error).__name__})") from error
        finally:
            if response is not None:
                response.close()


async def connect(kubeconfig: Path | None = None) -> KubernetesApi:
    """Return a connection to the cluster of `kubeconfig`; None: of this pod, else of the user's kubeconfig.

    Raises ConfigError if there is no cluster, or if kubernetes_asyncio is not installed.
    """
    try:
        from kubernetes_asyncio import client, config
    except ImportError:
        raise ConfigError(
            "discovery from Kubernetes needs kubernetes_asyncio; install it: pip install 'headstart[kubernetes]'"
        ) from None
    settings = client.Configuration()
    if kubeconfig is None:
        with suppress(config.ConfigException):  # not in a pod
            config.load_incluster_config(client_configuration=settings)
            return KubernetesApi(client.ApiClient(settings), _namespace_of_pod())

    async def load() -> Any:
        path = None if kubeconfig is None else str(kubeconfig)
        try:
            return await config.load_kube_config(config_file=path, client_configuration=settings, persist_config=False)
        except Exception as error:  # of many types: YAML, missing keys, plugins for credentials
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ConfigError(
                f"no Kubernetes cluster: {reason}; run in a pod with a service account, or set KUBECONFIG"
            ) from None

    async def reload() -> None:
        with suppress(ConfigError):  # a kubeconfig that is being written; the next refusal reads it again
            await load()

    context = ((await load()).current_context or {}).get("context") or {}
    return KubernetesApi(client.ApiClient(settings), str(context.get("namespace") or "default"), reload)


def _namespace_of_pod() -> str:
    try:
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"


def _refusal(status: int, body: bytes) -> ApiError:
    """Return the error of an answer other than 200; the server's own message names the user, verb and resource."""
    try:
        message = msgspec.json.decode(body, type=Status).message
    except msgspec.DecodeError:
        message = ""
    return ApiError(status, f"the API server answers {status}" + (f": {message[:500]}" if message else ""))
