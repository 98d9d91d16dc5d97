"""The planner feeds what pays, keeps to the budget, and looks away where nothing does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars.decoding.drafts import Draft
from mars.decoding.plan import MOST_COLUMNS, RowPlan
from mars.decoding.planner import (
    _CHECK_EVERY,
    _FIRST_MASKS,
    _PATIENCE,
    _PAUSES,
    _PROBE_EVERY,
    _TRIES,
    Candidate,
    Forecast,
    Planner,
    _Clock,
)
from mars.engine.step_times import StepTimes

FREE = StepTimes({1: {0: 1.0, 256: 1.0}, 64: {0: 1.0, 256: 1.0}})
DEAR = StepTimes({1: {0: 1.0, 256: 257.0}, 64: {0: 64.0, 256: 320.0}})  # a column costs a token
drafts = st.lists(st.builds(Draft, st.integers(10, 13), st.floats(0.01, 0.99)), max_size=8)


@pytest.fixture(autouse=True)
def cheap_columns() -> None:
    """Let the planner's clock run: here the times are made up."""


def times(fixed: float, column: float) -> StepTimes:
    return StepTimes(
        {rows: {0: fixed + column * rows, 256: fixed + column * (rows + 256)} for rows in (1, 64)}
    )


def candidate(
    *confidences: float, window: int = 4, budget: int = 50, forecast: Forecast | None = None
) -> Candidate:
    made = tuple(Draft(10 + i, confidence) for i, confidence in enumerate(confidences))
    proven = Forecast(expected=1.0, accepted=1.0)
    return Candidate(made, window, budget, forecast or proven)


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    forecast = Forecast()
    for _ in range(draw(st.integers(0, 3))):
        fed = draw(drafts)
        forecast.learn(fed, draw(st.integers(0, len(fed))), draw(drafts)[:4])
        forecast.see(draw(drafts))
    return Candidate(
        tuple(draw(drafts)), draw(st.integers(0, 8)), draw(st.integers(1, 12)), forecast
    )


def ready(times: StepTimes) -> Planner:
    """Return a planner that has seen a forward without drafts: the first one is always such."""
    planner = Planner(times)
    assert planner.plan([candidate(0.9)]) == [RowPlan()]
    planner.learn([RowPlan()], 1, times.seconds(1, 1))
    planner._idle = 0
    return planner


@given(st.lists(candidates(), min_size=1, max_size=4), st.floats(0.01, 10), st.floats(0, 1))
def test_a_plan_fits_the_budget(rows: list[Candidate], fixed: float, column: float) -> None:
    plans = ready(times(fixed, column)).plan(rows)
    for row, plan in zip(rows, plans, strict=True):
        assert len(plan.drafts) <= row.budget - 1
        assert plan.drafts == tuple(draft.token for draft in row.drafts)[: len(plan.drafts)]
        assert 1 + len(plan.drafts) + plan.num_masks <= max(MOST_COLUMNS, 1 + plan.window)
        assert plan.window <= row.window
        assert list(plan.groups) == sorted(set(plan.groups))
        assert bool(plan.groups) == (plan.window > 0)
        for length in plan.groups:
            assert 0 <= length <= len(plan.drafts)
            assert row.budget - length - 2 > 0, "its first draft could never be committed"


def test_everything_is_fed_where_columns_are_free() -> None:
    (plan,) = ready(FREE).plan([candidate(0.5, 0.5)])
    assert plan == RowPlan((10, 11), (0, 1, 2), 4)


def test_nothing_is_fed_where_a_column_costs_a_token() -> None:
    assert ready(DEAR).plan([candidate(0.9, 0.9)] * 3) == [RowPlan()] * 3


def test_what_is_fed_falls_with_the_price() -> None:
    columns = []
    for price in (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 5.0):
        (plan,) = ready(times(1.0, price)).plan([candidate(0.7, 0.7, 0.7, 0.7)])
        columns.append(len(plan.drafts) + plan.num_masks)
    assert columns == sorted(columns, reverse=True)
    assert columns[0] > columns[3] > columns[-1] == 0


def test_likely_accept_lengths_get_the_groups() -> None:
    (plan,) = ready(times(1.0, 0.06)).plan([candidate(0.95, 0.95, 0.95)])
    assert plan.groups == (3,)
    (plan,) = ready(times(1.0, 0.06)).plan([candidate(0.1)])
    assert plan.groups == (0,)


def test_drafts_that_turn_out_wrong_lose_trust() -> None:
    forecast, fed = Forecast(), [Draft(1, 0.8)] * 4
    for _ in range(20):
        forecast.learn(fed, 0, fed)
    assert forecast.trust < 0.1
    planner = ready(times(1.0, 0.05))
    (doubted,) = planner.plan([candidate(*[0.8] * 4, forecast=forecast)])
    (trusted,) = planner.plan([candidate(*[0.8] * 4)])
    assert len(doubted.drafts) + doubted.num_masks < len(trusted.drafts) + trusted.num_masks
    for _ in range(60):
        forecast.learn(fed, 4, fed)
    assert forecast.trust > 1


def test_masks_are_worth_less_where_the_text_repeats_itself() -> None:
    forecast = Forecast()
    before = forecast.worth(0)
    for _ in range(60):
        forecast.see([Draft(1, 0.9)] * 4)
    assert forecast.worth(0) < 0.2 * before


def test_a_row_without_masks_gets_some_now_and_then() -> None:
    forecast = Forecast(survival=[0.01] * 4)
    planner = ready(times(1.0, 0.02))
    assert planner.plan([candidate(forecast=forecast)]) == [RowPlan()]
    for _ in range(_PROBE_EVERY):
        forecast.learn([], 0, [])
    assert planner.plan([candidate(forecast=forecast)])[0].num_masks > 0
    forecast.learn([], 0, [Draft(1, 0.5)])
    assert forecast.idle == 0


def test_it_looks_away_where_nothing_pays_longer_each_time_and_back_again() -> None:
    planner, pauses = ready(DEAR), []
    for _ in range(7):
        for _ in range(_PATIENCE):
            assert not planner.is_pausing(1)
            planner.plan([candidate(0.9)])
        pauses.append(0)
        while planner.is_pausing(1):
            pauses[-1] += 1
        planner.plan([candidate(0.9)])  # the forward that ended the pause
        planner._idle = 0
    assert pauses == [length - 1 for length in (16, 32, 64, 128, 256, 256, 256)]


def test_a_pause_ends_when_rows_leave() -> None:
    planner = ready(DEAR)
    for _ in range(_PATIENCE):
        planner.plan([candidate(0.9)] * 8)
    assert planner.is_pausing(8)
    assert planner.is_pausing(7)
    assert not planner.is_pausing(6)
    assert not planner.is_pausing(8)


def test_the_price_rises_with_the_rows_that_share_a_forward() -> None:
    table = {1: {0: 1.0, 32: 1.2}, 64: {0: 2.0, 256: 20.0}}
    row = candidate(0.5, 0.5)
    alone = ready(StepTimes(table)).plan([row])
    together = ready(StepTimes(table)).plan([row] * 64)
    assert alone[0].num_masks > 0
    assert together == [RowPlan()] * 64


def test_fixed_plans_beside_count() -> None:
    planner = ready(times(0.01, 1.0))
    assert planner.plan([candidate(0.5)], [RowPlan((1,) * 8, (0, 1), 4)] * 2) == [RowPlan()]


def test_learning_raises_the_price() -> None:
    planner = ready(times(1.0, 0.05))
    before = planner.plan([candidate(*[0.7] * 4)])[0]
    for _ in range(100):
        planner.learn([before], 8, None)
    after = planner.plan([candidate(*[0.7] * 4)])[0]
    assert after.num_masks + len(after.drafts) < before.num_masks + len(before.drafts)


@pytest.mark.parametrize("offset", [0, 3, 5])
def test_offsets_beyond_what_was_seen_are_worth_less(offset: int) -> None:
    assert 0 < Forecast().at(offset + 1) < Forecast().at(offset) < 1


def test_times_are_corrected_by_those_that_were_measured() -> None:
    clock = _Clock(times(1.0, 0.1))
    assert clock.all(1, 5) == pytest.approx(1.5)
    clock.note(1, 1, 0.55)  # the table is of a busy hour
    assert clock.alone(1) == pytest.approx(0.55)
    assert clock.alone(4) == pytest.approx(0.7)
    for _ in range(200):
        clock.note(1, 5, 0.75)
    assert clock.slope == pytest.approx(0.5, rel=0.1)
    assert clock.all(1, 5) == pytest.approx(0.75, rel=0.05)


def test_what_was_faster_is_believed_at_once() -> None:
    clock = _Clock(times(1.0, 0.05))
    clock.note(1, 1, 2.1)  # something else was going on
    clock.note(1, 1, 1.05)
    assert clock.alone(1) == pytest.approx((2.1 + 1.05) / 2)
    clock.note(1, 1, 2.1)
    assert clock.alone(1) < 1.7


@pytest.mark.parametrize(("committed", "most"), [(1, _CHECK_EVERY), (3, 100)])
def test_where_it_is_unclear_whether_drafts_pay_it_measures_again(
    committed: int, most: int
) -> None:
    """Half of the forwards commit a draft: that is a little more than drafts cost here."""
    planner, fed = ready(times(1.0, 0.2)), 0
    for number in range(100):
        (plan,) = planner.plan([candidate(0.9, 0.9)])
        if not plan.drafts:
            break
        fed += 1
        columns = 1 + len(plan.drafts) + plan.num_masks
        planner.learn([plan], committed + number % 2, 1.0 + 0.2 * columns)
    assert fed == most


def test_planning_is_part_of_what_drafts_cost() -> None:
    planner = ready(times(1.0, 0.05))
    for _ in range(2 * _TRIES):
        (plan,) = planner.plan([candidate(0.9, 0.9)])
        if not plan.drafts or planner.is_pausing(1):
            break
        planner.learn([plan], 2, 1.05 + 0.05 * (len(plan.drafts) + plan.num_masks), planning=1.5)
    assert planner.is_pausing(1)


def test_rows_with_plans_of_their_own_do_not_keep_it_from_starting() -> None:
    fixed = [RowPlan((1,), (), 0)]
    assert Planner(FREE).plan([candidate(0.9)]) == [RowPlan()]
    (plan,) = Planner(FREE).plan([candidate(0.9)], fixed)
    assert plan.drafts


def test_it_rests_where_drafts_do_not_pay_in_the_end() -> None:
    planner, fed = ready(times(1.0, 0.05)), 0
    for _ in range(100):
        if planner.is_pausing(1):
            planner.learn([RowPlan()], 1, 1.05)
            continue
        (plan,) = planner.plan([candidate(0.9, 0.9)])
        fed += bool(plan.drafts)
        planner.learn([plan], 1, 1.05 + 0.05 * (len(plan.drafts) + plan.num_masks))
    assert fed <= 3 * _TRIES
    assert planner._next_pause > _PAUSES[0]


def test_it_does_not_rest_where_they_pay() -> None:
    planner = ready(times(1.0, 0.05))
    for _ in range(100):
        assert not planner.is_pausing(1)
        (plan,) = planner.plan([candidate(0.9, 0.9)])
        assert plan.drafts
        planner.learn([plan], 3, 1.05 + 0.05 * (len(plan.drafts) + plan.num_masks))


def test_new_rows_end_a_pause() -> None:
    planner = ready(DEAR)
    for _ in range(_PATIENCE):
        planner.plan([candidate(0.9)] * 8)
    assert planner.is_pausing(8)
    assert planner.is_pausing(8, new=1)
    assert not planner.is_pausing(8, new=2)


def test_a_row_starts_with_few_masks() -> None:
    planner, row = ready(FREE), candidate(0.5, 0.5, forecast=Forecast())
    (plan,) = planner.plan([row])
    assert plan.window <= _FIRST_MASKS
    assert len(plan.groups) <= _FIRST_MASKS
    row.forecast.learn(row.drafts, 1, row.drafts)
    (plan,) = planner.plan([row])
    assert plan.window == 4
