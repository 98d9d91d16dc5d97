import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars.decoding.accept import is_confident, leading_run


def confident(probabilities: list[float], threshold: float, metric: str) -> bool:
    logits = torch.tensor(probabilities).log()
    return bool(is_confident(logits, torch.tensor(threshold), metric))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metric", "passing", "failing"),
    [
        ("probability", 0.69, 0.71),
        ("margin", 0.49, 0.51),
        ("entropy", 0.81, 0.80),  # -(.7 ln .7 + .2 ln .2 + .1 ln .1) = 0.8018
    ],
)
def test_metrics_on_a_known_distribution(metric: str, passing: float, failing: float) -> None:
    assert confident([0.7, 0.2, 0.1], passing, metric)
    assert not confident([0.7, 0.2, 0.1], failing, metric)


@pytest.mark.parametrize("metric", ["probability", "margin", "entropy"])
def test_excluded_tokens_have_no_part(metric: str) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    padded = torch.tensor([2.0, -math.inf, 1.0, 0.0, -math.inf])
    for threshold in torch.linspace(0, 1.2, 49):
        assert is_confident(logits, threshold, metric) == is_confident(padded, threshold, metric)  # type: ignore[arg-type]


def test_bfloat16_logits_are_not_rounded_to_certainty() -> None:
    # In bfloat16 the softmax of these is exactly 1 and would pass any threshold.
    logits = torch.tensor([8.0, 0.0, 0.0], dtype=torch.bfloat16)
    assert logits.softmax(-1)[0] == 1
    assert not is_confident(logits, torch.tensor(0.9995), "probability")
    assert is_confident(logits, torch.tensor(0.9990), "probability")


def test_rows_have_their_own_threshold() -> None:
    logits = torch.tensor([0.7, 0.3]).log().expand(2, 3, 2)
    thresholds = torch.tensor([[0.6], [0.8]])
    assert is_confident(logits, thresholds, "probability").tolist() == [[True] * 3, [False] * 3]


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1), st.data())
def test_leading_run_equals_a_plain_loop(rows: list[list[bool]], data: st.DataObject) -> None:
    limits = data.draw(st.lists(st.integers(0, 6), min_size=len(rows), max_size=len(rows)))
    expected = []
    for row, limit in zip(rows, limits, strict=True):
        run = 0
        while run < min(len(row), limit) and row[run]:
            run += 1
        expected.append(run)
    assert leading_run(torch.tensor(rows), torch.tensor(limits)).tolist() == expected


def test_no_drafts_no_run() -> None:
    assert leading_run(torch.zeros(2, 0, dtype=torch.bool), torch.tensor([3, 0])).tolist() == [0, 0]
