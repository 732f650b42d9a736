"""Every system call of the store, in one place; and the folder itself: its permissions and its secret.

Files in the folder are opened without following links, without blocking (a pipe would block for ever) and only if they
are regular files of this user. Segment files are never mapped: truncating a mapped file kills the process with SIGBUS
(benchmarks/store-forms).
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from headstart.core.cache.block_store import Data
from headstart.core.errors import ConfigError

SECRET_BYTES = 32
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class UnsafeFileError(OSError):
    """The file to open is no regular file, or belongs to another user."""


class FileEntry(NamedTuple):
    """One file of a folder, links not followed."""

    name: str
    size: int  # bytes, holes included
    num_bytes: int  # on disk
    mtime: float  # seconds since the epoch
    is_safe: bool  # a regular file of this user


class DiskSpace(NamedTuple):
    """Bytes of the disk: free for this user, and in total."""

    free: int
    total: int


class FileSystemCalls:
    """The system calls; any may raise OSError. Tests override single ones to simulate failures."""

    def open_owned_regular_file(self, path: Path, *, to_write: bool = False) -> int:
        """Open an existing file, for reading or both. Raises UnsafeFileError if it is no regular file of this user."""
        fd = os.open(path, (os.O_RDWR if to_write else os.O_RDONLY) | _SAFELY)
        try:
            if not _is_safe(os.fstat(fd)):
                raise UnsafeFileError(errno.EPERM, "no regular file of this user", str(path))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open_for_direct_write(self, path: Path) -> int:
        """Open an existing file for direct writes. Raises OSError (EINVAL) if they are not supported."""
        if not hasattr(os, "O_DIRECT"):
            raise OSError(errno.EINVAL, "this system has no direct writes", str(path))
        return os.open(path, os.O_WRONLY | os.O_DIRECT | _SAFELY)

    def create(self, path: Path) -> int:
        """Create a new file, readable and writable by this user only. Raises FileExistsError."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, 0o600)

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        return os.pread(fd, num_bytes, offset)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Data], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def touch(self, path: Path) -> None:
        """Set its mtime to now, by a clock that is fine enough to keep the order of calls."""
        now = time.time_ns()
        os.utime(path, ns=(now, now), follow_symlinks=False)

    def mkdir(self, folder: Path) -> None:
        os.mkdir(folder, 0o700)

    def lstat(self, path: Path) -> FileEntry:
        return _entry(path.name, os.lstat(path))

    def list_entries(self, folder: Path) -> list[FileEntry]:
        """Return all entries of a folder; those that vanish meanwhile are left out."""
        found: list[FileEntry] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found.append(_entry(entry.name, entry.stat(follow_symlinks=False)))
        return found

    def is_linked(self, fd: int) -> bool:
        """Return whether an open file still has a name."""
        return os.fstat(fd).st_nlink > 0

    def space(self, folder: Path) -> DiskSpace:
        found = os.statvfs(folder)
        return DiskSpace(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    def try_open_locked(self, path: Path) -> int | None:
        """Lock a file among all processes until it is closed; None if another has it. Creates it if needed."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return fd

    def mtime_clock_now(self) -> float:
        """Return the clock of mtimes, seconds since the epoch. Compare it with mtimes only."""
        return time.time()


def create_store_folder(folder: Path) -> None:
    """Create the folder, for this user only, unless it exists.

    Raises ConfigError if the path is no folder, belongs to another user, or is accessible to others.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"--kv-store {folder}: {error.strerror}; name a folder that can be created") from error
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"--kv-store {folder} belongs to user {found.st_uid}; use a folder of your own ({os.geteuid()})"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"--kv-store {folder} is open to others (mode {mode:o}); name a new folder, "
            f"or, if nothing else is in this one, run: chmod 700 {folder}"
        )


def read_or_create_folder_secret(folder: Path) -> bytes:
    """Return the folder's secret, 32 random bytes, the same for all its processes; created at the first call.

    Raises ConfigError for an unusable folder and for a secret that is damaged or accessible to others.
    """
    create_store_folder(folder)
    path = folder / "secret"
    try:
        if not os.path.lexists(path):
            _make_secret(path)
        return _load_secret(path)
    except OSError as error:
        raise ConfigError(f"--kv-store {folder}: its secret cannot be read or made: {error}") from error


def _make_secret(path: Path) -> None:
    """Create the secret atomically; the first process wins: a link to a complete file never replaces another one."""
    draft = path.with_name(f".{secrets.token_hex(8)}.tmp")
    fd = FileSystemCalls().create(draft)
    try:
        os.write(fd, secrets.token_bytes(SECRET_BYTES))
        os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.close(fd)
        os.unlink(draft)


def _load_secret(path: Path) -> bytes:
    fd = FileSystemCalls().open_owned_regular_file(path)
    try:
        mode, secret = stat.S_IMODE(os.fstat(fd).st_mode), os.read(fd, SECRET_BYTES + 1)
    finally:
        os.close(fd)
    if mode & 0o077:
        raise ConfigError(f"{path} is open to others (mode {mode:o}); delete it: tenants' blocks are computed anew")
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} is damaged: not {SECRET_BYTES} bytes; delete it: tenants' blocks are computed anew")
    return secret


def _is_safe(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _entry(name: str, found: os.stat_result) -> FileEntry:
    num_bytes = min(found.st_size, found.st_blocks * 512)
    return FileEntry(name, found.st_size, num_bytes, found.st_mtime, _is_safe(found))
