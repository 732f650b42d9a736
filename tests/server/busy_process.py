"""A sandbox process that computes as long as its setup says before it is ready, and as long as each request says."""

import time
from typing import Any

from headstart.core.errors import InvalidRequestError
from headstart.openai.sandbox.sandbox_process import Handler, serve


def build(setup: Any) -> Handler:
    def compute(request: Any) -> str:
        until = time.process_time() + request
        while time.process_time() < until:
            pass
        return f"computed {request}"

    compute(setup)
    return compute


if __name__ == "__main__":
    serve(build, InvalidRequestError("too large"))
