"""The engine process: `python -m headstart.server.engine.engine_process FD`, one loop around an Engine.

Takes messages without waiting while there is work, waits when idle, steps, sends what came out. A message that cannot
be handled fails alone; an exception out of a step means that the engine is broken, and the process says so and ends.
It lives no longer than the process that started it, and leaves signals of the terminal to that one.
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

from headstart.core.engine import Engine, EngineInfo
from headstart.core.errors import ConfigError, InvalidRequestError
from headstart.server.engine.engine_calls import CALLS
from headstart.server.engine.wire import (
    Abort,
    Answer,
    Call,
    Channel,
    Failed,
    LongStep,
    News,
    PeerGoneError,
    Ready,
    Refused,
    Start,
    Stop,
    Submit,
    decode_to_engine,
)

HEARTBEAT_SECONDS = 1.0
START_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


class EngineLoop:
    """One engine at one end of a channel."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._stopping = False
        engine.on_long_step = lambda seconds: channel.send(LongStep(seconds))

    def run(self) -> None:
        """Runs until told to stop or the other side is gone. Lets the exceptions of a step through."""
        engine, channel = self._engine, self._channel
        while True:
            payloads = channel.receive(0.0 if engine.has_work else HEARTBEAT_SECONDS)
            for payload in payloads:
                self._handle(payload)
            if self._stopping or channel.is_closed:
                return
            outputs = engine.step(time.monotonic()) if engine.has_work else []
            channel.send(News(outputs, engine.stats()))

    def close(self) -> None:
        """Ends the engine, which takes some seconds if its store has much to write."""
        self._engine.close()

    def _handle(self, payload: bytes) -> None:
        """Does what one message asks; whatever goes wrong concerns this message alone."""
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
            case Call():
                self._channel.send(self._call(message))
            case Stop() | Start():
                self._stopping = True

    def _submit(self, message: Submit) -> None:
        for request in message.requests():
            try:
                self._engine.add_request(request)
            except InvalidRequestError as error:
                self._channel.send(Refused(request.request_id, str(error), error.param, error.code))
            except Exception as error:
                traceback.print_exc()
                self._channel.send(Refused(request.request_id, f"{type(error).__name__}: {error}", None, None))

    def _call(self, message: Call) -> Answer:
        call = CALLS.get(message.name)
        if call is None:
            return Answer(message.call_id, error=f"the engine knows no call {message.name!r}")
        try:
            return Answer(message.call_id, call(self._engine, message.argument))
        except InvalidRequestError as error:
            return Answer(message.call_id, error=str(error), param=error.param, code=error.code)
        except Exception as error:
            traceback.print_exc()
            return Answer(message.call_id, error=f"{type(error).__name__}: {error}")


def main(descriptor: int) -> int:
    """Serves one engine over the socket `descriptor`; returns the exit code: 0, 1 broken, 2 the user's mistake."""
    _belong_to_parent()
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    channel = Channel(sock)
    try:
        started = _start(channel)
        if isinstance(started, int):
            return started
        engine, info = started
        channel.send(Ready(info))
        gc.collect()
        gc.freeze()  # what was loaded stays: no collection needs to look at it again
        return _run(EngineLoop(engine, channel), channel)
    except PeerGoneError:  # and with it everyone who could be told
        return 1
    finally:
        sock.close()


def _start(channel: Channel) -> "tuple[Engine, EngineInfo] | int":
    """Builds the engine that the first message asks for, or says why not and returns the exit code."""
    payloads = channel.receive(START_SECONDS)
    message = decode_to_engine(payloads[0]) if payloads else None
    if not isinstance(message, Start):
        return 1
    try:
        build = getattr(importlib.import_module(message.module), message.function)
        return build(message.options)
    except ConfigError as error:
        channel.send(Failed(str(error), is_config=True))
        return 2
    except Exception as error:
        traceback.print_exc()
        channel.send(Failed(f"{type(error).__name__}: {error}", is_config=False))
        return 1


def _run(loop: EngineLoop, channel: Channel) -> int:
    try:
        loop.run()
    except PeerGoneError:
        raise
    except Exception as error:
        traceback.print_exc()
        print(f"headstart: the engine broke in a step ({type(error).__name__}: {error}) and ends", file=sys.stderr)
        channel.send(Failed(f"{type(error).__name__}: {error}", is_config=False))
        return 1  # without close: what waits to be stored is worth nothing if whatever broke has spoilt it
    loop.close()
    return 0


def _belong_to_parent() -> None:
    """Dies with the parent even in the middle of a step, and leaves Ctrl-C and SIGTERM to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
