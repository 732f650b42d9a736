"""The private parts of uvicorn that BoundedHttpProtocol overrides and uses exist in the installed version."""

import inspect
import re

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headstart.http.protocol import body_writer, http_protocol

OVERRIDDEN = {
    "__init__",
    "_start_asgi_task",
    "connection_lost",
    "connection_made",
    "data_received",
    "eof_received",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "pause_writing",
    "resume_writing",
    "send_400_response",
    "shutdown",
    "timeout_keep_alive_handler",
}
"""Methods of uvicorn's protocol that ours replaces. uvicorn, or the parser, calls them."""


def of(text: str, owner: str) -> set[str]:
    """The attributes that are read, called or set on `owner`."""
    return set(re.findall(rf"\b{owner}\.([a-z_0-9]+)", text))


def test_the_private_parts_of_uvicorn_that_are_used_exist() -> None:
    ours, theirs = http_protocol.BoundedHttpProtocol, HttpToolsProtocol
    replaced = {name for name in vars(ours) if callable(getattr(ours, name)) and hasattr(theirs, name)}
    assert replaced == OVERRIDDEN
    for name in OVERRIDDEN - {"__init__"}:
        ours_takes, theirs_takes = (list(inspect.signature(getattr(one, name)).parameters) for one in (ours, theirs))
        assert ours_takes == theirs_takes, name
    assert set(inspect.signature(theirs).parameters) == {"config", "server_state", "app_state", "_loop"}

    code, their_code = inspect.getsource(ours), inspect.getsource(theirs)
    made = inspect.getsource(ours.__init__) + inspect.getsource(ours.connection_made)
    own = set(re.findall(r"\bself\.([a-z_]+)(?:: [^=\n]+)? =", made))
    inherited = of(code, "self") - set(vars(ours)) - own
    assert {"cycle", "expect_100_continue", "pipeline", "_unset_keepalive_if_required"} < inherited
    assert {"flow", *inherited} <= of(their_code, "self") | set(vars(theirs))

    cycle = of(code, "cycle") | of(code, "running") | of(inspect.getsource(body_writer), "_?cycle")
    assert {"chunked_encoding", "disconnected", "keep_alive", "message_event", "response_complete"} < cycle
    assert cycle <= of(inspect.getsource(RequestResponseCycle), "self")
    assert {"resume_reading", "pause_reading", "write_paused"} <= set(dir(FlowControl)) | of(
        inspect.getsource(FlowControl), "self"
    )
    assert hasattr(uvicorn.Server, "capture_signals")
    server = uvicorn.Server(uvicorn.Config(""))
    assert not server.should_exit and not server.force_exit and not server.server_state.connections
