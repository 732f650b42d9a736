"""WriteTimeout: aborts a response whose client does not read it.

A timer per message would cost as much as relaying a token; one per request, which checks periodically, costs nothing.
"""

import asyncio
from typing import Any

from starlette.types import Message, Send


class WriteTimeout:
    """Sends as `send` does. Cancels `task`, and sets `is_over`, once the client has read nothing for `seconds`.

    Detection may take a quarter longer. The creator closes it.
    """

    def __init__(self, send: Send, task: "asyncio.Task[Any]", seconds: float) -> None:
        self.is_over = False
        self._send, self._task, self._seconds = send, task, seconds
        self._loop = task.get_loop()
        self._since: float | None = None  # while a message is being sent
        self._timer = self._loop.call_later(seconds / 4, self._check)

    async def __call__(self, message: Message) -> None:
        self._since = self._loop.time()
        await self._send(message)
        self._since = None

    def close(self) -> None:
        """Stop the periodic check."""
        self._timer.cancel()

    def _check(self) -> None:
        if self._since is not None and self._loop.time() - self._since >= self._seconds:
            self.is_over = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._seconds / 4, self._check)
