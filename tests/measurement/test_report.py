import json
from pathlib import Path

import pytest

from headstart.core.errors import ConfigError
from headstart.measurement.report import (
    BenchmarkReport,
    ReportChart,
    ReportTable,
    check_plot,
    draw_charts,
    print_and_plot_report,
)


def make_report(**changes: object) -> BenchmarkReport:
    fields = {"bench": "fake", "values": {"a_s": 0.5, "odd": float("nan")}, "model": "m", "seed": 3, "runs": 2}
    return BenchmarkReport(**{**fields, **changes})


def test_last_line_of_stdout_is_the_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    report = make_report(sheets=[ReportTable("a table", ("name", "value"), (("x", 1234.5), ("y", None)))])
    assert print_and_plot_report(report, spin_count="1000") == 0
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert len(out.splitlines()) == 1
    assert "a table" in err and "GOMP_SPINCOUNT=1000" in err
    assert (document["bench"], document["a_s"], document["valid"]) == ("fake", 0.5, True)
    assert document["gomp_spincount"] == "1000"
    assert {"machine", "versions", "seed", "threads", "model", "runs", "spread"} <= document.keys()


def test_what_json_cannot_say_becomes_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_and_plot_report(make_report(), spin_count=None)
    assert json.loads(capsys.readouterr().out)["odd"] is None


def test_an_invalid_run_still_prints_everything_and_exits_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_and_plot_report(make_report(problems=["outputs [differ]"]), spin_count=None) == 1
    out, err = capsys.readouterr()
    assert "INVALID: outputs [differ]" in err
    assert json.loads(out)["valid"] is False and json.loads(out)["problems"] == ["outputs [differ]"]


def test_charts_of_texts_and_of_numbers_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bars = ReportChart("bars", "pass", "s", ("cold", "warm"), {"seconds": (2.0, 0.1)}, log_y=True)
    lines = ReportChart("lines", "requests/s", "ms", (1.0, 2.0), {"on": (5.0, None), "off": (9.0, 11.0)})
    draw_charts([bars, lines], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_into_a_missing_folder_is_refused_before_measuring(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_plot(tmp_path / "missing" / "figure.png")
