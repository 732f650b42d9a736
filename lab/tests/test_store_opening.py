from pathlib import Path

from headstart_lab.store.store_opening import Opening, measure_openings


def test_a_sparse_store_is_found_whole_and_takes_no_room(tmp_path: Path) -> None:
    opening = Opening("sparse", 200, 192 << 10, 64 << 20, sparse=True)
    found = measure_openings([opening], tmp_path, runs=1)
    row = found.values["openings"]["sparse"]
    assert found.problems == [] and list(tmp_path.iterdir()) == []
    assert (row["blocks_found"], row["payloads"]) == (200, "sparse") and row["segments"] >= 1
    assert found.values["start_s"] == row["start_s"] > 0 and row["rss_mib"] >= 0


def test_a_store_for_which_the_disk_has_no_room_is_left_out(tmp_path: Path) -> None:
    found = measure_openings([Opening("huge", 1 << 40, 1 << 20, 1 << 60)], tmp_path)
    assert "free" in found.values["openings"]["huge"]["left_out"] and found.values["start_s"] is None
    assert found.problems == [] and list(tmp_path.iterdir()) == []
