"""WriteTimeout: what goes to a client that may take its time, but not for ever.

A timer a message would cost as much as passing a token on; one a request, which looks now and then, costs nothing.
"""

import asyncio
from typing import Any

from starlette.types import Message, Send


class WriteTimeout:
    """Sends as `send` does. Cancels `task`, and `is_over`, once the client took nothing for so many seconds.

    It may take a quarter more until that is noticed. Whoever made it closes it.
    """

    def __init__(self, send: Send, task: "asyncio.Task[Any]", seconds: float) -> None:
        self.is_over = False
        self._send, self._task, self._seconds = send, task, seconds
        self._loop = task.get_loop()
        self._since: float | None = None  # while something is being sent
        self._timer = self._loop.call_later(seconds / 4, self._look)

    async def __call__(self, message: Message) -> None:
        self._since = self._loop.time()
        await self._send(message)
        self._since = None

    def close(self) -> None:
        """Stops looking."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._since is not None and self._loop.time() - self._since >= self._seconds:
            self.is_over = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._seconds / 4, self._look)
