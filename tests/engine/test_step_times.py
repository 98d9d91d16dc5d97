"""The table of step times: measured once, kept on disk, straight lines between its entries."""

import json
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from mars.decoding.plain import decide_made_up
from mars.engine.step_times import (
    _FEW_REPEATS,
    Seconds,
    StepTimes,
    _Stopwatch,
    step_times,
)
from tests.conftest import make_model

TABLE = {
    1: Seconds({0: 1.0, 2: 2.0, 4: 1.5}, {1: 1.5, 4: 3.5}),
    4: Seconds({0: 3.0, 8: 5.0}, {4: 4.5}),
    8: Seconds({0: 7.0}, {}),
}


@pytest.mark.parametrize(
    ("rows", "columns", "seconds"),
    [
        (1, 1, 1.0),
        (1, 2, 1.25),
        (1, 3, 1.5),  # a table never falls: what took longer was disturbed
        (1, 5, 1.5),
        (1, 9, 1.5),
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


@pytest.mark.parametrize(
    ("rows", "columns", "masks", "seconds"),
    [
        (1, 2, 1, 1.5),
        (1, 5, 1, 1.5 + 0.25),  # a mask takes 0.25 more than a draft
        (1, 5, 4, 3.5),
        (1, 4, 3, 1.5 + 0.25 + (2.0 - 0.25) * 2 / 3),
        (1, 9, 7, 1.5 + 0.25 + 1.75 * 2),
        (4, 8, 2, 4.0 + 0.5),
        (2, 3, 1, (2 * (1.25 + 0.25) + 1 * (3.25 + 0.5)) / 3),
        (8, 20, 4, 7.0),
    ],
)
def test_masks_take_more_than_drafts(rows: int, columns: int, masks: int, seconds: float) -> None:
    assert StepTimes(TABLE).seconds(rows, columns, masks) == pytest.approx(seconds)


@given(st.integers(1, 40), st.integers(0, 300), st.integers(0, 300))
def test_more_columns_never_take_less(rows: int, extra: int, masks: int) -> None:
    table = {
        1: Seconds({0: 1.0, 9: 3.0, 99: 2.0}, {1: 3.0, 4: 2.5, 9: 7.0}),
        16: Seconds({0: 2.0, 64: 9.0}, {16: 4.0}),
    }
    times, columns, masks = StepTimes(table), rows + extra, min(masks, extra)
    assert times.seconds(rows, columns + 1, masks) >= times.seconds(rows, columns, masks) > 0
    assert times.seconds(rows, columns, masks + 1) >= times.seconds(rows, columns, masks)


class Machine:
    """A machine that is as fast as it is told to be, and notes what is measured on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.calls: list[tuple[int, int, int]] = []
        self.load = 1.0  # by which everything takes longer

    def times(self, model: PreTrainedModel, max_rows: int) -> StepTimes:
        return step_times(model, max_rows, decide_made_up, measure=self._measure)

    def start_process(self) -> None:
        """Forget what only this process knows."""
        self._monkeypatch.setattr("mars.engine.step_times._trusted", set())
        self._monkeypatch.setattr("mars.engine.step_times._latest", WeakKeyDictionary())
        self.calls.clear()

    def _measure(self, rows: int, drafts: int, masks: int) -> float:
        self.calls.append((rows, drafts, masks))
        return self.load * (rows + 0.1 * drafts + 0.2 * masks)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("MARS_HOME", str(tmp_path))
    machine = Machine(monkeypatch)
    machine.start_process()
    return machine


def test_what_is_known_is_not_measured_again(machine: Machine) -> None:
    model = make_model()
    assert machine.times(model, 1).seconds(1, 1) == 1
    assert {rows for rows, _, _ in machine.calls} == {1}
    machine.calls.clear()
    machine.times(model, 3)
    assert {rows for rows, _, _ in machine.calls} == {2, 4}
    machine.calls.clear()
    assert machine.times(model, 4).seconds(4, 4) == 4
    assert not machine.calls
    machine.times(make_model(hidden_size=64), 1)
    assert machine.calls, "another model, another table"


def test_the_file_is_read_again_for_another_purpose(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    times = machine.times(model, 1)
    assert machine.times(model, 1) is times
    machine.calls.clear()
    assert machine.times(model.to(torch.float64), 1) is not times
    assert machine.calls, "another dtype, another table"
    monkeypatch.setenv("MARS_HOME", str(tmp_path / "other"))
    machine.calls.clear()
    machine.times(model, 1)
    assert machine.calls, "another folder, another table"


def test_another_process_checks_the_table_once(machine: Machine) -> None:
    model = make_model()
    machine.times(model, 4)
    machine.start_process()
    assert machine.times(model, 8).seconds(4, 4) == 4
    checks = [(rows, 0, 0) for rows in (1, 2, 4) for _ in range(_FEW_REPEATS)]
    assert machine.calls[: len(checks)] == checks
    assert {rows for rows, _, _ in machine.calls[len(checks) :]} == {8}
    machine.calls.clear()
    machine.times(model, 4)
    assert not machine.calls


def test_a_table_of_a_busy_hour_is_replaced(machine: Machine, tmp_path: Path) -> None:
    model = make_model()
    machine.load = 3.0
    assert machine.times(model, 8).seconds(4, 4) == 12
    machine.load = 1.0
    assert machine.times(model, 8).seconds(4, 4) == 12, "this process has measured it"
    machine.start_process()
    assert machine.times(model, 2).seconds(2, 2) == 2
    assert {rows for rows, _, _ in machine.calls} == {1, 2}
    (path,) = (tmp_path / "step-times").iterdir()
    table = json.loads(path.read_text())
    found = {rows: drafts["0"] for rows, (drafts, _) in table.items()}
    assert found == {"1": 1, "2": 2, "4": 12, "8": 24}, "others were not asked for"
    machine.start_process()
    machine.times(model, 2)
    checks = [(rows, 0, 0) for rows in (1, 2) for _ in range(_FEW_REPEATS)]
    assert machine.calls == checks, "what is new stands"
    machine.calls.clear()
    assert machine.times(model, 4).seconds(4, 4) == 4
    assert {rows for rows, _, _ in machine.calls} == {4}


def test_a_part_of_a_busy_hour_is_replaced(machine: Machine) -> None:
    model = make_model()
    machine.times(model, 1)
    machine.load = 3.0
    assert machine.times(model, 2).seconds(2, 2) == 6
    machine.load = 1.0
    machine.start_process()
    assert machine.times(model, 2).seconds(2, 2) == 2
    assert machine.calls[:_FEW_REPEATS] == [(1, 0, 0)] * _FEW_REPEATS
    assert {rows for rows, _, _ in machine.calls[_FEW_REPEATS:]} == {2}


@pytest.mark.parametrize("load", [0.85, 3.0])
def test_a_table_stays_in_a_busy_hour_and_if_it_is_about_right(
    machine: Machine, load: float
) -> None:
    model = make_model()
    machine.times(model, 4)
    machine.start_process()
    machine.load = load
    assert machine.times(model, 4).seconds(4, 4) == 4
    assert machine.calls == [(rows, 0, 0) for rows in (1, 2, 4) for _ in range(_FEW_REPEATS)]


def test_rows_that_are_not_needed_are_kept_unchecked(machine: Machine, tmp_path: Path) -> None:
    model = make_model()
    machine.times(model, 2)
    (path,) = (tmp_path / "step-times").iterdir()
    table = {rows: [{"0": float(rows)}, {"1": rows + 1.0}] for rows in (64, 8)}
    path.write_text(json.dumps(table))
    machine.start_process()
    assert machine.times(model, 2).seconds(2, 2) == 2
    assert {rows for rows, _, _ in machine.calls} == {1, 2}
    assert set(json.loads(path.read_text())) == {"1", "2", "8", "64"}


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", "3", '{"1": 2.0}', '{"1": [{"0": 1.0}]}', '{"1": {"0": 1.0}}', "{}"),
        *('{"1": [{"0": []}, {"1": 2.0}]}', '{"x": [{"0": 1.0}, {"1": 2.0}]}', '{"1": [{}, {}]}'),
        *('{"1": [{"3": 1.0}, {"1": 2.0}]}', '{"1": [{"0": 0.0}, {"1": 2.0}]}'),
        *('{"1": [{"0": NaN}, {"1": 2.0}]}', '{"1": [{"0": 1.0}, {"0": 2.0}]}'),
        *('{"1": [{"0": 1.0}, {}]}', '{"0": [{"0": 9.0}, {"1": 9.0}]}'),
    ],
)
def test_a_damaged_table_is_measured_again(machine: Machine, tmp_path: Path, content: str) -> None:
    model = make_model()
    machine.times(model, 1)
    (path,) = (tmp_path / "step-times").iterdir()
    whole = path.read_text()
    path.write_text(content)
    machine.start_process()
    assert machine.times(model, 1).seconds(1, 1) == 1
    assert {rows for rows, _, _ in machine.calls} == {1}
    assert len(machine.calls) > 6
    assert path.read_text() == whole


def test_without_a_writable_folder_it_is_measured_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MARS_HOME", str(blocked))
    times = step_times(make_model(), 1, decide_made_up, measure=lambda *_: 1.0)
    assert times.seconds(1, 1) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stopwatch_measures_real_forwards(dtype: torch.dtype) -> None:
    stopwatch = _Stopwatch(make_model().to(dtype), decide_made_up)
    assert stopwatch(1, 0, 0) > 0
    assert stopwatch(2, 7, 0) > 0
    assert stopwatch(2, 0, 8) > 0
    assert stopwatch(2, 62, 0) > 0


def test_a_slow_moment_makes_no_kind_of_step_look_dear(machine: Machine) -> None:
    def measure(rows: int, drafts: int, masks: int) -> float:
        machine.load = 3.0 if len(machine.calls) < 15 else 1.0
        return machine._measure(rows, drafts, masks)

    times = step_times(make_model(), 1, decide_made_up, measure=measure)
    for drafts in (0, 1, 3, 7, 15, 31):
        assert times.seconds(1, 1 + drafts) == pytest.approx(1 + 0.1 * drafts)
    assert len(machine.calls) > 15


def test_times_are_known_where_they_jump(machine: Machine) -> None:
    machine.times(make_model(), 16)
    for rows in (1, 2, 4, 8, 16):
        drafts = {count for r, count, masks in machine.calls if r == rows and not masks}
        assert {0, 1, 16 - rows, 32 - rows} <= drafts
        assert max(drafts) <= 31 * rows
        assert {m for r, _, m in machine.calls if r == rows and m} == {1, rows, 4 * rows}
