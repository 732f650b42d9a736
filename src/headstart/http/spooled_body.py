"""SpooledBody: a large request body in a temporary file, until it is parsed, or sent to one replica or to several."""

import os
import tempfile
from collections.abc import AsyncGenerator

PIECE_BYTES = 256 << 10


class SpooledBody:
    """The bytes of a request body, in a file without a name that vanishes with the process."""

    def __init__(self, data: bytes | bytearray = b"") -> None:
        """Write `data`. Raises OSError: no writable temporary folder, or no space there."""
        self._num_bytes = 0
        self._file = tempfile.TemporaryFile(buffering=0, prefix="headstart-")  # noqa: SIM115
        try:
            self.append(data)
        except OSError:
            self.close()
            raise

    def __len__(self) -> int:
        return self._num_bytes

    def append(self, data: bytes | bytearray) -> None:
        """Write `data` at the end. Raises OSError; then nothing has been appended."""
        done = 0
        with memoryview(data) as view:
            while done < len(view):
                done += os.pwrite(self._file.fileno(), view[done:], self._num_bytes + done)
        self._num_bytes += done

    def read(self) -> bytes:
        """Return all of it."""
        return os.pread(self._file.fileno(), self._num_bytes, 0)

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield it from the beginning, in pieces, also after `close`. Generators do not disturb each other."""
        file = os.dup(self._file.fileno())
        try:
            for start in range(0, self._num_bytes, PIECE_BYTES):
                yield os.pread(file, min(PIECE_BYTES, self._num_bytes - start), start)
        finally:
            os.close(file)

    def close(self) -> None:
        """Free the space. Idempotent."""
        self._file.close()


def body_bytes(body: bytes | SpooledBody) -> bytes:
    """Return a body's bytes."""
    return body if isinstance(body, bytes) else body.read()


def spool_to_file(data: bytes | bytearray) -> SpooledBody | None:
    """Return the data in a file; None where no file can be written: then it is kept in memory."""
    try:
        return SpooledBody(data)
    except OSError:
        return None
