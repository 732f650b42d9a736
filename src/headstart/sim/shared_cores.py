"""SharedCores: the end times of steps whose replicas share the cores of one machine, in virtual time.

Steps that run at the same time advance at the same speed, as under a fair scheduler of an operating system with short
time slices. Priorities, migrations and the time of a switch are not modelled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Act = Callable[[float], None]


@dataclass(slots=True, eq=False)
class _RunningStep:
    left: float  # seconds at full speed
    act: Act


class SharedCores:
    """The cores of all replicas. `at` schedules a callback, which receives the time.

    `speeds[n - 1]` is the speed of each step while `n` run, relative to a step alone. More steps than speeds share the
    total speed of the last entry equally. Without speeds every replica has cores of its own.
    """

    def __init__(self, speeds: Sequence[float], at: Callable[[float, Act], None]) -> None:
        self._speeds = speeds
        self._at = at
        self._steps: list[_RunningStep] = []
        self._now = 0.0  # time of the last change
        self._num_changes = 0

    def start(self, seconds: float, act: Act, now: float) -> None:
        """Start a step of `seconds` at full speed; `act` is called at its end."""
        if not self._speeds:
            self._at(now + seconds, act)
            return
        self._advance(now)
        self._steps.append(_RunningStep(seconds, act))
        self._schedule_next(now)

    def _speed(self) -> float:
        """Return the present speed of each step."""
        num, known = len(self._steps), len(self._speeds)
        return self._speeds[min(num, known) - 1] * min(known / num, 1.0)

    def _advance(self, now: float) -> None:
        if self._steps:
            done = (now - self._now) * self._speed()
            for step in self._steps:
                step.left -= done
        self._now = now

    def _schedule_next(self, now: float) -> None:
        """Schedule the next end, which is the next event unless a step starts before it."""
        self._num_changes += 1
        if self._steps:
            number, step = self._num_changes, min(self._steps, key=lambda one: one.left)
            self._at(now + max(step.left, 0.0) / self._speed(), lambda then: self._end(step, number, then))

    def _end(self, step: _RunningStep, number: int, now: float) -> None:
        if number != self._num_changes:
            return  # a step started or ended in the meantime
        self._advance(now)
        self._steps.remove(step)
        self._schedule_next(now)
        step.act(now)
