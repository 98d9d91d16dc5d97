"""What the time of a step goes into, and how close that is to the machine.

    python benchmarks/step.py [--rows 1 2 4 8 32] [--columns 1 5 17] [--context 256]
                              [--dtype auto|bfloat16|float32] [--json FILE]

One step of `exact`: a forward of the default model by `decoder.c`, and the decision.
Columns are those of a row: its last token, drafts, and masks in groups of four. Every figure is
that of the fastest of some repetitions. "Python" is what is left of the step: laying out columns,
making tensors, deciding.

The floor is the larger of two times: the bytes of packed weights and of keys and values that a
forward reads, by the bandwidth of a plain sum over much memory, measured here with the same
threads; and its multiplications, by the rate of a large matrix product of torch in that precision.
"""

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from mars import load
from mars.decoding.plain import decide_made_up
from mars.decoding.plan import RowPlan
from mars.engine.decoder import PHASES
from mars.engine.kernels.linear import packed_bytes
from mars.engine.runner import Runner
from mars.evaluation.environment import describe_environment

WINDOW = 4


def plan_of(columns: int) -> RowPlan:
    """Feed the last token, as many drafts as there are groups, and those groups of masks."""
    groups = (columns - 1) // (WINDOW + 1)
    drafts = columns - 1 - groups * WINDOW
    return RowPlan((1,) * drafts, tuple(range(groups)), WINDOW if groups else 0)


def fastest(run: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest call."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def bandwidth() -> float:
    """Return the bytes per second that a sum over 512 MB reads."""
    memory = torch.ones(1 << 27)
    return memory.nbytes / fastest(memory.sum, 10)


def matrix_rate(dtype: torch.dtype) -> float:
    """Return the multiplications and additions per second of a product of matrices."""
    size = 2048
    a, b = torch.ones(2, size, size, dtype=dtype)
    return 2 * size**3 / fastest(lambda: a @ b, 10)


def measure(model, rows: int, columns: int, context: int, repeats: int) -> dict[str, float]:
    """Time a step; return milliseconds by phase."""
    runner = Runner(model, num_rows=rows, max_positions=context + 64)
    decoder = runner._decoder
    if decoder is None:
        raise SystemExit(
            f"decoder.c does not run here in {model.dtype}: bfloat16 needs AVX-512 BF16 or AMX, "
            "float32 AVX2 or the like, both a compiler."
        )
    tokens = [[(7 * i + row) % 97 for i in range(context)] for row in range(rows)]
    for _ in tokens:
        runner.add_row()
    plans = [plan_of(columns)] * rows
    runner.run(0, tokens, plans)
    found: list[tuple[float, list[float]]] = []
    for _ in range(repeats):
        runner.cached = [context - 1] * rows
        decoder.spent = array("q", [0] * len(PHASES))
        start = time.perf_counter()
        decide_made_up(runner.run(0, tokens, plans), model, plans)
        whole = time.perf_counter() - start
        found.append((whole, [nanoseconds / 1e9 for nanoseconds in decoder.spent]))
    decoder.spent = None
    whole, phases = min(found)
    parts = dict(zip(PHASES, phases, strict=True)) | {"Python": whole - sum(phases)}
    step = {"step": whole, "median step": statistics.median(whole for whole, _ in found)}
    return {name: round(seconds * 1e3, 3) for name, seconds in (step | parts).items()}


def floor(model, rows: int, columns: int, context: int, speeds: tuple[float, float]) -> float:
    """Return the milliseconds that memory or arithmetic need at least."""
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    weights = sum(linear.weight.numel() for linear in linears)
    config = model.config
    heads = config.num_key_value_heads * config.head_dim
    cached = rows * context * 2 * heads * config.num_hidden_layers
    attention = 2 * 2 * rows * columns * context * config.num_attention_heads * config.head_dim
    operations = 2 * weights * rows * columns + attention * config.num_hidden_layers
    read = packed_bytes(model) + model.dtype.itemsize * cached
    return 1e3 * max(read / speeds[0], operations / speeds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    parser.add_argument("--columns", type=int, nargs="+", default=[1, 5, 8, 17])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = load(None, dtype=args.dtype).model
    speeds = bandwidth(), matrix_rate(model.dtype)
    print(f"{model.dtype}: memory {speeds[0] / 1e9:.1f} GB/s, {speeds[1] / 1e12:.3f} TFLOP/s")
    names = ["step", "median step", *PHASES, "Python", "floor"]
    print("| rows x columns |", " | ".join(names), "|\n|" + "---|" * (len(names) + 1))
    results = []
    for rows in args.rows:
        for columns in args.columns:
            if rows * columns > 160:
                continue
            found = measure(model, rows, columns, args.context, args.repeats)
            found["floor"] = round(floor(model, rows, columns, args.context, speeds), 3)
            results.append({"rows": rows, "columns": columns, **found})
            cells = (f"{found[name]:.2f}" for name in names)
            print(f"| {rows} x {columns} |", " | ".join(cells), "|", flush=True)
    if args.json:
        report = {"environment": describe_environment(), "arguments": vars(args)}
        report |= {"bytes_per_s": speeds[0], "operations_per_s": speeds[1], "steps": results}
        args.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
