"""`headstart simulate`, `plan` and `simulate calibrate`, from the command line to the JSON document."""

import json
from pathlib import Path

import pytest

from headstart.cli import main as cli
from headstart.sim.profile_file import read_profile_file

SYNTHETIC = ["--synthetic", "decode-heavy", "--rate", "14", "--requests", "60", "--blocks", "200"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    code = cli.main(list(words))
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    assert code == (0 if document["valid"] else 1), captured.err
    return document


def test_a_sweep_has_a_point_per_combination(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(
        capsys, "simulate", *SYNTHETIC, "--policy", "cost,least-load", "--replicas", "2,4", "--slo-ttft", "500ms"
    )
    points = found["points"]
    assert isinstance(points, list)
    assert [(point["policy"], point["replicas"]) for point in points] == [
        ("cost", 2),
        ("least-load", 2),
        ("cost", 4),
        ("least-load", 4),
    ]
    for point in points:
        assert point["requests"] == 60 and point["errors"] == 0
        assert point["ttft_p50_ms"] <= point["ttft_p99_ms"] and sum(point["requests_by_replica"]) == 60
    assert found["setup"]["slo"] == {"ttft": 0.5}  # type: ignore[index]


def test_a_pool_may_be_a_share_of_the_distinct_blocks_and_nothing_beats_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*SYNTHETIC[:-2], "--blocks", "20%,400", "--replicas", "1", "--policy", "round-robin", "--noise", "0"]
    found = run(capsys, "simulate", *words, "--eviction-policy", "lru,lhd")
    points = found["points"]
    assert isinstance(points, list)
    counted, _, share, learned = points
    assert [point["eviction_policy"] for point in points] == ["lru", "lhd"] * 2
    assert counted["blocks"] == 400
    assert 60 < 5 * share["blocks"] < 60 * 4  # a block of its own per request, and three per group
    for point in (counted, share, learned):
        assert 1.0 <= point["redundancy_bound"] <= point["redundancy"]


def test_failed_requests_make_a_run_invalid_unless_a_scenario_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = [*SYNTHETIC[:-1], "6"]
    found = run(capsys, "simulate", *few, "--replicas", "2")
    assert not found["valid"] and "requests failed, the first with: prompt and output of" in str(found["problems"])
    (tmp_path / "scenario.toml").write_text('[[event]]\nat = 1.0\nkind = "stop"\nreplica = "r0"\n')
    stopped = run(capsys, "simulate", *SYNTHETIC, "--replicas", "2", "--scenario", str(tmp_path / "scenario.toml"))
    assert stopped["valid"] and stopped["points"][0]["errors"] > 0  # type: ignore[index]


def test_a_plan_names_the_smallest_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--synthetic", "decode-heavy", "--rate", "40", "--requests", "100", "--slo-ttft", "400ms"]
    found = run(capsys, "plan", *words, "--policy", "cost,least-load")
    fleets = found["fleets"]
    assert isinstance(fleets, list) and len(fleets) == 2
    assert found["replicas"] == min(one["replicas"] for one in fleets)
    assert all(one["slo_holds"] for one in fleets)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["simulate"], "give one of --trace, --decisions and --synthetic"),
        (["simulate", *SYNTHETIC, "--policy", "nobody"], "no routing policy 'nobody'"),
        (["simulate", *SYNTHETIC, "--replicas", "two"], "--replicas two"),
        (["simulate", *SYNTHETIC, "--blocks", "some%"], "--blocks some"),
        (["simulate", *SYNTHETIC, "--eviction-policy", "mru"], "no eviction policy 'mru'"),
        (["simulate", *SYNTHETIC, "--slo-ttft", "soon"], "--slo-ttft soon"),
        (["simulate", *SYNTHETIC, "--profile", "mine"], "no profile 'mine'"),
        (["simulate", "--trace", "/no/such/file"], "--trace /no/such/file"),
        (["plan", *SYNTHETIC[:-2]], "give a limit"),
        (["plan", *SYNTHETIC[:-2], "--slo-ttft", "-3ms"], "a duration above 0"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert complaint in err and "Traceback" not in err


@pytest.mark.long
def test_calibration_writes_a_profile_that_can_be_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    found = run(capsys, "simulate", "calibrate", "--out", str(path), "--output-tokens", "6", "--blocks", "512")
    profile = read_profile_file(path)
    assert found["cost"]["shape"] == "sum" and profile.block_size == 16  # type: ignore[index]
    assert found["error"]["p50"] >= 0 and "error p50" in profile.source  # type: ignore[index]
    assert profile.cost.seconds.__self__.token > 0  # type: ignore[attr-defined]
    azure = tmp_path / "azure.csv"
    rows = "".join(f"2023-11-16 18:15:{index:02d}.000000,{100 + 9 * index},5\n" for index in range(30))
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    simulated = run(capsys, "simulate", "--trace", str(azure), "--profile", str(path), "--replicas", "1")
    assert simulated["valid"] and simulated["points"][0]["requests"] == 30  # type: ignore[index]


def test_a_plan_has_a_fleet_for_each_size_of_the_pools(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SYNTHETIC[:-2], "--slo-ttft", "30s", "--max-replicas", "4"]
    found = run(capsys, "plan", *words, "--blocks", "400,50%,0", "--policy", "cost,least-load")
    fleets = found["fleets"]
    assert isinstance(fleets, list)
    sizes = [fleet["blocks"] for fleet in fleets]
    assert sizes[:4] == [400, 400, 2930, 2930] and sizes[4] == sizes[5] < 240  # in the order: counts, then shares
    assert found["blocks"] in sizes and found["replicas"] == min(fleet["replicas"] for fleet in fleets)


def test_calibration_names_each_of_its_stages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["simulate", "calibrate", "tiny", "--out", str(tmp_path / "p.json"), "--blocks", "256"]) == 0
    stages = [line for line in capsys.readouterr().err.splitlines() if line.startswith("... ")]
    for stage in (
        "loading the model",
        "measuring steps with 1 ",
        "measuring steps with 32 ",
        "fitting",
        "searching a rate",
    ):
        assert any(stage in line for line in stages), (stage, stages)
    assert "checking the profile" in stages[-1]


def test_a_folder_of_sessions_is_simulated_and_stated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("x", "y", "long"):
        calls = [
            {"t": 20 * turn, "type": "n", "in": 64 * (80 + turn), "out": 8, "hash_ids": list(range(80 + turn))}
            for turn in range(5 if name != "long" else 900)
        ]
        session = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": calls}
        (tmp_path / f"{name}.json").write_text(json.dumps(session))
    words = ["--trace", str(tmp_path), "--skip-above", "20000", "--divide-lengths", "4", "--sessions-at-once", "1"]
    found = run(capsys, "simulate", *words, "--replicas", "1", "--policy", "cost")
    assert found["setup"]["trace"] == {  # type: ignore[index]
        "kind": "sessions",
        "tokens_per_id": 16,
        "divisor": 4,
        "skip_above": 20000,
        "dropped_requests": 900,
        "sessions_at_once": 1,
    }
    (point,) = found["points"]  # type: ignore[misc]
    assert point["requests"] == 10 and point["hit_rate"] > 0
