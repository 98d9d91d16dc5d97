import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars.decoding.drafts import (
    LONGEST_MATCH,
    SHORTEST_MATCH,
    Draft,
    NgramIndex,
    accept_probabilities,
    cut_drafts,
    merge_drafts,
)

tokens = st.lists(st.integers(0, 3), max_size=40)
drafts = st.lists(st.builds(Draft, st.integers(0, 3), st.floats(0, 1)), max_size=8)


def slow_lookup(text: list[int], limit: int) -> list[int]:
    """Search the text from its end for the longest ending that occurred before."""
    for n in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if len(text) >= n and text[end - n : end] == text[-n:]:
                longer = list(text)
                for _ in range(min(limit, 2 * n)):
                    longer.append(longer[end + len(longer) - len(text)])
                return longer[len(text) :]
    return []


@given(tokens, st.integers(0, 10))
def test_lookup_equals_a_search(text: list[int], limit: int) -> None:
    index = NgramIndex(text[:5])
    for token in text[5:]:
        index.push(token)
    assert [draft.token for draft in index.draft(limit)] == slow_lookup(text, limit)


def test_a_longer_match_is_trusted_more() -> None:
    short, long = NgramIndex([1, 2, 3, 9, 1, 2]), NgramIndex([1, 2, 3, 4, 5, 1, 2, 3, 4])
    assert [d.token for d in short.draft(9)] == [3, 9, 1, 2]
    assert [d.token for d in long.draft(9)] == [5, 1, 2, 3, 4, 5, 1, 2]
    # A right draft makes the match longer.
    two, *_ = (draft.confidence for draft in short.draft(9))
    four, five, *_ = (draft.confidence for draft in long.draft(9))
    assert two < four < five
    assert [d.confidence for d in short.draft(9)][2] == four
    assert NgramIndex([1]).draft(5) == NgramIndex([]).draft(5) == ()


@pytest.mark.parametrize(
    ("masks", "ngram", "expected"),
    [
        ([], [(1, 0.3)], [(1, 0.3)]),
        ([(1, 0.3)], [], [(1, 0.3)]),
        ([(1, 0.9), (2, 0.2)], [(1, 0.5), (2, 0.5), (3, 0.5)], [(1, 0.9), (2, 0.5), (3, 0.5)]),
        ([(1, 0.9), (2, 0.6)], [(1, 0.5), (3, 0.5), (4, 0.5)], [(1, 0.9), (2, 0.6)]),
        ([(1, 0.9), (2, 0.2)], [(1, 0.5), (3, 0.5), (4, 0.5)], [(1, 0.9), (3, 0.5), (4, 0.5)]),
        ([(1, 0.5)], [(2, 0.5)], [(1, 0.5)]),
    ],
)
def test_merging(masks: list, ngram: list, expected: list) -> None:
    assert list(merge_drafts([Draft(*d) for d in masks], [Draft(*d) for d in ngram])) == expected


@given(drafts, drafts)
def test_merged_drafts_are_those_of_one_source(masks: list[Draft], ngram: list[Draft]) -> None:
    merged = [draft.token for draft in merge_drafts(masks, ngram)]
    assert merged in ([d.token for d in masks], [d.token for d in ngram])
    assert bool(merged) == bool(masks or ngram)


@given(drafts, st.floats(0, 1), st.integers(-1, 9), drafts)
def test_a_cut_looks_at_nothing_behind_it(
    some: list[Draft], bound: float, limit: int, more: list[Draft]
) -> None:
    kept = cut_drafts(some, bound, limit)
    assert list(kept) == some[: len(kept)]
    assert len(kept) <= max(0, limit)
    survivals = list(itertools.accumulate((d.confidence for d in some), lambda a, b: a * b))
    assert all(survival >= bound for survival in survivals[: len(kept)])
    if len(kept) < min(len(some), limit):
        assert survivals[len(kept)] < bound
    assert cut_drafts(some + more, bound, limit)[: len(kept)] == kept
    assert list(cut_drafts(some, 0.0, 99)) == some


@given(drafts)
def test_accept_probabilities_are_a_distribution(some: list[Draft]) -> None:
    probabilities = accept_probabilities(some)
    assert len(probabilities) == len(some) + 1
    assert min(probabilities) >= 0
    assert math.isclose(sum(probabilities), 1.0)
    expected = sum(i * p for i, p in enumerate(probabilities))
    survivals = itertools.accumulate((d.confidence for d in some), lambda a, b: a * b)
    assert math.isclose(expected, sum(survivals), abs_tol=1e-9)
