"""Exceptions: one class for every mistake a caller can make. Internal errors are assertions.

HeadstartError
├── InvalidRequestError       the request itself is invalid: HTTP 400, never retried
│   └── RequestTooLargeError  it can never fit: longer than the model's context or than the whole pool
├── QueueFullError            the waiting queue is full: HTTP 429, retry later
├── DrainingError             shutting down, nothing new is admitted: HTTP 503
├── NoReplicaError            the router has no replica for a request: HTTP 503
├── RequestFailedError        the engine could not execute this one request; others are unaffected: HTTP 500
├── EngineDeadError           the engine process or its executor failed: HTTP 503
└── ConfigError               options that cannot work together, or a model that cannot be loaded; exit code 2
"""


class HeadstartError(Exception):
    """The base class of all errors that Headstart raises on purpose."""


class InvalidRequestError(HeadstartError):
    """An invalid request.

    `param` names the offending field, `code` is one of OpenAI's string codes.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class RequestTooLargeError(InvalidRequestError):
    """A request that can never run here, even on an idle engine."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "context_length_exceeded") -> None:
        super().__init__(message, param=param, code=code)


def context_overflow_message(excess: str, max_tokens: int) -> str:
    """Return the message of a context overflow: `excess`, and the phrases by which clients recognise one.

    Clients compare the message rather than the code: LiteLLM, LangChain and agents that then shorten a conversation
    (tests/server/test_context_overflow.py lists the phrases).
    """
    return (
        f"{excess}. This model's maximum context length is {max_tokens} tokens, prompt and output together, and the "
        "request exceeds the context window"
    )


def prompt_too_long_error(num_tokens: int, max_tokens: int, remedy: str, *, counted: str = "") -> RequestTooLargeError:
    """Return the error of a prompt of `num_tokens` tokens, which leaves no token of `max_tokens` for the output.

    `counted` stands before the number if the prompt may have more.
    """
    excess = f"prompt is too long: {counted}{num_tokens} tokens > {max_tokens - 1} maximum"
    return RequestTooLargeError(f"{context_overflow_message(excess, max_tokens)}: {remedy}", param="prompt")


class QueueFullError(HeadstartError):
    """The bounded waiting queue is full; `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DrainingError(HeadstartError):
    """The server is shutting down and admits no new requests."""


class NoReplicaError(HeadstartError):
    """No replica may serve this request now; `reasons` maps each replica to the reason."""

    def __init__(self, message: str, *, reasons: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = reasons or {}


class RequestFailedError(HeadstartError):
    """The engine could not execute this one request or call; others are unaffected."""


class EngineDeadError(HeadstartError):
    """The engine can no longer compute; every request it held has failed."""


class ConfigError(HeadstartError):
    """Options that cannot work, or a model that cannot be served here."""
