"""JSON in pieces: the same bytes as at once, shaped when they are sent, one slice per turn of the event loop."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headstart.openai.json_pieces import SLICE_ITEMS, EncodingTurns, LazilyEncodedList, encode_json, iter_json_pieces


def double(number: int) -> int:
    return 2 * number


@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 2, SLICE_ITEMS - 1, SLICE_ITEMS, SLICE_ITEMS + 1, 3 * SLICE_ITEMS]), max_size=3
    ),
    text=st.text(max_size=5),
)
def test_pieces_are_the_whole_document(sizes: list[int], text: str) -> None:
    def document() -> Any:
        return {
            text: 1,
            "a": {"b": LazilyEncodedList([range(size) for size in sizes], double)},
            "c": [],
            "d": {},
            "e": [text],
        }

    assert b"".join(iter_json_pieces(document())) == encode_json(document())


def test_the_items_of_an_iterator_are_made_when_their_turn_comes() -> None:
    made: list[int] = []

    def items() -> Any:
        for number in range(3):
            made.append(number)
            yield {"n": "x" * 100_000}

    source = iter_json_pieces({"a": items()})
    next(source)
    assert made == [0]
    assert next(source) and made == [0, 1]
    assert b"".join(iter_json_pieces({"a": iter([])})) == b'{"a":[]}'


def test_what_is_kept_is_shaped_once() -> None:
    shaped: list[int] = []

    def shape(number: int) -> int:
        shaped.append(number)
        return number

    kept: dict[str, bytes] = {}
    first, second = (
        b"".join(LazilyEncodedList([[1, 2], [last]], shape, kept=kept, key="k").json_slices()) for last in (3, 4)
    )
    assert (first, second) == (b"1,2,3", b"1,2,4") and shaped == [1, 2, 3, 4]
    nothing = LazilyEncodedList([[], [5]], shape, kept={}, key="k")
    assert [b"".join(nothing.json_slices()) for _ in range(2)] == [b"5", b"5"]


def test_of_all_long_documents_one_slice_is_made_per_turn_of_the_loop() -> None:
    async def run() -> None:
        turns, turn, made = EncodingTurns(), 0, []

        def shape(number: int) -> str:
            made.append(turn)
            return "x" * 100_000 if number % SLICE_ITEMS == 0 else ""

        async def count() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        async def write() -> int:
            return sum(
                [
                    len(piece)
                    async for piece in turns.yield_pieces(
                        iter_json_pieces(LazilyEncodedList([range(4 * SLICE_ITEMS)], shape))
                    )
                ]
            )

        counting = asyncio.create_task(count())
        assert min(await asyncio.gather(write(), write(), write())) > 400_000
        counting.cancel()
        assert max(made.count(turn) for turn in set(made)) == SLICE_ITEMS and len(set(made)) == 12

    asyncio.run(run())
