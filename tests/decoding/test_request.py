import pytest

from mars.decoding.drafts import Draft
from mars.decoding.options import DecodingOptions
from mars.decoding.plan import RowPlan
from mars.decoding.request import Progress, Request, TokenLogprob

THRESHOLD = {"mode": "threshold"}


def progress(
    window: int, max_new_tokens: int, settings: dict = THRESHOLD, **kwargs: object
) -> Progress:
    request = Request(
        prompt="p",
        prompt_ids=[7, 8],
        options=DecodingOptions(max_new_tokens=max_new_tokens, stop=("xb",), **settings),
        window=window,
        end_ids=frozenset({0}),
        decode=lambda ids: "".join(chr(96 + i) for i in ids if i),
        **kwargs,  # type: ignore[arg-type]
    )
    return Progress(request)


@pytest.mark.parametrize(("budget", "expected"), [(9, 4), (5, 4), (4, 3), (1, 0)])
def test_no_more_masks_than_the_budget_can_take(budget: int, expected: int) -> None:
    assert progress(4, budget).plan().num_masks == expected


def test_masks_shrink_with_the_budget() -> None:
    row = progress(4, 6)
    row.commit([1, 1, 1])
    assert row.plan() == RowPlan(groups=(0,), window=2)


@pytest.mark.parametrize(
    ("settings", "window", "mode", "entries"),
    [
        ({}, 4, "exact", 18),
        ({}, 20, "exact", 22),
        ({}, 0, "exact", 18),
        ({"ngram": False}, 4, "exact", 6),
        ({"ngram": False}, 0, "ar", 2),
        ({"mode": "ar"}, 0, "ar", 2),
        ({"mode": "threshold"}, 4, "threshold", 6),
    ],
)
def test_the_histogram_has_room_for_every_forward(
    settings: dict, window: int, mode: str, entries: int
) -> None:
    row = progress(window, 20, settings)
    assert row.request.mode == mode
    assert len(row.histogram) == entries


def test_an_exact_row_plans_with_the_drafts_of_both_sources() -> None:
    row = progress(2, 20, {"layout": "full"})
    assert row.plan() == RowPlan(), "the prompt is read as in `ar`"
    row.commit([1, 2, 3, 1, 2], [Draft(3, 0.9), Draft(1, 0.9)])
    assert row.plan().drafts == (3, 1, 2, 3)  # a match of two tokens proposes four
    assert row.plan().groups == (0, 1, 2, 3, 4)
    row.commit([9])
    assert row.plan().drafts == ()


def test_logprobs_end_with_the_text() -> None:
    row = progress(2, 3, {"logprobs": 1})
    logprobs = [TokenLogprob(token_id=i, logprob=-1.0, top={}) for i in range(1, 6)]
    row.commit([1], (), logprobs[:1])
    row.commit([2, 3, 4, 5], (), logprobs[1:])
    assert row.result(0.0, 0.0).logprobs == logprobs[:3]


def test_tokens_after_the_end_are_not_taken() -> None:
    row = progress(4, 9)
    assert row.commit([1, 24]) == "a"  # x may begin a stop string
    assert row.commit([3, 0, 5, 5]) == "xc"
    assert row.is_finished
    assert row.tokens == [7, 8, 1, 24, 3, 0]
    result = row.result(1.0, 2.0)
    assert result.token_ids == [1, 24, 3, 0]
    assert result.text == "axc"
    assert (result.finish_reason, result.stop_reason) == ("stop", 0)
    assert (result.forwards, result.tokens_per_forward) == (2, 2.0)
    assert result.acceptance_histogram == [0, 0, 2, 0, 0, 0]
    assert (result.prompt_tokens, result.seconds) == (2, 3.0)


def test_a_hook_ends_the_text() -> None:
    row = progress(4, 9, stop_hook=lambda tokens: tokens[-2:] == [1, 2])
    row.commit([2, 1, 2, 3])
    assert row.tokens == [7, 8, 2, 1, 2]
    assert (row.stop.finish_reason, row.stop.stop_reason) == ("stop", None)


def test_drafts_are_scored_up_to_the_first_wrong_one() -> None:
    row = progress(4, 20, {"ngram": False})
    row.commit([1], [Draft(2, 0.9), Draft(3, 0.8), Draft(4, 0.7), Draft(5, 0.6)])
    row.commit([2, 3, 9], [Draft(6, 0.5), Draft(7, 0.4)])
    row.commit([6], [Draft(8, 0.3)])  # nothing is known of the second draft
    assert row.outcomes == [(1, 0.9, True), (2, 0.8, True), (3, 0.7, False), (1, 0.5, True)]
