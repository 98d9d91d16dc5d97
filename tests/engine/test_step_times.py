"""The table of step times: measured once, kept on disk, straight lines between its entries."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars.decoding.plain import decide_made_up
from mars.engine.step_times import StepTimes, _Stopwatch, step_times
from tests.conftest import make_model

TABLE = {1: {0: 1.0, 2: 2.0, 4: 1.5}, 4: {0: 3.0, 8: 5.0}, 8: {0: 7.0}}


@pytest.mark.parametrize(
    ("rows", "columns", "seconds"),
    [
        (1, 1, 1.0),
        (1, 2, 1.5),
        (1, 3, 2.0),
        (1, 5, 2.0),  # a table never falls
        (1, 9, 2.0),
        (4, 4, 3.0),
        (4, 16, 6.0),  # goes on beyond the last entry
        (2, 2, 1.0 + 2.0 / 3),
        (8, 99, 7.0),
        (6, 6, 5.0),
        (12, 12, 11.0),
    ],
)
def test_between_entries_lie_straight_lines(rows: int, columns: int, seconds: float) -> None:
    assert StepTimes(TABLE).seconds(rows, columns) == pytest.approx(seconds)


@given(st.integers(1, 40), st.integers(0, 300))
def test_more_columns_never_take_less(rows: int, extra: int) -> None:
    times = StepTimes({1: {0: 1.0, 9: 3.0, 99: 2.0}, 16: {0: 2.0, 64: 9.0}})
    assert times.seconds(rows, rows + extra + 1) >= times.seconds(rows, rows + extra) > 0


def test_what_is_known_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARS_HOME", str(tmp_path))
    model, calls = make_model(), []

    def measure(rows: int, extra: int) -> float:
        calls.append((rows, extra))
        return rows + 0.1 * extra

    assert step_times(model, 1, decide_made_up, measure=measure).seconds(1, 1) == 1
    assert {rows for rows, _ in calls} == {1}
    calls.clear()
    step_times(model, 3, decide_made_up, measure=measure)
    assert {rows for rows, _ in calls} == {2, 4}
    calls.clear()
    assert step_times(model, 4, decide_made_up, measure=measure).seconds(4, 4) == 4
    assert not calls
    step_times(make_model(hidden_size=64), 1, decide_made_up, measure=measure)
    assert calls, "another model, another table"
    for path in (tmp_path / "step-times").iterdir():
        path.write_text("{")
    calls.clear()
    step_times(model, 1, decide_made_up, measure=measure)
    assert calls, "a damaged file is replaced"


def test_without_a_writable_folder_it_is_measured_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MARS_HOME", str(blocked))
    times = step_times(make_model(), 1, decide_made_up, measure=lambda rows, extra: 1.0)
    assert times.seconds(1, 1) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stopwatch_measures_real_forwards(dtype: torch.dtype) -> None:
    stopwatch = _Stopwatch(make_model().to(dtype), decide_made_up)
    assert stopwatch(1, 0) > 0
    assert stopwatch(2, 7) > 0
    assert stopwatch(2, 31) > 0
