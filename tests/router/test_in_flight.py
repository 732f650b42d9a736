"""RoutedInFlight: alternatives are kept until the first token, the scores of all replicas for the decision log."""

from router.fleets import ask, endpoint

from headstart.router.decision_log import DecisionRecord
from headstart.router.router import Router
from headstart.router.routing_request import ReportedTokenUsage


def fleet(records: list[DecisionRecord]) -> Router:
    router = Router(log=records.append)
    for name in ("r0", "r1", "r2"):
        router.add(endpoint(name))
    return router


def test_candidates_are_forgotten_with_the_first_token_and_kept_until_then() -> None:
    router = fleet([])
    sent = router.record_sent(router.pick(ask(1, 2), 0.0), 0.0, "r1")
    assert {candidate.name for candidate in sent.view.candidates} == {"r0", "r1", "r2"}
    other = router.record_sent(sent, 0.1, "r2")  # a front end may learn only from the answer's head who gave it
    router.record_first_token(other, 0.2)
    assert [candidate.name for candidate in other.view.candidates] == ["r2"] and not other.fallbacks
    assert other.candidate.name == other.endpoint.name == "r2" and other.choice.reason == sent.choice.reason
    router.record_finished(other, 0.3, ReportedTokenUsage(9, 0))


def test_the_decision_log_has_the_scores_of_all_replicas_after_that() -> None:
    records: list[DecisionRecord] = []
    router = fleet(records)
    decision = router.pick(ask(1, 2), 0.0)
    expected = {one.name: score for one, score in zip(decision.choice.ranked, decision.choice.scores, strict=True)}
    sent = router.record_sent(decision, 0.0)
    router.record_first_token(sent, 0.1)
    router.record_finished(sent, 0.2, ReportedTokenUsage(9, 0))
    router.record_failed(router.record_sent(router.pick(ask(3), 0.3), 0.3), 0.4)
    assert records[0].scores == expected and records[0].endpoint == sent.endpoint.name
    assert set(records[1].scores) == {"r0", "r1", "r2"}
