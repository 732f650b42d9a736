from pathlib import Path

from headstart_lab.store import page_cache


def test_pages_are_dropped_where_the_kernel_can_tell_and_the_content_stays(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4096
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "folder").mkdir()
    share = page_cache.drop(tmp_path)
    assert share is None or 0.0 <= share <= 1.0  # None: a file system in memory, for instance
    assert (tmp_path / "file").read_bytes() == content


def test_nothing_is_said_of_a_folder_without_content(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert page_cache.drop(tmp_path) is None
