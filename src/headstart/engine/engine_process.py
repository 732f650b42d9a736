"""The engine process: `python -m headstart.engine.engine_process FD`, one loop around an Engine.

The loop reads messages (it waits for them only when idle), steps, and sends the outputs. A message that cannot be
handled fails alone. An exception in a step means that the engine is broken: the process reports it and exits. It dies
with its parent process, and ignores the terminal's signals, which the parent handles.
"""

import ctypes
import gc
import importlib
import signal
import socket
import sys
import time
import traceback

import msgspec

from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.errors import ConfigError, InvalidRequestError
from headstart.engine.engine_calls import CALLS
from headstart.engine.wire import (
    Abort,
    CallResult,
    EngineCall,
    EngineFailed,
    EngineProcessChannel,
    EngineUpdate,
    LongStep,
    PeerGoneError,
    Ready,
    Refused,
    StartEngine,
    Stop,
    Submit,
    decode_to_engine,
)

HEARTBEAT_SECONDS = 1.0
START_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


class EngineLoop:
    """The loop that serves one engine over a channel."""

    def __init__(self, engine: Engine, channel: EngineProcessChannel) -> None:
        self._engine = engine
        self._channel = channel
        self._stopping = False
        engine.on_long_step = lambda seconds: channel.send(LongStep(seconds))

    def run(self) -> None:
        """Run until a Stop message or the end of the channel. Exceptions of a step propagate."""
        engine, channel = self._engine, self._channel
        while True:
            payloads = channel.receive_payloads(0.0 if engine.has_work else HEARTBEAT_SECONDS)
            for payload in payloads:
                self._handle(payload)
            if self._stopping or channel.is_closed:
                return
            outputs = engine.step(time.monotonic()) if engine.has_work else []
            channel.send(EngineUpdate(outputs, engine.stats()))

    def close(self) -> None:
        """Close the engine; takes some seconds if its store has many pending writes."""
        self._engine.close()

    def _handle(self, payload: bytes) -> None:
        """Handle one message; an error affects this message only."""
        try:
            message = decode_to_engine(payload)
        except msgspec.DecodeError as error:
            print(f"headstart: the engine received a message it cannot read: {error}", file=sys.stderr)
            return
        match message:
            case Submit():
                self._submit(message)
            case Abort():
                for request_id in message.request_ids:
                    self._engine.abort(request_id)
            case EngineCall():
                self._channel.send(self._call(message))
            case Stop() | StartEngine():
                self._stopping = True

    def _submit(self, message: Submit) -> None:
        for request in message.requests():
            try:
                self._engine.add_request(request)
            except Exception as error:
                self._channel.send(Refused(request.request_id, *_told(error)))

    def _call(self, message: EngineCall) -> CallResult:
        call = CALLS.get(message.name)
        if call is None:
            return CallResult(message.call_id, error=f"the engine knows no call {message.name!r}")
        try:
            return CallResult(message.call_id, call(self._engine, message.argument))
        except Exception as error:
            return CallResult(message.call_id, None, *_told(error))


def _told(error: Exception) -> tuple[str, str | None, str | None]:
    """Return message, field and code of an error; one that is not the client's mistake is logged and has no code."""
    if isinstance(error, InvalidRequestError):
        return str(error), error.param, error.code
    traceback.print_exc()
    return f"{type(error).__name__}: {error}", None, None


def main(descriptor: int) -> int:
    """Serve one engine over the socket `descriptor`; return the exit code: 0, 1 (broken), 2 (configuration error)."""
    _belong_to_parent()
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    channel = EngineProcessChannel(sock)
    try:
        started = _start(channel)
        if isinstance(started, int):
            return started
        engine, info = started
        channel.send(Ready(info))
        gc.collect()
        gc.freeze()  # loaded objects stay: exclude them from later collections
        return _run(EngineLoop(engine, channel), channel)
    except PeerGoneError:  # there is no process left to report to
        return 1
    finally:
        sock.close()


def _start(channel: EngineProcessChannel) -> "tuple[Engine, EngineInfo] | int":
    """Build the engine from the first message and return it; on failure, report the reason and return the exit code."""
    payloads = channel.receive_payloads(START_SECONDS)
    message = decode_to_engine(payloads[0]) if payloads else None
    if not isinstance(message, StartEngine):
        return 1
    try:
        build = getattr(importlib.import_module(message.module), message.function)
        return build(message.options)
    except ConfigError as error:
        channel.send(EngineFailed(str(error), is_config=True))
        return 2
    except Exception as error:
        traceback.print_exc()
        channel.send(EngineFailed(f"{type(error).__name__}: {error}", is_config=False))
        return 1


def _run(loop: EngineLoop, channel: EngineProcessChannel) -> int:
    try:
        loop.run()
    except PeerGoneError:
        raise
    except Exception as error:
        traceback.print_exc()
        print(f"headstart: the engine broke in a step ({type(error).__name__}: {error}) and ends", file=sys.stderr)
        channel.send(EngineFailed(f"{type(error).__name__}: {error}", is_config=False))
        return 1  # without close: blocks pending for the store may be corrupt after the failure
    loop.close()
    return 0


def _belong_to_parent() -> None:
    """Make the kernel kill this process with its parent, even during a step; ignore SIGINT and SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
