"""How long a forward takes, by rows, drafts and masks: measured once per machine, kept on disk."""

import hashlib
import json
import math
import os
import platform
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from mars.decoding.plan import RowPlan
from mars.default_model import cache_folder
from mars.engine.kernels.linear import linear_path, packed_bytes
from mars.engine.runner import FlatOutputs, Outputs, Runner
from mars.gated import attached_adapter

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_EXTRA = (0, 1, 3, 7)  # drafts of all rows, from which times are known, ...
_TILES = (16, 32, 64, 128, 256)  # ... and as many columns, where times jump, and one more
_MOST_DRAFTS = 31  # of a row
# Tokens in the cache; what is in them takes no part. More columns stay within a unit of 32 slots.
_CONTEXT = 240
_WINDOW = 4  # masks of a row, for models that tell no other number
_REPEATS, _FEW_REPEATS = 8, 3
_LONG = 0.15  # seconds, after which the fewer repeats are enough
_BUSY = 0.8  # a forward in less than this much of what the table says shows it to be of a busy hour
_FORMAT = 5

Measure = Callable[[int, int, int], float]
"""(rows, drafts of all rows, masks of all rows) -> seconds of a forward."""
Decide = Callable[[Outputs | FlatOutputs, PreTrainedModel, Sequence[RowPlan]], object]
"""(outputs, model, what made-up rows have fed): decide on them, as a step does, and wait for it."""


# Rows of tables that this process has measured or checked.
_trusted: set[tuple[Path, int]] = set()
# The latest table of a model, and what it is for: looking into the file takes longer than a token.
_latest: WeakKeyDictionary[PreTrainedModel, tuple[tuple, "StepTimes"]] = WeakKeyDictionary()


class Seconds(NamedTuple):
    """What forwards of one number of rows take."""

    by_drafts: dict[int, float]
    """By drafts of all rows; 0 is among them."""
    by_masks: dict[int, float]
    """By masks of all rows, at least 1, without drafts."""


class _Curve:
    """A function that never falls: straight lines between points, the last one goes on."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self._x = sorted(points)
        # Noise makes times longer only: what more columns do in less, fewer do, too.
        self._y = [*accumulate((points[x] for x in reversed(self._x)), min)][::-1]

    def at(self, x: int) -> float:
        if len(self._x) == 1:
            return self._y[0]
        index = min(max(1, bisect_left(self._x, x)), len(self._x) - 1)
        (x0, x1), (y0, y1) = self._x[index - 1 : index + 1], self._y[index - 1 : index + 1]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


class StepTimes:
    """A table of seconds per forward; between its entries, straight lines.

    A mask costs what a draft costs and something on top, for the adapter and the draft head; the
    first one costs most.
    """

    def __init__(self, table: Mapping[int, Seconds]) -> None:
        """Take seconds by rows."""
        self._rows = sorted(table)
        self._drafts = {rows: _Curve(seconds.by_drafts) for rows, seconds in table.items()}
        self._masks: dict[int, _Curve | None] = {}
        for rows, seconds in table.items():
            points = {
                masks: max(0.0, value - self._drafts[rows].at(masks))
                for masks, value in seconds.by_masks.items()
            }
            self._masks[rows] = _Curve(points) if points else None

    def seconds(self, rows: int, columns: int, masks: int = 0) -> float:
        """Return the time of a forward.

        Args:
            rows: how many.
            columns: what all rows feed: last tokens, drafts and masks.
            masks: how many of the columns are masks.
        """
        extra = max(0, columns - rows)
        high = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        last = self._rows[high]
        if high == 0 or last == rows:
            return self._at(last, extra, masks)
        first = self._rows[high - 1]
        share = (rows - first) / (last - first)
        if share > 1:  # beyond the table: rows cost what they cost before, columns as in its last
            alone = self._at(last, 0, 0) - self._at(first, 0, 0)
            return self._at(last, extra, masks) + max(0.0, alone) * (share - 1)
        return (1 - share) * self._at(first, extra, masks) + share * self._at(last, extra, masks)

    def _at(self, rows: int, extra: int, masks: int) -> float:
        curve = self._masks[rows]
        more = 0.0 if masks == 0 or curve is None else max(0.0, curve.at(masks))
        return self._drafts[rows].at(extra) + more


def step_times(
    model: PreTrainedModel, max_rows: int, decide: Decide, *, measure: Measure | None = None
) -> StepTimes:
    """Return the table of a model for up to `max_rows` rows; measure what the disk does not hold.

    Decisions are part of a step, and on a GPU they are what waits for the forward.

    A row count takes a second or two on a small model; the file is found again by model shape,
    adapter, dtype, device, threads, kernels and torch version. A folder that cannot be written
    costs the measurement each time.

    What is on the disk may be of a busy hour, which makes times longer, never shorter. So a process
    that reads it times a plain forward of every number of rows, once. Where that takes much less
    than the table says, they are measured again; if it takes longer, the machine is busy now, and
    the table stays.
    """
    folder = cache_folder()
    purpose = max_rows, folder, id(attached_adapter(model)), model.dtype, model.device
    purpose = *purpose, torch.get_num_threads()
    if model in _latest and _latest[model][0] == purpose:
        return _latest[model][1]
    path = folder / "step-times" / f"{_key(model)}.json"
    known = _read(path)
    needed = [rows for rows in _ROWS if rows < max_rows]
    needed.append(next((rows for rows in _ROWS if rows >= max_rows), _ROWS[-1]))
    unsure = [rows for rows in needed if rows not in known or (path, rows) not in _trusted]
    measure = measure or _Stopwatch(model, decide)
    has_changed = False
    for rows in unsure:
        if rows in known:
            now = min(measure(rows, 0, 0) for _ in range(_FEW_REPEATS))
            if now >= _BUSY * known[rows].by_drafts[0]:
                continue
        known[rows] = _measure(rows, _window(model) * rows, measure)
        has_changed = True
    if has_changed:
        _write(path, known)
    _trusted.update((path, rows) for rows in unsure)
    times = StepTimes(known)
    _latest[model] = purpose, times
    return times


def _measure(rows: int, most_masks: int, measure: Measure) -> Seconds:
    """Time forwards of one number of rows, by turns: slow moments of the machine are for all."""
    steps = [(drafts, 0) for drafts in _numbers_of_drafts(rows)]
    steps += [(0, masks) for masks in (1, rows, most_masks)]
    best = dict.fromkeys(steps, math.inf)
    for number in range(_REPEATS):
        for step, seconds in best.items():
            if number < _FEW_REPEATS or number * seconds < _LONG:
                best[step] = min(seconds, measure(rows, *step))
    return Seconds(
        {drafts: seconds for (drafts, masks), seconds in best.items() if not masks},
        {masks: seconds for (_, masks), seconds in best.items() if masks},
    )


def _numbers_of_drafts(rows: int) -> list[int]:
    ends = [tile + more - rows for tile in _TILES for more in (0, 1)][:-1]
    most = _MOST_DRAFTS * rows
    return sorted({n for n in (*_EXTRA, *ends, min(most, _TILES[-1])) if 0 <= n <= most})


def _window(model: PreTrainedModel) -> int:
    adapter = attached_adapter(model)
    return _WINDOW if adapter is None else min(_WINDOW, adapter.config.block_size)


class _Stopwatch:
    """Time a step of made-up rows."""

    def __init__(self, model: PreTrainedModel, decide: Decide) -> None:
        self._model, self._decide = model, decide
        self._runner: Runner | None = None

    def __call__(self, rows: int, drafts: int, masks: int) -> float:
        tokens = [[(7 * i + row) % 97 for i in range(_CONTEXT)] for row in range(rows)]
        if self._runner is None or self._runner.cache.num_rows != rows:
            most = _CONTEXT + _MOST_DRAFTS + _WINDOW + 1
            self._runner = Runner(self._model, num_rows=rows, max_positions=most)
            for _ in tokens:
                self._runner.add_row()
        plans = [
            RowPlan((1,) * count, (0,) if window else (), window)
            for count, window in zip(_spread(drafts, rows), _spread(masks, rows), strict=True)
        ]
        # The last token is taken back: it runs again.
        self._runner.cached = [_CONTEXT - 1] * rows
        start = time.perf_counter()
        outputs = self._runner.run(0, tokens, plans)
        self._decide(outputs, self._model, plans)
        return time.perf_counter() - start


def _spread(count: int, rows: int) -> list[int]:
    return [count // rows + (row < count % rows) for row in range(rows)]


def _key(model: PreTrainedModel) -> str:
    adapter = attached_adapter(model)
    device = model.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(model.device)
    parts = [
        _FORMAT,
        type(model).__name__,
        [tuple(parameter.shape) for parameter in model.parameters()],
        None if adapter is None else replace(adapter.config, base=None, fingerprint=""),
        str(model.dtype),
        *(device, platform.processor(), os.cpu_count(), torch.get_num_threads()),
        *((linear_path(model.dtype), packed_bytes(model)) if device == "cpu" else (0, 0)),
        torch.__version__,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[int, Seconds]:
    try:
        content = json.loads(path.read_text())
        table = {
            int(rows): Seconds(*({int(n): float(s) for n, s in c.items()} for c in curves))
            for rows, curves in content.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):  # missing or damaged: measured again
        return {}
    return {rows: seconds for rows, seconds in table.items() if _is_whole(rows, seconds)}


def _is_whole(rows: int, seconds: Seconds) -> bool:
    """Whether a row of the table can be one that was measured."""
    values = (*seconds.by_drafts.values(), *seconds.by_masks.values())
    keys = (*seconds.by_drafts, *seconds.by_masks)
    is_known = 0 in seconds.by_drafts and min(seconds.by_masks, default=0) > 0
    return rows > 0 and is_known and min(keys) >= 0 and all(0 < s < math.inf for s in values)


def _write(path: Path, table: Mapping[int, Seconds]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(table, file)
        os.replace(file.name, path)
    except OSError:  # a cache is no necessity
        return
