"""How long a forward takes, by rows and columns: measured once per machine and model, kept on disk.

Columns are what all rows feed together: last tokens, drafts and masks.
"""

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
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mars.decoding.plan import RowPlan
from mars.default_model import cache_folder
from mars.engine.kernels.linear import linear_path, packed_bytes
from mars.engine.runner import FlatOutputs, Outputs, Runner
from mars.gated import attached_adapter

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_EXTRA = (0, 1, 3, 7, 15, 31)  # columns of a row beyond its last token
_MOST_EXTRA = 256  # of all rows
_CONTEXT = 256  # tokens in the cache; what is in them takes no part
_WINDOW = 4  # masks per group, for models that tell no other number
_REPEATS, _FEW_REPEATS = 5, 3
_BUSY = 0.7  # a forward in less than this much of what the table says shows it to be of a busy hour
_FORMAT = 2

Measure = Callable[[int, int], float]
"""(rows, columns of a row beyond its last token) -> seconds of a forward."""
Decide = Callable[[Outputs | FlatOutputs, PreTrainedModel, Sequence[RowPlan]], object]
"""(outputs, model, what made-up rows have fed): decide on them, as a step does, and wait for it."""


_trusted: set[Path] = set()  # tables that this process has measured or checked


class StepTimes:
    """A table of seconds per forward; between its entries, straight lines."""

    def __init__(self, table: Mapping[int, Mapping[int, float]]) -> None:
        """Take seconds by rows and by columns beyond one per row; 0 must be among these."""
        self._rows = sorted(table)
        self._curves: dict[int, tuple[list[int], list[float]]] = {}
        for rows, seconds in table.items():
            extra, longest = sorted(seconds), 0.0
            rising = []
            for count in extra:  # what falls is noise
                longest = max(longest, seconds[count])
                rising.append(longest)
            self._curves[rows] = extra, rising

    def seconds(self, rows: int, columns: int) -> float:
        """Return the time of a forward of `rows` rows with `columns` columns in all."""
        extra = max(0, columns - rows)
        high = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        last = self._rows[high]
        if high == 0 or last == rows:
            return self._at(last, extra)
        first = self._rows[high - 1]
        share = (rows - first) / (last - first)
        if share > 1:  # beyond the table: rows cost what they cost before, columns as in its last
            alone = self._at(last, 0) - self._at(first, 0)
            return self._at(last, extra) + max(0.0, alone) * (share - 1)
        return (1 - share) * self._at(first, extra) + share * self._at(last, extra)

    def _at(self, rows: int, extra: int) -> float:
        counts, seconds = self._curves[rows]
        if len(counts) == 1:
            return seconds[0]
        index = min(max(1, bisect_left(counts, extra)), len(counts) - 1)
        (x0, x1), (y0, y1) = counts[index - 1 : index + 1], seconds[index - 1 : index + 1]
        return y0 + (y1 - y0) * (extra - x0) / (x1 - x0)


def step_times(
    model: PreTrainedModel, max_rows: int, decide: Decide, *, measure: Measure | None = None
) -> StepTimes:
    """Return the table of a model for up to `max_rows` rows; measure what the disk does not hold.

    Decisions are part of a step, and on a GPU they are what waits for the forward.

    A row count takes about half a second on a small model; the file is found again by model shape,
    adapter, dtype, device, threads, kernels and torch version. A folder that cannot be written
    costs the measurement each time.

    The table may be of a busy hour, which makes times longer, never shorter. So a process that
    reads one times a plain forward of its fewest rows, once. If that takes much less than the table
    says, the table is measured again; if it takes longer, the machine is busy now, and it stays.
    """
    path = cache_folder() / "step-times" / f"{_key(model)}.json"
    known = _read(path)
    if known and path not in _trusted:
        rows = min(known)
        check = measure or _Stopwatch(model, decide, _FEW_REPEATS)
        if check(rows, 0) < _BUSY * known[rows][0]:
            known = {}
    needed = [rows for rows in _ROWS if rows < max_rows]
    needed.append(next((rows for rows in _ROWS if rows >= max_rows), _ROWS[-1]))
    missing = [rows for rows in needed if rows not in known]
    if missing:
        measure = measure or _Stopwatch(model, decide)
        for rows in missing:
            wanted = [extra for extra in _EXTRA if extra * rows <= _MOST_EXTRA]
            known[rows] = {extra * rows: measure(rows, extra) for extra in wanted}
        _write(path, known)
    _trusted.add(path)
    return StepTimes(known)


class _Stopwatch:
    """Time steps of made-up rows."""

    def __init__(self, model: PreTrainedModel, decide: Decide, repeats: int = _REPEATS) -> None:
        self._model, self._decide, self._repeats = model, decide, repeats
        self._runner: Runner | None = None

    def __call__(self, rows: int, extra: int) -> float:
        tokens = [[(7 * i + row) % 97 for i in range(_CONTEXT)] for row in range(rows)]
        if self._runner is None or self._runner.cache.num_rows != rows:
            self._runner = Runner(
                self._model, num_rows=rows, max_positions=_CONTEXT + 2 * _EXTRA[-1] + 2
            )
            for _ in tokens:
                self._runner.add_row()
        masks = (extra + 1) // 2
        adapter = attached_adapter(self._model)
        window = min(masks, _WINDOW if adapter is None else adapter.config.block_size)
        groups = masks // window if masks else 0
        plan = RowPlan((1,) * (extra - groups * window), tuple(range(groups)), window)
        best = float("inf")
        for _ in range(self._repeats):
            # The last token is taken back: it runs again.
            self._runner.cached = [_CONTEXT - 1] * rows
            start = time.perf_counter()
            outputs = self._runner.run(0, tokens, [plan] * rows)
            self._decide(outputs, self._model, [plan] * rows)
            best = min(best, time.perf_counter() - start)
        return best


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
        *((linear_path(), packed_bytes(model)) if device == "cpu" else (0, 0)),
        torch.__version__,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[int, dict[int, float]]:
    try:
        content = json.loads(path.read_text())
        table = {int(r): {int(c): float(s) for c, s in row.items()} for r, row in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # missing or damaged: measured again
        return {}
    return {rows: seconds for rows, seconds in table.items() if _is_whole(rows, seconds)}


def _is_whole(rows: int, seconds: Mapping[int, float]) -> bool:
    """Whether a row of the table can be one that was measured."""
    return rows > 0 and 0 in seconds and all(0 < s < math.inf for s in seconds.values())


def _write(path: Path, table: Mapping[int, Mapping[int, float]]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(table, file)
        os.replace(file.name, path)
    except OSError:  # a cache is no necessity
        return
