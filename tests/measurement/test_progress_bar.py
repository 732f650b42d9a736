import pytest

from headstart.measurement.progress_bar import QUIET, progress_bar


def test_without_a_terminal_every_stage_is_a_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as bar:
        bar.start_stage("cold", 3)
        bar.advance()
    out, err = capsys.readouterr()
    assert (out, err) == ("", "... cold\n")


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar() as bar:
        bar.start_stage("cold", 3)
        bar.advance(3)
    err = capsys.readouterr().err
    assert "cold" in err and "3/3" in err and err.rstrip().endswith("\x1b[2K")


def test_quiet_draws_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    QUIET.start_stage("cold", 3)
    QUIET.advance()
    assert capsys.readouterr().err == ""
