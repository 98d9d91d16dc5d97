"""The planner feeds what pays, keeps to the budget, and looks away where nothing does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars.decoding.clock import Clock
from mars.decoding.drafts import Draft
from mars.decoding.forecast import Forecast
from mars.decoding.plan import MOST_COLUMNS, RowPlan
from mars.decoding.planner import (
    _ALLOWANCE,
    _CHECK_EVERY,
    _CREDIT,
    _FIRST_MASKS,
    _LOOKING,
    _PROBE_EVERY,
    Candidate,
    Planner,
)
from mars.engine.step_times import Seconds, StepTimes


def made_up(table: dict[int, dict[int, float]], masks: dict[int, float] | None = None) -> StepTimes:
    return StepTimes({rows: Seconds(drafts, masks or {}) for rows, drafts in table.items()})


FREE = made_up({1: {0: 1.0, 256: 1.0}, 64: {0: 1.0, 256: 1.0}})
DEAR = made_up({1: {0: 1.0, 256: 257.0}, 64: {0: 64.0, 256: 320.0}})  # a column costs a token
drafts = st.lists(st.builds(Draft, st.integers(10, 13), st.floats(0.01, 0.99)), max_size=8)


@pytest.fixture(autouse=True)
def cheap_columns() -> None:
    """Let the planner's clock run: here the times are made up."""


def times(fixed: float, column: float) -> StepTimes:
    return made_up(
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


def test_one_row_gets_masks_now_and_then_where_they_have_not_paid() -> None:
    rows = [candidate(forecast=Forecast(survival=[0.01] * 4)) for _ in range(3)]
    planner, probes = ready(times(1.0, 0.02)), []
    for number in range(4 * _PROBE_EVERY):
        plans = planner.plan(rows)
        masks = [plan.num_masks for plan in plans]
        if any(masks):
            probes.append(number)
            assert sorted(masks) == [0, 0, _FIRST_MASKS]
        for row, plan in zip(rows, plans, strict=True):
            row.forecast.learn([], 0, [Draft(1, 0.01)] if plan.num_masks else [])
        planner.learn(plans, 3, 1.06 + 0.02 * sum(masks))
    assert len(probes) == 3
    for row in rows:
        row.forecast.idle = 0
    assert planner.plan(rows) == [RowPlan()] * 3


def test_only_so_many_drafts_are_fed_as_the_next_jump_in_time_allows() -> None:
    """16 columns cost as much as one, 17 much more."""
    steps = made_up({1: {0: 1.0, 15: 1.01, 16: 9.0, 256: 20.0}, 8: {0: 1.0, 8: 1.01, 9: 9.0}})
    planner = ready(steps)
    assert len(planner.plan([candidate(*[0.99] * 24, window=0)])[0].drafts) == 15
    rows = [candidate(0.9, 0.9, window=0), candidate(0.5, 0.4, window=0)] * 4
    plans = planner.plan(rows)
    assert [len(plan.drafts) for plan in plans] == [2, 0] * 4, "the likeliest"


def test_masks_are_not_fed_where_the_first_costs_too_much() -> None:
    curve = {1: {0: 1.0, 256: 1.5}, 64: {0: 1.0, 256: 1.5}}
    (plan,) = ready(made_up(curve)).plan([candidate(0.9, 0.9)])
    assert plan.drafts
    assert plan.num_masks > 0
    (plan,) = ready(made_up(curve, {1: 9.0, 4: 9.1})).plan([candidate(0.9, 0.9)])
    assert plan.drafts
    assert plan.num_masks == 0


def test_where_nobody_follows_drafts_must_bring_more() -> None:
    rows = [candidate(0.6, window=0)] * 16
    planner = ready(times(1.0, 0.04))  # a column costs 0.4 tokens
    assert planner.plan(rows) == [RowPlan((10,))] * 16
    planner.is_closing = True
    assert planner.plan(rows) == [RowPlan()] * 16
    assert planner.plan(rows[:1]) == [RowPlan((10,))], "the last one saves whole forwards"


def test_padding_is_paid_for() -> None:
    """One row of eight has drafts: without padding eight columns more, with it 64."""
    rows = [candidate(*[0.99] * 8, window=0), *[candidate(window=0)] * 7]
    for has_padding, fed in ((False, 8), (True, 0)):
        planner = Planner(times(1.0, 0.05), has_padding=has_padding)
        planner._clock.is_set = True
        plans = planner.plan(rows)
        assert [len(plan.drafts) for plan in plans] == [fed, *[0] * 7]
    rows = [candidate(*[0.99] * 8, window=0)] * 8
    planner = Planner(times(1.0, 0.05), has_padding=True)
    planner._clock.is_set = True
    assert [len(plan.drafts) for plan in planner.plan(rows)] == [8] * 8


def test_the_price_rises_with_the_rows_that_share_a_forward() -> None:
    table = {1: {0: 1.0, 32: 1.2}, 64: {0: 2.0, 256: 20.0}}
    row = candidate(0.5, 0.5)
    alone = ready(made_up(table)).plan([row])
    together = ready(made_up(table)).plan([row] * 64)
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
    clock = Clock(times(1.0, 0.1).seconds)
    assert clock.all(1, 5) == pytest.approx(1.5)
    clock.note(1, 1, 0, 0.55)  # the table is of a busy hour
    assert clock.alone(1) == pytest.approx(0.55)
    assert clock.alone(4) == pytest.approx(0.7)
    for _ in range(200):
        clock.note(1, 5, 0, 0.75)
    assert clock.slope(0) == pytest.approx(0.5, rel=0.1)
    assert clock.slope(1) == 1, "forwards with masks are another matter"
    assert clock.all(1, 5) == pytest.approx(0.75, rel=0.05)


def test_a_busy_start_is_forgotten_and_a_stall_counts_little() -> None:
    clock = Clock(times(1.0, 0.05).seconds)
    clock.note(1, 1, 0, 2.1)  # something else was going on
    for _ in range(10):
        clock.note(1, 1, 0, 1.05)
    assert clock.alone(1) == pytest.approx(1.05, rel=0.1)
    before = clock.alone(1)
    clock.note(1, 1, 0, 50.0)
    assert before < clock.alone(1) < 1.1 * before


def test_where_it_is_unclear_whether_drafts_pay_it_measures_again() -> None:
    for committed, most in ((1.5, _CHECK_EVERY), (3, 100)):
        planner, fed = ready(times(1.0, 0.2)), 0
        planner._account = 5.0 if committed < 2 else 29.0
        for number in range(100):
            (plan,) = planner.plan([candidate(0.9, 0.9)])
            if not plan.drafts:
                break
            fed += 1
            columns = 1 + len(plan.drafts) + plan.num_masks
            planner.learn([plan], int(committed + number % 2 / 2), 1.0 + 0.2 * columns)
        assert fed == most


def test_planning_is_part_of_what_drafts_cost() -> None:
    planner = ready(times(1.0, 0.05))
    for _ in range(9):
        (plan,) = planner.plan([candidate(0.9, 0.9)])
        assert plan.drafts
        planner.learn([plan], 2, 1.05 + 0.05 * (len(plan.drafts) + plan.num_masks), planning=1.5)
        if planner.is_pausing():
            break
    assert planner.is_pausing()


def test_planning_that_feeds_nothing_costs_too() -> None:
    planner, asked = ready(DEAR), 0
    for _ in range(1000):
        pauses = planner.is_pausing()
        asked += not pauses
        planner.learn([RowPlan()], 1, 2.0, planning=0.0 if pauses else 0.1)
    assert 0.1 * asked / 2.0 <= _CREDIT + 1000 * _ALLOWANCE + 0.1


def test_rows_that_have_nothing_to_feed_are_asked_less_often() -> None:
    planner, asked = ready(DEAR), []
    for number in range(60):
        if number == 40:
            planner.welcome(1, 10)
        if not planner.is_pausing():
            asked.append(number)
            assert planner.plan([candidate(0.1, window=0)]) == [RowPlan()]
        planner.learn([RowPlan()], 1, 1.0, planning=8.5 * _LOOKING)
    assert asked[:7] == [0, 1, 3, 7, 15, 23, 31]
    assert asked[asked.index(40) :][:3] == [40, 41, 43]


def test_asking_that_takes_no_time_goes_on() -> None:
    planner = ready(DEAR)
    for _ in range(60):
        assert not planner.is_pausing()
        planner.plan([candidate(0.1, window=0)])
        planner.learn([RowPlan()], 1, 2.0)


def test_rows_are_asked_every_time_where_drafts_have_paid() -> None:
    planner = ready(times(1.0, 0.05))
    planner.learn([RowPlan((1, 1))], 3, 1.15)
    for _ in range(20):
        assert not planner.is_pausing()
        planner.plan([candidate(0.01, window=0)])
        planner.learn([RowPlan()], 1, 1.05, planning=8.5 * _LOOKING * 1.05)


@pytest.mark.parametrize(("rows", "pauses"), [(1, False), (16, True)])
def test_many_rows_may_lose_less(rows: int, pauses: bool) -> None:
    table = times(1.0, 0.01)
    planner, alone = Planner(table), table.seconds(rows, rows)
    planner.learn([RowPlan()] * rows, rows, alone)
    for _ in range(4):  # a quarter of a forward each, and no draft is right
        plans = [RowPlan((1,) * 4)] * rows
        expected = table.seconds(rows, 5 * rows)
        planner.learn(plans, rows, expected, 1.25 * alone - expected)
    assert planner.is_pausing() == pauses


@pytest.mark.parametrize("has_padding", [False, True])
def test_a_dear_probe_of_masks_waits(has_padding: bool) -> None:
    table, rows = times(1.0, 0.02), [candidate(forecast=Forecast(survival=[0.01] * 4))] * 8
    planner = Planner(table, has_padding=has_padding)
    planner.learn([RowPlan()] * 8, 8, table.seconds(8, 8))
    rows[0].forecast.idle = 1
    probed = None
    for number in range(400):
        plans = planner.plan(rows)
        if any(plan.num_masks for plan in plans):
            probed = number
            break
        planner.learn(plans, 8, table.seconds(8, 8))
    columns = 8 * (1 + _FIRST_MASKS) if has_padding else 8 + _FIRST_MASKS
    price = table.seconds(8, columns) / table.seconds(8, 8) - 1
    assert probed is not None
    assert abs(probed - max(_PROBE_EVERY, price / _LOOKING)) <= 2


def test_rows_with_plans_of_their_own_do_not_keep_it_from_starting() -> None:
    fixed = [RowPlan((1,), (), 0)]
    assert Planner(FREE).plan([candidate(0.9)]) == [RowPlan()]
    (plan,) = Planner(FREE).plan([candidate(0.9)], fixed)
    assert plan.drafts


@given(
    st.lists(st.integers(1, 3), min_size=300, max_size=300),
    st.floats(0.0, 0.1),
    st.floats(0.001, 0.3),
)
def test_it_costs_no_more_than_it_may(committed: list[int], planning: float, column: float) -> None:
    """Whatever is right, the account is the time against that of forwards that feed nothing.

    Here all rows believe in their drafts, so that only the account keeps the planner from feeding.
    """
    planner, spent, tokens = ready(times(1.0, column)), 0.0, 0
    alone, dearest = 1.0 + column, 0.0
    for number in committed:
        if planner.is_pausing():
            plan, said, asked = RowPlan(), 1, 0.0
        else:
            (plan,) = planner.plan([candidate(0.9, 0.9)])
            said, asked = min(number, 1 + len(plan.drafts)), planning
        seconds = alone + column * (len(plan.drafts) + plan.num_masks)
        dearest = max(dearest, seconds + asked)
        planner.learn([plan], said, seconds, asked)
        spent, tokens = spent + seconds + asked, tokens + said
        # One forward more may be on its way when the account is found empty.
        most = tokens * alone + (_CREDIT + _ALLOWANCE * len(committed)) * alone + dearest
        assert spent <= most


def test_it_tries_again_later() -> None:
    planner, fed = ready(times(1.0, 0.05)), []
    for number in range(2000):
        if planner.is_pausing():
            planner.learn([RowPlan()], 1, 1.05)
            continue
        (plan,) = planner.plan([candidate(0.9, 0.9)])
        if plan.drafts:
            fed.append(number)
        planner.learn([plan], 1, 1.05 + 0.05 * (len(plan.drafts) + plan.num_masks))
    assert 3 < len(fed) < 100
    assert fed[-1] > 1000


def test_it_does_not_rest_where_they_pay() -> None:
    planner = ready(times(1.0, 0.05))
    for _ in range(100):
        assert not planner.is_pausing()
        (plan,) = planner.plan([candidate(0.9, 0.9)])
        assert plan.drafts
        planner.learn([plan], 3, 1.05 + 0.05 * (len(plan.drafts) + plan.num_masks))
    # Some bad luck after that does not end it.
    for _ in range(5):
        (plan,) = planner.plan([candidate(0.9, 0.9)])
        planner.learn([plan], 1, 1.05 + 0.05 * (len(plan.drafts) + plan.num_masks))
        assert not planner.is_pausing()


def test_new_rows_end_a_rest_sooner() -> None:
    planner = ready(DEAR)
    planner.learn([RowPlan((1, 1))], 1, 9.0)
    planner.learn([RowPlan((1, 1))], 1, 9.0)
    assert planner.is_pausing()
    rest = 0
    while planner.is_pausing():
        planner.learn([RowPlan()], 1, 2.0)
        rest += 1
    planner.learn([RowPlan((1, 1))], 1, 9.0)
    planner.learn([RowPlan((1, 1))], 1, 9.0)
    waited = 0
    while planner.is_pausing():
        planner.learn([RowPlan()], 1, 2.0)
        waited += 1
        planner.welcome(int(waited % 20 == 0), 1)
    assert waited < rest / 2


@pytest.mark.parametrize(("temperature", "most"), [(0.0, _FIRST_MASKS), (2.0, 0), (1e300, 0)])
def test_a_row_starts_without_masks_where_hardly_a_draft_can_be_right(
    temperature: float, most: int
) -> None:
    forecast = Forecast.at_temperature(temperature)
    (plan,) = ready(times(1.0, 0.05)).plan([candidate(forecast=forecast)])
    assert plan.window == most
    forecast.learn((), 0, [Draft(1, 0.9)])
    assert forecast.at(0) > 0.25, "it is a prior only"


def test_the_prior_is_what_was_measured() -> None:
    for temperature, share in ((0.0, 1.0), (0.7, 0.8), (1.0, 0.5), (1.3, 0.2), (2.0, 0.01)):
        forecast = Forecast.at_temperature(temperature)
        assert forecast.at(0) / Forecast().at(0) == pytest.approx(share, abs=0.1)


def test_a_row_starts_with_few_masks() -> None:
    planner, row = ready(FREE), candidate(0.5, 0.5, forecast=Forecast())
    (plan,) = planner.plan([row])
    assert plan.window <= _FIRST_MASKS
    assert len(plan.groups) <= _FIRST_MASKS
    row.forecast.learn(row.drafts, 1, row.drafts)
    (plan,) = planner.plan([row])
    assert plan.window == 4
