import pytest

from mars.decoding.options import DecodingOptions
from mars.decoding.request import Progress, Request


def progress(window: int, max_new_tokens: int, **kwargs: object) -> Progress:
    request = Request(
        prompt="p",
        prompt_ids=[7, 8],
        options=DecodingOptions(max_new_tokens=max_new_tokens, stop=("xb",)),
        window=window,
        end_ids=frozenset({0}),
        decode=lambda ids: "".join(chr(96 + i) for i in ids if i),
        **kwargs,  # type: ignore[arg-type]
    )
    return Progress(request)


@pytest.mark.parametrize(("budget", "expected"), [(9, 4), (5, 4), (4, 3), (1, 0)])
def test_no_more_drafts_than_the_budget_can_take(budget: int, expected: int) -> None:
    assert progress(4, budget).max_drafts == expected


def test_drafts_shrink_with_the_budget() -> None:
    row = progress(4, 6)
    row.commit([1, 1, 1])
    assert row.max_drafts == 2


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
