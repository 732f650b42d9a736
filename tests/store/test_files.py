"""Files are opened only if they are ours and regular; the folder is for us alone, and its secret the same for all."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.core.errors import ConfigError
from headstart.store.files import (
    SECRET_BYTES,
    FileSystemCalls,
    UnsafeFileError,
    create_store_folder,
    read_or_create_folder_secret,
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_is_made_for_us_alone_whatever_the_umask(tmp_path: Path) -> None:
    folder, before = tmp_path / "a" / "b", os.umask(0)
    try:
        create_store_folder(folder)
        create_store_folder(folder)
        os.close(FileSystemCalls().create(folder / "x"))
        read_or_create_folder_secret(folder)
    finally:
        os.umask(before)
    assert mode_of(folder) == 0o700
    assert mode_of(folder / "x") == mode_of(folder / "secret") == 0o600


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o770])
def test_a_folder_that_others_may_enter_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod 700"):
        create_store_folder(tmp_path)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        create_store_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="folder that can be created"):
        create_store_folder(tmp_path / "file" / "below")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="a folder of your own"):
        create_store_folder(tmp_path)


def test_a_link_to_a_folder_of_ours_will_do(tmp_path: Path) -> None:
    create_store_folder(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    create_store_folder(tmp_path / "link")


def test_the_secret_is_made_once_and_leaves_nothing_else(tmp_path: Path) -> None:
    secret = read_or_create_folder_secret(tmp_path / "store")
    assert len(secret) == SECRET_BYTES and read_or_create_folder_secret(tmp_path / "store") == secret
    assert read_or_create_folder_secret(tmp_path / "other") != secret
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["secret"]


def test_processes_that_start_together_agree_on_the_secret(tmp_path: Path) -> None:
    code = """
from pathlib import Path
import sys
from headstart.store.files import read_or_create_folder_secret
print(read_or_create_folder_secret(Path(sys.argv[1])).hex())
"""
    argv = [sys.executable, "-c", code, str(tmp_path / "store")]
    started = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    secrets = {process.communicate(timeout=300)[0] for process in started}
    assert len(secrets) == 1 and len(secrets.pop().strip()) == 2 * SECRET_BYTES


def test_a_secret_that_is_damaged_or_open_to_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    read_or_create_folder_secret(folder)
    (folder / "secret").chmod(0o640)
    with pytest.raises(ConfigError, match="open to others"):
        read_or_create_folder_secret(folder)
    (folder / "secret").chmod(0o600)
    for content in (b"", b"short", b"x" * 33):
        (folder / "secret").write_bytes(content)
        with pytest.raises(ConfigError, match="damaged"):
            read_or_create_folder_secret(folder)


def test_a_secret_that_is_a_link_is_refused(tmp_path: Path) -> None:
    create_store_folder(tmp_path / "store")
    (tmp_path / "store" / "secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="secret"):
        read_or_create_folder_secret(tmp_path / "store")
    assert not (tmp_path / "elsewhere").exists()


def test_links_pipes_and_folders_are_not_opened(tmp_path: Path) -> None:
    files = FileSystemCalls()
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        files.open_owned_regular_file(tmp_path / "link")
    for name in ("pipe", "folder"):
        with pytest.raises(UnsafeFileError):
            files.open_owned_regular_file(tmp_path / name)
    num_open = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for _ in range(3):
        with pytest.raises(UnsafeFileError):
            files.open_owned_regular_file(tmp_path / "pipe")
    assert not num_open or len(os.listdir("/proc/self/fd")) == num_open  # none is left open


def test_a_file_is_listed_by_what_it_takes_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "sparse").write_bytes(b"x")
    os.truncate(tmp_path / "sparse", 1 << 40)
    (tmp_path / "link").symlink_to("sparse")
    listed = {entry.name: entry for entry in FileSystemCalls().list_entries(tmp_path)}
    assert listed["sparse"].size == 1 << 40 and 0 < listed["sparse"].num_bytes < 1 << 20
    assert listed["sparse"].is_safe and not listed["link"].is_safe
    assert FileSystemCalls().lstat(tmp_path / "sparse") == listed["sparse"]


def test_one_at_a_time_has_the_lock(tmp_path: Path) -> None:
    files = FileSystemCalls()
    first = files.try_open_locked(tmp_path / "lock")
    assert first is not None and files.try_open_locked(tmp_path / "lock") is None
    files.close(first)
    again = files.try_open_locked(tmp_path / "lock")
    assert again is not None
    files.close(again)


def test_a_file_without_a_name_is_told_from_one_with_a_name(tmp_path: Path) -> None:
    files = FileSystemCalls()
    fd = files.create(tmp_path / "x")
    assert files.is_linked(fd)
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "x")
    files.unlink(tmp_path / "x")
    assert not files.is_linked(fd)
    files.close(fd)


def test_files_that_are_touched_at_once_keep_their_order(tmp_path: Path) -> None:
    paths, files = [tmp_path / f"{number}" for number in range(50)], FileSystemCalls()
    for path in paths:
        path.touch()
    for path in paths[::-1]:
        files.touch(path)
    mtimes = [entry.mtime for entry in sorted(files.list_entries(tmp_path), key=lambda entry: int(entry.name))]
    assert mtimes == sorted(set(mtimes), reverse=True)
