"""The results of `benchmarks/gpu.py`, as JSON and as Markdown."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_exactness import Comparison
from gpu_ways import FORWARD_COLUMNS, WAYS, Run

_LARGEST_ERROR = 1e-3  # of float32 logits and cache, with logits of the order of 1

Key = tuple[str, int, str]
"""Model, rows, way."""


class Report:
    """What has been found so far; `save` writes it."""

    def __init__(
        self, folder: Path, environment: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.environment, self.arguments = dict(environment), dict(arguments)
        self.seconds = 0.0
        self.acceptance: dict[str, Any] = {}
        self.exactness: list[Comparison] = []
        self.errors: dict[str, dict[str, float]] = {}
        self.planner: dict[str, dict[str, Any]] = {}
        self.forwards: dict[str, list[list[float]]] = {}
        self.skipped: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self._runs: dict[Key, dict[int, Run | None]] = {}

    def runs(self, model: str, rows: int, way: str) -> dict[int, Run | None]:
        """Return the runs of a cell by round, to look at and to fill in; None: there was none."""
        return self._runs.setdefault((model, rows, way), {})

    def inexact(self) -> list[Any]:
        """Return what should be equal in float32 and is not."""
        answers = [c for c in self.exactness if c.dtype == "float32" and c.equal < 1]
        numbers = [e for e in self.errors.items() if not max(e[1].values()) < _LARGEST_ERROR]
        return [*answers, *numbers]

    def save(self) -> None:
        """Write gpu.json and gpu.md."""
        content = {
            "environment": self.environment,
            "arguments": self.arguments,
            "seconds": self.seconds,
            "acceptance": self.acceptance,
            "cells": [
                summary(self._runs, key) | {"runs": [run and asdict(run) for run in runs.values()]}
                for key, runs in self._runs.items()
            ],
            "columns": FORWARD_COLUMNS,
            "forwards": self.forwards,
            "planner": self.planner,
            "exactness": [asdict(comparison) for comparison in self.exactness],
            "errors": self.errors,
            "inexact": [str(found) for found in self.inexact()],
            "skipped": self.skipped,
            "failed": self.failed,
        }
        text = json.dumps(content, indent=1, default=str)
        (self._folder / "gpu.json").write_text(text + "\n")
        (self._folder / "gpu.md").write_text(self.markdown())

    def markdown(self) -> str:
        """Return all tables."""
        return "\n".join(
            [
                "# Engine on one GPU",
                *(f"* {name}: {value}" for name, value in self.environment.items()),
                f"* seconds: {self.seconds:.0f} of {self.arguments['budget']:.0f}",
                *self._speed(),
                *self._costs(),
                *self._exactness(),
                *self._missing(),
                "",
            ]
        )

    def _speed(self) -> list[str]:
        lines = ["", "## Speed", ""]
        order = list(WAYS)
        lines += _table(_SPEED)
        for key in sorted(self._runs, key=lambda key: (key[0], key[1], order.index(key[2]))):
            lines += [_row(show(summary(self._runs, key)) for show in _SPEED.values())]
        return lines

    def _costs(self) -> list[str]:
        lines = [
            "",
            "## Milliseconds of a forward, by columns of a row (what the planner knows)",
            "",
        ]
        lines += _table(["model", "rows", *map(str, FORWARD_COLUMNS)])
        for model, table in self.forwards.items():
            known = self.planner.get(model, {}).get("seconds")
            for index, rows in enumerate(self.arguments["batches"]):
                shown = [f"{1000 * s:.2f}" for s in table[index]]
                if known is not None:
                    shown = [
                        f"{x} ({1000 * s:.2f})" for x, s in zip(shown, known[index], strict=True)
                    ]
                lines += [_row([model, rows, *shown])]
        return lines

    def _exactness(self) -> list[str]:
        lines = ["", "## Exactness", ""]
        lines += _table(Comparison.__slots__)
        lines += [_row(asdict(comparison).values()) for comparison in self.exactness]
        lines += ["", "Largest differences from forwards without a cache, float32:", ""]
        lines += [f"* {model}: {errors}" for model, errors in self.errors.items()]
        lines += ["", f"Not exact in float32: {self.inexact() or 'nothing'}"]
        return lines

    def _missing(self) -> list[str]:
        lines = ["", "## Skipped for lack of time", ""]
        batches: dict[tuple[str, ...], list[int]] = {}
        for labels in self.skipped:
            names = tuple(f"{k} {v}" for k, v in labels.items() if k != "rows")
            batches.setdefault(names, []).append(labels.get("rows"))
        for names, rows in batches.items():
            lines += [f"* {', '.join(names)}" + (f": rows {rows}" if rows != [None] else "")]
        lines += [] if batches else ["nothing"]
        lines += ["", "## Failed", ""]
        lines += [f"* {labels}" for labels in self.failed] or ["nothing"]
        return lines


def summary(runs: Mapping[Key, Mapping[int, Run | None]], key: Key) -> dict[str, Any]:
    """Sum a cell up: medians over its rounds; ratios pair the runs of a round."""
    model, rows, way = key
    done = [run for run in runs[key].values() if run is not None]

    def median(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def ratio(other: str) -> float | None:
        others = runs.get((model, rows, other), {})
        pairs = [(run, others.get(number)) for number, run in runs[key].items()]
        return median([a.speed / b.speed for a, b in pairs if a is not None and b is not None])

    return {
        "model": model,
        "rows": rows,
        "way": way,
        "runs_done": len(done),
        "tokens_per_s": median([run.speed for run in done]),
        "ratio_to_hf": ratio("hf"),
        "ratio_to_ar": ratio("ar"),
        "tokens_per_forward": (
            sum(run.tokens for run in done) / sum(run.row_forwards for run in done)
            if done
            else None
        ),
        "columns_per_row": median([run.columns for run in done]),
        "step_s": median([run.step_s for run in done]),
        "first_token_s": median([run.first_token_s for run in done]),
        # Compiled ways keep memory for themselves from then on: the least is the way's own.
        "peak_bytes": min((run.peak_bytes for run in done if run.peak_bytes), default=None),
    }


def _shown(name: str, digits: int, factor: float = 1) -> Callable[[dict[str, Any]], str]:
    def show(cell: dict[str, Any]) -> str:
        value = cell[name]
        return "-" if value is None else f"{factor * value:.{digits}f}"

    return show


_SPEED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "model": lambda cell: cell["model"],
    "rows": lambda cell: cell["rows"],
    "way": lambda cell: cell["way"],
    "tokens/s": _shown("tokens_per_s", 1),
    "ratio to hf": _shown("ratio_to_hf", 2),
    "ratio to ar": _shown("ratio_to_ar", 2),
    "tokens per forward": _shown("tokens_per_forward", 2),
    "columns per row": _shown("columns_per_row", 1),
    "ms per step": _shown("step_s", 2, 1000),
    "ms to first token": _shown("first_token_s", 1, 1000),
    "peak GiB": _shown("peak_bytes", 2, 2**-30),
    "runs": lambda cell: cell["runs_done"],
}


def _table(names: Iterable[str]) -> list[str]:
    """Return the head of a table."""
    names = list(names)
    return [_row(names), "|" + "---|" * len(names)]


def _row(values: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, values)) + " |"
