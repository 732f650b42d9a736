"""serve_on_ray: the Serve application from a command: joins a Ray cluster or starts one, and stops what it started."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import ray
from ray import serve
from ray.exceptions import AuthenticationError
from ray.serve.config import ProxyLocation

from headstart import __version__
from headstart.config.options import EngineOptions, RouterOptions, ServerOptions
from headstart.core.errors import ConfigError
from headstart.gateway.http_front import local_client_url
from headstart.gateway.ray.ray_application import application
from headstart.http.lifecycle import EXIT_BROKEN, EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_OK, open_listener
from headstart.http.logs import ServerLog

NAME = "headstart"  # of the application
DASHBOARD_HOST = "127.0.0.1"


def serve_on_ray(engine: EngineOptions, server: ServerOptions, router: RouterOptions, *, address: str | None) -> int:
    """Serve on the Ray cluster at `address`, or on one started here, until SIGTERM or Ctrl-C; return the exit code.

    Then the application is removed, after its requests have ended. A Ray that was started here is stopped; one that was
    joined stays. 0: stopped as requested. 130: stopped while it started. 1: Ray could not start the application. 2: the
    options cannot work.
    """
    log = ServerLog()
    try:
        port = _free_port(server)
        with _connected(address), _interruptible() as stopped:
            where = f"the Ray cluster at {address}" if address else "a Ray started here"
            serve.start(proxy_location=ProxyLocation.HeadOnly, http_options={"host": server.host, "port": port})
            log.write_line(f"headstart: starting {router.replicas} replicas on {where}")
            try:
                serve.run(application(engine, server, router), name=NAME, route_prefix="/")
                url = local_client_url(server.host, port)
                log.write_line(_banner(url, where, router))
                stopped.wait()
                log.write_line("headstart: removing the application; requests under way may finish")
            finally:
                serve.delete(NAME)
    except ConfigError as error:
        log.write_line(f"headstart: {error}")
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except AuthenticationError:
        log.write_line(
            f"headstart: the Ray cluster at {address} wants its token: RAY_AUTH_MODE=token, see docs/deploy/ray.md"
        )
        return EXIT_CONFIG
    except ConnectionError as error:
        log.write_line(f"headstart: no Ray cluster at {address}: {error}")
        return EXIT_CONFIG
    except RuntimeError as error:  # of serve.run: a replica that cannot start, with its message
        log.write_line(f"headstart: Ray could not start the application: {error}")
        return EXIT_BROKEN
    return EXIT_OK


@contextmanager
def _connected(address: str | None) -> Generator[None]:
    """Connect to a cluster, or start one whose dashboard is reachable from this machine only."""
    if address:
        ray.init(address=address, log_to_driver=True)
    else:
        ray.init(address="local", include_dashboard=True, dashboard_host=DASHBOARD_HOST)
    try:
        yield
        if not address:
            serve.shutdown()
    finally:
        ray.shutdown()


class _Stop:
    """SIGTERM and Ctrl-C: they interrupt a start, and end the wait behind it."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._waits = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self._stopped.set()
        if not self._waits:
            raise KeyboardInterrupt

    def wait(self) -> None:
        """Wait for a signal."""
        self._waits = True
        self._stopped.wait()


@contextmanager
def _interruptible() -> Generator[_Stop]:
    """Handle the signals of this process; Ray has set handlers of its own."""
    stop = _Stop()
    before = {number: signal.signal(number, stop.receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port(server: ServerOptions) -> int:
    """Return the port to serve at. Raises ConfigError if it cannot be used."""
    with open_listener(server.host, server.port) as listener:
        return int(listener.getsockname()[1])


def _banner(url: str, where: str, router: RouterOptions) -> str:
    most = f" to {router.max_replicas}" if router.max_replicas else ""
    lines = [
        f"Headstart {__version__} routes to {router.replicas}{most} replicas on {where} at {url}/v1",
        f"  policy   {router.routing_policy}",
        f"  look     curl {url}/v1/fleet, or serve status",
    ]
    return "\n".join(lines)
