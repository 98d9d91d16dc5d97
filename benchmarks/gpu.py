"""The engine on one NVIDIA GPU: speed, step cost and exactness, in a few minutes, without network.

    python benchmarks/gpu.py OUT                       at most 450 s; needs about 24 GB
    python benchmarks/gpu.py OUT --budget 1800 --rounds 5
    python benchmarks/gpu.py OUT --device cpu --quick  tries everything on tiny shapes, in seconds

Models have the shapes of Qwen2.5 0.5B and 7B and random weights, since only the cost of a step
matters; which drafts are right is replayed from answers of the default model
(benchmarks/replay.py). Ways take turns: every round runs each of them once at every batch size, so
ratios compare runs of the same round. What no longer fits into the time is skipped and listed.
OUT gets gpu.json and gpu.md; both are rewritten after every cell, so what was measured survives
whatever stops the script. Exit status 1: something was not exact in float32, or has failed.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_device import describe, release, use_full_float32
from gpu_exactness import compare, numeric_errors, random_prompts
from gpu_models import FAMILIES, SHAPES, Subject, qwen2_subject, tiny_subject
from gpu_report import Report
from gpu_ways import COMPILED, FORWARD_COLUMNS, WAYS, Run, forward_seconds, serves
from record_acceptance import DEFAULT_FILE
from replay import Trace, read_traces

from mars.decoding import scheduler
from mars.engine.step_times import StepTimes

QUICK = {
    "shapes": ["tiny"],
    "batches": [1, 2],
    "new_tokens": 16,
    "rounds": 1,
    "families": ["qwen2", "phi3"],
    "exact_shapes": ["tiny"],
    "exact_tokens": 12,
}
WARM_UP_TOKENS = 8
CACHED_TOKENS = 256  # of `forward_seconds`
# Seconds that a stage takes where nothing is known yet.
FIRST_GUESS = {"family": 6, "model": 15, "exactness": 30, "table": 15, "forwards": 15, "run": 10}
COMPILATION_GUESS = 100


class Session:
    """The stages of a run: each is done if there is time, and a failure ends only itself."""

    def __init__(self, args: argparse.Namespace, report: Report) -> None:
        self.args, self.report = args, report
        self.device = torch.device(args.device)
        self._start = time.perf_counter()
        self._longest: dict[tuple, float] = {}

    def attempt(self, stage: str, work: Callable[[], Any], **labels: Any) -> Any:
        """Do `work` and return its result; None if it is skipped or fails, which is reported."""
        kind = (stage, labels.get("shape"), labels.get("way"))
        guess = COMPILATION_GUESS if labels.get("way") in COMPILED else FIRST_GUESS[stage]
        needed = self._longest.get(kind, guess)
        start = time.perf_counter()
        left = self.args.budget - (start - self._start)
        if needed > left:
            self.report.skipped.append({"stage": stage, **labels})
            return None
        try:
            result = work()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self.report.failed.append({"stage": stage, **labels, "error": reason})
            result = None
        if stage != "run" or result is None:  # runs find the memory of the last one, as in use
            release(self.device)
        seconds = time.perf_counter() - start
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
        self.report.seconds = time.perf_counter() - self._start
        self.report.save()
        label = " ".join(map(str, (stage, *labels.values())))
        print(
            f"{self.report.seconds:6.1f} s: {label}: {seconds:.2f} s", file=sys.stderr, flush=True
        )
        return result


def check_families(session: Session) -> None:
    """Compare with uncached forwards, in float32, on tiny models of several families."""
    for family in session.args.families:

        def work(family: str = family) -> None:
            subject = tiny_subject(family, session.device)
            prompts = random_prompts(4, 260, range(5, 40))
            session.report.exactness += compare(subject, prompts, session.args.exact_tokens)
            session.report.errors[family] = numeric_errors(subject)

        session.attempt("family", work, shape=family)


def check_shape(session: Session, shape: str, dtype: torch.dtype) -> None:
    """Compare with `ar` (bfloat16) or uncached forwards (float32) at a real size."""

    def work() -> None:
        subject = qwen2_subject(shape, session.device, dtype)
        prompts = random_prompts(4, SHAPES[shape]["vocab_size"], range(8, 40))
        against_ar = dtype != torch.float32
        compared = compare(subject, prompts, session.args.exact_tokens, against_ar=against_ar)
        session.report.exactness += compared

    session.attempt("exactness", work, shape=f"{shape} {str(dtype).removeprefix('torch.')}")


def measure_costs(session: Session, subject: Subject, traces: Sequence[Trace]) -> None:
    """Let the planner find out what steps cost, and time bare forwards beside it."""
    batches = session.args.batches

    def table() -> None:
        start = time.perf_counter()
        with planner_times() as found:
            rows = max(batches)
            WAYS["exact"](subject, [traces[i % len(traces)] for i in range(rows)], WARM_UP_TOKENS)
        session.report.planner[subject.name] = {
            "seconds_to_measure": time.perf_counter() - start,
            "seconds": [
                [found[-1].seconds(rows, rows * columns) for columns in FORWARD_COLUMNS]
                for rows in batches
            ],
        }

    def forwards() -> None:
        session.report.forwards[subject.name] = [
            [forward_seconds(subject, rows, columns, CACHED_TOKENS) for columns in FORWARD_COLUMNS]
            for rows in batches
        ]

    session.attempt("table", table, shape=subject.name)
    session.attempt("forwards", forwards, shape=subject.name)


@contextmanager
def planner_times() -> Generator[list[StepTimes]]:
    """Collect the tables that planners are made with inside the block."""
    make, found = scheduler.step_times, []

    def keep(*args: Any, **kwargs: Any) -> StepTimes:
        found.append(make(*args, **kwargs))
        return found[-1]

    scheduler.step_times = keep
    try:
        yield found
    finally:
        scheduler.step_times = make


def measure_way(
    session: Session, subject: Subject, way: str, rows: int, traces: Sequence[Trace], number: int
) -> None:
    """Run one way once, after a warm-up if it is its first time with so many rows."""
    new_tokens = session.args.new_tokens
    chosen = [traces[(number * rows + row) % len(traces)] for row in range(rows)]
    runs = session.report.runs(subject.name, rows, way)

    def work() -> Run:
        if not any(runs.values()):  # what is compiled serves texts of the same length only
            WAYS[way](subject, chosen, new_tokens if way in COMPILED else WARM_UP_TOKENS)
        return WAYS[way](subject, chosen, new_tokens)

    run = session.attempt("run", work, shape=subject.name, rows=rows, way=way, round=number + 1)
    runs[number] = run
    session.report.save()


def cells(
    args: argparse.Namespace, subjects: Sequence[Subject], device: torch.device
) -> Iterator[tuple[int, int, Subject, str]]:
    """Yield (round, rows, model, way): what compiles comes once, after the first round."""
    plain = [way for way in args.ways if way not in COMPILED]
    late = [way for way in args.ways if way in COMPILED]
    for number in range(args.rounds):
        yield from product([number], args.batches, subjects, plain)
        if number == 0 and device.type == "cuda":
            yield from product([number], args.compiled_batches, subjects, late)


def measure(session: Session) -> None:
    """Make the models, and run all ways on them in turns."""
    args = session.args
    traces, session.report.acceptance = read_traces(args.acceptance)
    subjects = []
    for shape in args.shapes:
        make = partial(qwen2_subject, shape, session.device, torch.bfloat16)
        subject = session.attempt("model", make, shape=shape, runs="all")
        if subject is not None:
            measure_costs(session, subject, traces)
            subjects.append(subject)
    for number, rows, subject, way in cells(args, subjects, session.device):
        if serves(way, rows):
            measure_way(session, subject, way, rows, traces, number)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=450, help="seconds in all")
    parser.add_argument("--shapes", nargs="*", default=["0.5B", "7B"], choices=list(SHAPES))
    batches = [1, 32, 8, 4, 16, 2]  # should time run out, the last ones are missing
    parser.add_argument("--batches", nargs="*", type=int, default=batches)
    parser.add_argument("--compiled-batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--exact-shapes", nargs="*", default=["0.5B"], choices=list(SHAPES))
    parser.add_argument("--exact-tokens", type=int, default=32)
    parser.add_argument("--acceptance", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, one round")
    args = parser.parse_args(arguments)
    if args.quick:
        vars(args).update(QUICK)
    return args


def main() -> None:
    args = parse()
    # Kernels for CPUs stay out of the way: with `--device cpu`, too, the path of a GPU is tried.
    os.environ["MARS_KERNELS"] = "0"
    use_full_float32()
    report = Report(args.out, describe(torch.device(args.device)), vars(args))
    session = Session(args, report)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MARS_HOME"] = folder  # the planner measures afresh
        check_families(session)
        for shape in args.exact_shapes:
            for dtype in (torch.float32, torch.bfloat16):
                check_shape(session, shape, dtype)
        measure(session)
    report.save()
    print(report.markdown())
    sys.exit(bool(report.inexact() or report.failed))


if __name__ == "__main__":
    main()
