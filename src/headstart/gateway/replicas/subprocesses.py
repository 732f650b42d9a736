"""LocalReplicas: replicas on this machine as child processes: started, watched, restarted and ended.

A replica that ends is restarted after a delay, on another port. SIGHUP restarts all of them one by one, each new one
ready before the old one is asked to drain, or started after the old one has ended where a device has no room for both.
A child's stdin is a pipe that carries its options and then stays open as long as this process lives: so children detect
its end, whatever the cause.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.discovery import Changed
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.gateway.replicas.replica_child import ReplicaChild, ReplicaLaunch
from headstart.http.lifecycle import EXIT_CONFIG
from headstart.http.logs import ServerLog

FIRST_BACKOFF, MAX_BACKOFF = 1.0, 30.0  # seconds until a replica that ended is restarted
STEADY_SECONDS = 60.0  # a replica that ran this long starts with the first backoff again
OVERLAP_SECONDS = 1.0  # both the new and the old replica are listed: the router probes the new one first
GRACE_SECONDS = 20.0  # beyond the drain: for cut connections and pending store writes
REAP_SECONDS = 5.0  # until a killed process has ended


MakeLaunch = Callable[[str, int], ReplicaLaunch]
"""Makes the launch of a process from its name, unique among all that the fleet ever starts, and the number of its
replica: "r0-3", 0."""
_MAX_NAMES = 6


class StartupProgress:
    """A status line on a terminal, cleared at the end; elsewhere a log line for each change. For use in `with`."""

    def __init__(self, names: Sequence[str], log: ServerLog) -> None:
        self._states = dict.fromkeys(names, "waiting")
        self._log = log

    def __enter__(self) -> "StartupProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._log.show_status_line("")

    def record_process_started(self, name: str) -> None:
        """Record that this replica's process was started."""
        self._states[name] = "loading"
        self._report(f"replica {name} is loading")

    def record_outcome(self, name: str, *, is_ready: bool) -> None:
        """Record that this replica is ready, or that its process ended before it was."""
        self._states[name] = "ready" if is_ready else "ended"
        self._report(f"replica {name} is ready ({self._ready})" if is_ready else f"replica {name} ended while loading")

    @property
    def _ready(self) -> str:
        return f"{sum(state == 'ready' for state in self._states.values())} of {len(self._states)}"

    def _report(self, line: str) -> None:
        if not self._log.is_terminal:
            self._log.write_line(f"headstart: {line}")
            return
        loading = [name for name, state in self._states.items() if state == "loading"]
        more = ", ..." if len(loading) > _MAX_NAMES else ""
        shown = f", loading {', '.join(loading[:_MAX_NAMES])}{more}" if loading else ""
        self._log.show_status_line(f"starting replicas: {self._ready} ready{shown}")


class LocalReplicas:
    """A Discovery whose replicas run from `watch` to `close`. For use in a `with` statement.

    `about` is the banner's description of each. With `overlaps` a replica and its replacement may run at once. Nothing
    is started before `watch`. All methods except `close` belong to the event loop of `watch`, which must run in the
    main thread to receive SIGHUP.
    """

    def __init__(
        self,
        make_launch: MakeLaunch,
        replicas: int,
        *,
        about: str = "",
        drain_seconds: float,
        log: ServerLog | None = None,
        backoff: float = FIRST_BACKOFF,
        overlaps: bool = True,
    ) -> None:
        self._make_launch = make_launch
        self._overlaps = overlaps
        self._slots = [_Slot(number, backoff) for number in range(replicas)]
        self._about = about
        self._end_seconds = drain_seconds + GRACE_SECONDS
        self._log = log or ServerLog()
        self._children: list[ReplicaChild] = []  # all that may still run
        self._listed: tuple[ReplicaAddress, ...] | None = None
        self._num_started = 0

    def __enter__(self) -> "LocalReplicas":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def describe(self) -> str:
        count = len(self._slots)
        return f"{count} replica{'' if count == 1 else 's'} on this machine" + (self._about and f", {self._about}")

    @property
    def pids_by_url(self) -> dict[str, int]:
        """Process ids of the replicas that take requests now, by their URLs."""
        return {child.address.url: child.pid for child in self._children if child.address and child.accepts_requests}

    async def watch_replicas(self, changed: Changed) -> None:
        """As Discovery.watch_replicas. Raises ConfigError with a replica's message if it begins with exit code 2."""
        loop, sighup = asyncio.get_running_loop(), asyncio.Event()
        with suppress(RuntimeError, ValueError):  # not in the main thread: no SIGHUP is received
            loop.add_signal_handler(signal.SIGHUP, sighup.set)
        try:
            with StartupProgress([slot.name for slot in self._slots], self._log) as progress:
                for slots in (self._slots[:1], self._slots[1:]):  # the first alone: a configuration error occurs once
                    await self._start_together(slots, progress)
            self._report(changed)
            await asyncio.gather(
                self._roll(sighup, changed), *(self._restart_when_ended(slot, changed) for slot in self._slots)
            )
        finally:
            with suppress(RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGHUP)

    def close(self) -> None:
        """Terminate every replica gracefully, or at once after Ctrl-C. Calling it twice is harmless."""
        deadline = time.monotonic() + self._end_seconds
        try:
            for child in self._children:
                child.terminate()
            for child in self._children:
                child.join(max(deadline - time.monotonic(), 0.0))
        except KeyboardInterrupt:
            self._log.write_line("headstart: stopping at once")
        finally:
            self.kill_all()

    def kill_all(self) -> None:
        """Kill every replica."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.join(REAP_SECONDS)

    def _start(self, slot: "_Slot") -> ReplicaChild:
        self._num_started += 1
        launch = self._make_launch(f"{slot.name}-{self._num_started}", slot.number)
        self._children = [child for child in self._children if not child.over.is_set()]
        child = ReplicaChild(slot.name, launch, asyncio.get_running_loop(), self._log)
        self._children.append(child)
        return child

    async def _start_together(self, slots: Sequence["_Slot"], progress: StartupProgress) -> None:
        """Start processes and wait until each is ready or over. Raises ConfigError as `watch` does."""
        for slot in slots:
            slot.child = self._start(slot)
            progress.record_process_started(slot.name)

        async def settled(slot: "_Slot") -> None:
            await slot.child.settled.wait()
            progress.record_outcome(slot.name, is_ready=slot.child.address is not None)

        await asyncio.gather(*map(settled, slots))
        for slot in slots:
            if slot.child.exit_code == EXIT_CONFIG:
                raise ConfigError(slot.child.last_message)

    def _report(self, changed: Changed) -> None:
        """Report all replicas that take requests now, if they have changed."""
        found = tuple(child.address for child in self._children if child.address and child.accepts_requests)
        if found != self._listed:
            self._listed = found
            changed(found)

    async def _restart_when_ended(self, slot: "_Slot", changed: Changed) -> None:
        """Restart the replica whenever it has ended."""
        while True:
            child = slot.child
            await child.over.wait()
            self._report(changed)
            async with slot.lock:
                if slot.child is not child:  # it was replaced
                    continue
                delay = slot.next_delay(child)
                self._log.write_line(
                    f"headstart: replica {slot.name} {child.exit_description}; starting it again in {delay:g} s"
                )
                await asyncio.sleep(delay)
                slot.child = self._start(slot)
                await slot.child.settled.wait()
            self._report(changed)

    async def _roll(self, sighup: asyncio.Event, changed: Changed) -> None:
        """On SIGHUP, replace the replicas one by one, until one cannot be replaced."""
        while True:
            await sighup.wait()
            sighup.clear()
            self._log.write_line("headstart: SIGHUP: starting all replicas again, one by one")
            for slot in self._slots:
                if not slot.lock.locked() and not await self._replace(slot, changed):  # locked: it is restarting anyway
                    break
            else:
                self._log.write_line("headstart: all replicas were started again")

    async def _replace(self, slot: "_Slot", changed: Changed) -> bool:
        async with slot.lock:
            old = slot.child
            if not self._overlaps:
                await self._retire(old, changed)
            child = self._start(slot)
            await child.settled.wait()
            if child.address is None:
                self._log.write_line(
                    f"headstart: a new {slot.name} {child.exit_description}; the running replicas continue"
                )
                if not self._overlaps:
                    slot.child = child  # which is restarted, as any that has ended
                return False
            slot.child = child
            self._report(changed)
            if self._overlaps:
                await asyncio.sleep(OVERLAP_SECONDS)
                await self._retire(old, changed)
            return True

    async def _retire(self, child: ReplicaChild, changed: Changed) -> None:
        """Send no more requests to a replica, and wait until it has drained and ended."""
        child.is_leaving = True
        self._report(changed)
        child.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(child.over.wait(), self._end_seconds)
        child.kill()


class _Slot:
    """One of the replicas, and its current process. The lock is held while the process is exchanged."""

    child: ReplicaChild

    def __init__(self, number: int, backoff: float) -> None:
        self.number = number
        self.name = f"r{number}"
        self.lock = asyncio.Lock()
        self._first_backoff = self._backoff = backoff

    def next_delay(self, ended: ReplicaChild) -> float:
        """Return the seconds to wait now; the next delay is twice as long, unless the replica runs long."""
        if ended.uptime_seconds >= STEADY_SECONDS:
            self._backoff = self._first_backoff
        delay, self._backoff = self._backoff, min(2 * self._backoff, MAX_BACKOFF)
        return delay
