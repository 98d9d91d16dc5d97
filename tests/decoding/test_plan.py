"""Plans: what a row may feed, and where its columns stand; oracles are plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars.decoding.drafts import Draft, cut_drafts, merge_drafts
from mars.decoding.plan import (
    MOST_COLUMNS,
    RowPlan,
    choose_groups,
    lay_out,
    plan_exact,
    plan_threshold,
)

MASK = 3
drafts = st.lists(st.builds(Draft, st.integers(10, 13), st.floats(0, 1)), max_size=8)
layouts = st.sampled_from(["linear", "partial", "full"])


def drafts_of(*confidences: float) -> list[Draft]:
    return [Draft(10 + i, confidence) for i, confidence in enumerate(confidences)]


@given(drafts, drafts, st.integers(0, 16), st.integers(1, 20), layouts, st.integers(1, 5))
def test_an_exact_plan_fits_the_budget(
    masks: list[Draft], ngram: list[Draft], window: int, budget: int, layout, max_groups: int
) -> None:
    plan = plan_exact(
        cut_drafts(merge_drafts(masks, ngram), 0.0, budget - 1),
        window=window,
        budget=budget,
        layout=layout,
        max_groups=max_groups,
    )
    assert len(plan.drafts) <= budget - 1
    assert plan.num_masks <= max(plan.window, MOST_COLUMNS - 1 - len(plan.drafts))
    assert plan.window <= window
    assert list(plan.groups) == sorted(set(plan.groups))
    for length in plan.groups:
        assert 0 <= length <= len(plan.drafts)
        assert budget - length - 2 > 0, "its first draft could never be committed"
    if plan.groups:
        last = max(budget - length - 2 for length in plan.groups)
        assert 0 < plan.window <= last, "its last draft could never be committed"
    useful = [i for i in range(len(plan.drafts) + 1) if budget - i - 2 > 0] if window else []
    if layout == "linear":
        assert list(plan.groups) == [i for i in useful if i == len(plan.drafts)]
    elif layout == "full" and 1 + len(plan.drafts) + len(useful) * window <= MOST_COLUMNS:
        assert list(plan.groups) == useful
    else:
        assert len(plan.groups) <= max(max_groups, MOST_COLUMNS)


def test_the_partial_layout_takes_the_likeliest_lengths() -> None:
    drafts = drafts_of(0.9, 0.2, 0.9)  # 0.1, 0.72, 0.018, 0.162
    groups = choose_groups(range(4), drafts, window=2, layout="partial", max_groups=2)
    assert groups == (1, 3)


def test_even_the_full_layout_has_a_limit() -> None:
    drafts = drafts_of(*[0.9] * 8)
    assert len(choose_groups(range(9), drafts, window=2, layout="full", max_groups=1)) == 9
    groups = choose_groups(range(9), drafts, window=5, layout="full", max_groups=1)
    assert groups == (0, 1, 2, 8)
    assert len(choose_groups(range(9), drafts, window=99, layout="full", max_groups=1)) == 1


@pytest.mark.parametrize(
    ("window", "budget", "expected"), [(4, 9, 4), (4, 4, 3), (4, 1, 0), (0, 9, 0)]
)
def test_threshold_plans(window: int, budget: int, expected: int) -> None:
    assert plan_threshold(window=window, budget=budget).num_masks == expected


@st.composite
def fed_rows(draw: st.DrawFn) -> tuple[list[list[int]], list[RowPlan], list[int]]:
    tokens, plans, cached = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 9))
        num_drafts = draw(st.integers(0, 4))
        groups = sorted(draw(st.sets(st.integers(0, num_drafts), max_size=3)))
        window = draw(st.integers(1, 3)) if groups else draw(st.sampled_from([0, 2]))
        tokens.append([100 + i for i in range(length)])
        plans.append(RowPlan(tuple(range(200, 200 + num_drafts)), tuple(groups), window))
        cached.append(draw(st.integers(0, length - 1)))
    return tokens, plans, cached


@given(fed_rows())
def test_columns_stand_where_a_plain_loop_puts_them(rows: tuple) -> None:
    tokens, plans, cached = rows
    columns = lay_out(tokens, plans, cached, mask_token_id=MASK, max_positions=99)
    visible = columns.visible()[:, 0]
    assert columns.num_outputs == 1 + max(len(plan.drafts) for plan in plans)
    for b, (row, plan, start) in enumerate(zip(tokens, plans, cached, strict=True)):
        p, k = len(row), len(plan.drafts)
        # (token, position, slot, slots it sees), in the order of the columns
        expected = [
            (token, t, t, set(range(t + 1)))
            for t, token in enumerate([*row, *plan.drafts])
            if t >= start
        ]
        num_real, slot = len(expected), p + k
        for length in plan.groups:
            own: set[int] = set()
            for j in range(plan.window):
                own.add(slot)
                expected.append((MASK, p + length + j, slot, set(range(p + length)) | own))
                assert columns.offset_BT[b, columns.num_real + slot - p - k] == j
                slot += 1
        places = [*range(columns.num_real - num_real, columns.num_real + slot - p - k)]
        found = [
            (
                int(columns.token_BT[b, t]),
                int(columns.position_BT[b, t]),
                int(columns.slot_BT[b, t]),
                set(visible[b, t].nonzero().flatten().tolist()),
            )
            for t in places
        ]
        assert found == expected
        padding = [t for t in range(columns.token_BT.shape[1]) if t not in places]
        assert columns.slot_BT[b, padding].eq(-1).all()
        assert columns.position_BT[b, padding].eq(0).all()
        assert visible[b, padding].sum(-1).eq(1).all()


@given(fed_rows())
def test_moving_the_columns_changes_nothing(rows: tuple) -> None:
    columns = lay_out(*rows, mask_token_id=MASK, max_positions=99)
    moved = columns.to(torch.device("cpu"))
    for name in columns.__slots__:
        before, after = getattr(columns, name), getattr(moved, name)
        assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after


def test_masks_nobody_will_read_stay_below_the_last_position() -> None:
    columns = lay_out(
        [[5] * 9, [5] * 2],
        [RowPlan((1, 1), (0, 2), 4), RowPlan()],
        [8, 1],
        mask_token_id=MASK,
        max_positions=12,
    )
    assert columns.position_BT.max() == 11
    assert columns.slot_BT.max() == 18
    assert columns.num_slots == 19
