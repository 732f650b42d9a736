"""A log that waits for the banner: nothing is lost, nothing comes in another order."""

from io import StringIO

from headstart.gateway.run_gateway import MAX_LINES, BufferedLog


def test_lines_are_held_until_they_are_released_and_keep_their_order() -> None:
    stream = StringIO()
    log = BufferedLog(stream)
    log.write_line("one")
    log.event("replica", {"replica": "http://one"})
    assert stream.getvalue() == ""
    log.release()
    log.write_line("three")
    log.release()
    first, second, third = stream.getvalue().splitlines()
    assert (first, third) == ("one", "three") and '"http://one"' in second


def test_what_is_held_is_bounded_and_never_dropped() -> None:
    stream = StringIO()
    log = BufferedLog(stream)
    for number in range(2 * MAX_LINES):
        log.write_line(str(number))
    assert stream.getvalue().splitlines() == [str(number) for number in range(2 * MAX_LINES)]
