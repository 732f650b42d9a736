from collections.abc import Callable
from random import Random

import pytest

from headstart.config.options import EngineOptions
from headstart.core.errors import ConfigError
from headstart.measurement.runner import EngineSetup
from headstart_lab.engine.burst_forms import Form, check_form, every_form, parse_tree
from headstart_lab.engine.shared_burst import run_twins
from headstart_lab.runners.null_executor import NullExecutor

MakeSetup = Callable[..., EngineSetup]
SMALL = Form(requests=6, prefix=256, own=16, output=2, branch=32)
CAPPED = Form(requests=6, prefix=256, own=16, output=2, cap=64)
KEYS = {"prefill_computed", "ideal", "redundancy", "total_s", "steps", "off_s", "differing_tokens"}


@pytest.mark.parametrize(
    "form", every_form(Form(requests=6, prefix=1024, own=16, output=2)), ids=lambda form: form.name
)
def test_no_form_computes_anything_twice(make_setup: MakeSetup, form: Form) -> None:
    report = run_twins(make_setup(), [form], runs=2)
    assert report.problems == [] and report.values.keys() >= KEYS
    assert report.values["prefill_computed"] == report.values["ideal"]
    assert report.values["redundancy"] == 1.0 and report.values["differing_tokens"] == 0


@pytest.mark.parametrize(
    ("form", "ideal"),
    [
        (SMALL, 256 + 6 * 16),
        (Form(prefix=256, own=16, tree=(2, 3), branch=32), 256 + 2 * 32 + 6 * 16),
        (Form(requests=6, prefix=256, own=16, same=True), 272 + 5),
        (Form(requests=6, prefix=256, own=22, same=True), 278 + 5 * 6),
        (Form(requests=6, prefix=256, own=16, loss="abort"), 256 + 5 * 16),
        (Form(requests=6, prefix=256, own=16, loss="poison"), 256 + 5 * 16 + 48),
    ],
)
def test_ideal_counts_each_shared_token_once(form: Form, ideal: int) -> None:
    assert form.ideal_tokens(lost=48) == ideal


def test_leaves_of_a_tree_share_the_root_and_their_branch_and_nothing_more() -> None:
    prompts = Form(prefix=32, own=16, tree=(2, 2), branch=16).prompts(1000, Random(0))
    a, b, c, d = prompts
    assert {len(prompt) for prompt in prompts} == {64}
    assert a[:48] == b[:48] and c[:48] == d[:48] and a[:32] == c[:32]
    assert a[:48] != c[:48] and len({prompt.tobytes() for prompt in prompts}) == 4


def test_a_leader_that_fails_or_is_aborted_is_lost_in_mid_prefill(make_setup: MakeSetup) -> None:
    report = run_twins(make_setup(), [Form(6, 256, 16, 2, cap=64, loss="poison")], runs=1)
    assert report.values["ideal"] == 256 + 5 * 16 + 3 * 64  # three chunks had been computed
    assert report.problems == []


def test_computing_a_prefix_twice_invalidates_the_run(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup()
    plain = EngineSetup.options

    def never_shared(self: EngineSetup, **sizes: int) -> EngineOptions:
        return plain(self, num_blocks=sizes["num_blocks"], caching=False)

    monkeypatch.setattr(EngineSetup, "options", never_shared)
    report = run_twins(setup, [CAPPED], runs=1, baseline=False)
    assert report.values["redundancy"] == pytest.approx(6 * 272 / (256 + 6 * 16))
    assert report.problems == ["burst cap 64: 1632 prompt tokens computed, ideal 352"]


def test_failed_requests_invalidate_the_run(make_setup: MakeSetup, failing: type[NullExecutor]) -> None:
    problem, *_ = run_twins(make_setup(failing), [SMALL], runs=1).problems
    assert problem == "burst: 0 requests finished instead of 6, 6 failed"


def test_another_first_token_than_without_reuse_invalidates_the_run(
    make_setup: MakeSetup, forgetful: type[NullExecutor]
) -> None:
    report = run_twins(make_setup(forgetful), [SMALL], runs=1)
    assert report.values["differing_tokens"] > 0 and "differ from those without reuse" in report.problems[0]


def test_the_worst_form_gives_the_figures(make_setup: MakeSetup) -> None:
    report = run_twins(make_setup(), [SMALL, CAPPED], runs=1, baseline=False)
    assert [form["form"] for form in report.values["forms"]] == ["burst", "burst cap 64"]
    assert report.values["redundancy"] == max(form["redundancy"] for form in report.values["forms"])


@pytest.mark.parametrize(("text", "tree"), [("", None), ("4x8", (4, 8))])
def test_trees_are_branches_by_leaves(text: str, tree: tuple[int, int] | None) -> None:
    assert parse_tree(text) == tree


@pytest.mark.parametrize("text", ["4", "x8", "0x8", "4x8x2", "ax8"])
def test_what_is_no_tree_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="4x8"):
        parse_tree(text)


@pytest.mark.parametrize(
    "form",
    [
        Form(requests=1),
        Form(prefix=100),
        Form(cap=100),
        Form(prefix=512, loss="abort"),
        Form(same=True, loss="abort"),
        Form(same=True, tree=(2, 2)),
    ],
)
def test_forms_that_cannot_be_counted_are_refused(form: Form) -> None:
    with pytest.raises(ConfigError):
        check_form(form)


def test_losing_the_leader_implies_a_cap() -> None:
    assert check_form(Form(loss="abort")).cap == 256
