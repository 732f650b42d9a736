"""GrammarCompiler: the seam to the compiler of grammars, which works on threads of its own beside the steps."""

from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any, Protocol

from headstart.core.errors import HeadstartError, InvalidRequestError
from headstart.core.request import Request

WAIT_SECONDS = 0.002  # for a grammar when there is nothing else to do; then messages are read


class GrammarCompiler(Protocol):
    """Compiles the grammars of requests and caches them."""

    def begin_compile(self, grammar: str, tenant: str = "") -> "Future[Any]":
        """Begin to compile a grammar unless it is cached. The future raises InvalidRequestError for an invalid one.

        Tenants take turns: the grammars that one has asked for wait for no more than one of each other tenant.
        """
        ...


class CompilingRequests:
    """Requests whose grammars are being compiled; they are not known to the scheduler yet."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._waiting: dict[str, tuple[Request, Future[Any]]] = {}  # by request id, in order of arrival

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def begin_compiling(self, request: Request) -> None:
        """Begin to compile the grammar of a request. Raises InvalidRequestError without a compiler."""
        grammar = request.sampling.grammar
        assert grammar is not None, f"{request.request_id} has no grammar"
        self._waiting[request.request_id] = request, self._future(grammar, request.tenant)

    def compile_now(self, grammar: str) -> None:
        """Compile a grammar now. Raises InvalidRequestError for an invalid one, and without a compiler."""
        self._future(grammar).result()

    def remove(self, request_id: str) -> bool:
        """Forget a request; return False if it is not waiting here."""
        return self._waiting.pop(request_id, None) is not None

    def take_compiled(self) -> "Iterable[tuple[Request, str | None]]":
        """Remove and yield the requests whose grammars are compiled; with the reason if that has failed."""
        done = [request_id for request_id, (_, future) in self._waiting.items() if future.done()]
        for request_id in done:
            request, future = self._waiting.pop(request_id)
            error = future.exception()
            if error is not None and not isinstance(error, HeadstartError):
                raise error
            yield request, None if error is None else str(error)

    def _future(self, grammar: str, tenant: str = "") -> "Future[Any]":
        if self._compiler is None:
            raise InvalidRequestError("this engine has no grammars: leave out the structured output parameters")
        return self._compiler.begin_compile(grammar, tenant)

    def wait_briefly_for_any(self) -> None:
        """Wait a moment for any of them."""
        wait([future for _, future in self._waiting.values()], WAIT_SECONDS, "FIRST_COMPLETED")
