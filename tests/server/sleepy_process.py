"""A sandbox process that sleeps as long as its setup says before it is ready, and as long as each request says."""

import time
from typing import Any

from headstart.core.errors import InvalidRequestError
from headstart.openai.sandbox.sandbox_process import Handler, serve


def build(setup: Any) -> Handler:
    def sleep(request: Any) -> str:
        time.sleep(request)
        return f"slept {request}"

    time.sleep(setup)
    return sleep


if __name__ == "__main__":
    serve(build, InvalidRequestError("too large"))
