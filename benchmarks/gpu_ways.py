"""Ways of decoding on one device, each run once and timed; and what a bare forward costs."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_device import peak_bytes, reset_peak, synchronize
from gpu_models import WINDOW, Subject
from replay import Trace, replay
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from mars.decoding.loop import decode
from mars.decoding.options import DecodingOptions
from mars.decoding.plan import RowPlan
from mars.engine.runner import Runner

LOOKUP_TOKENS = 8
FORWARD_COLUMNS = (1, 4, 8, 16, 32)  # of a row
_FORWARD_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one way did with one batch, all prompts at once. Times in seconds."""

    seconds: float
    tokens: int
    forwards: int
    """Of the model, that of the prompts included; each serves all rows."""
    row_forwards: int
    """Rows of all those forwards."""
    first_token_s: float
    """Median over the rows."""
    step_s: float | None
    """Mean time of a forward with all there is around it, that of the prompts left out."""
    columns: float | None
    """Mean columns that a row fed in a step; known of our own ways."""
    peak_bytes: int | None

    @property
    def speed(self) -> float:
        """Tokens per second, the prompts' time included."""
        return self.tokens / self.seconds


Way = Callable[[Subject, Sequence[Trace], int], Run]
"""(model, one trace per row, new tokens) -> what became of it."""


def ours(subject: Subject, traces: Sequence[Trace], new_tokens: int, **options: Any) -> Run:
    """Decode with this package, replaying the traces."""
    settings = DecodingOptions(max_new_tokens=new_tokens, **options)
    by_name = {str(number): trace for number, trace in enumerate(traces)}
    requests = [trace.request(name, settings, subject.decode) for name, trace in by_name.items()]
    first_tokens: dict[int, float] = {}
    results = []
    with replay(by_name) as steps:
        start = _start(subject.device)
        for event in decode(subject.model, requests, batch_size=len(requests)):
            if event.token_ids:
                first_tokens.setdefault(event.index, time.perf_counter() - start)
            if event.result is not None:
                results.append(event.result)
                assert event.result.token_ids == traces[event.index].answer[:new_tokens]
        seconds = _stop(subject.device) - start
    rows = sum(step.rows for step in steps[1:])
    return Run(
        seconds=seconds,
        tokens=sum(len(result.token_ids) for result in results),
        forwards=len(steps),
        row_forwards=sum(step.rows for step in steps),
        first_token_s=statistics.median(first_tokens.values()),
        step_s=_mean_step(steps[0].end, steps[-1].end, len(steps)),
        columns=sum(step.columns for step in steps[1:]) / rows if rows else None,
        peak_bytes=peak_bytes(subject.device),
    )


def theirs(subject: Subject, traces: Sequence[Trace], new_tokens: int, **options: Any) -> Run:
    """Decode greedily with `transformers` generate; what it says costs the same and is ignored.

    With prompt lookup (one row), where what is said decides how fast it is said, the trace is
    forced upon it.
    """
    device, stamp = subject.device, _Stamp(subject.device)
    longest = max(len(trace.prompt) for trace in traces)
    padded = [[0] * (longest - len(t.prompt)) + t.prompt for t in traces]
    is_real = [[0] * (longest - len(t.prompt)) + [1] * len(t.prompt) for t in traces]
    if "prompt_lookup_num_tokens" in options:
        (trace,) = traces
        options["logits_processor"] = LogitsProcessorList([_Dictation(trace)])
    start = _start(device)
    output = subject.stock.generate(
        torch.tensor(padded, device=device),
        attention_mask=torch.tensor(is_real, device=device),
        max_new_tokens=new_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([stamp]),
        **options,
    )
    end = _stop(device)
    said = output[:, longest:].tolist()
    assert all(len(row) == new_tokens for row in said)
    assert "logits_processor" not in options or said[0] == traces[0].answer[:new_tokens]
    return Run(
        seconds=end - start,
        tokens=len(traces) * new_tokens,
        forwards=stamp.calls,
        row_forwards=stamp.calls * len(traces),
        first_token_s=stamp.first - start,
        step_s=_mean_step(stamp.first, end, stamp.calls),
        columns=None,
        peak_bytes=peak_bytes(device),
    )


EXACT = {"exact": "auto", "exact-linear": "linear", "exact-partial": "partial"}
WAYS: dict[str, Way] = {
    "hf": theirs,
    "hf-static": partial(theirs, cache_implementation="static", disable_compile=True),
    "hf-lookup": partial(theirs, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    "ar": partial(ours, mode="ar"),
    **{name: partial(ours, layout=layout) for name, layout in EXACT.items()},
    "hf-compiled": partial(theirs, cache_implementation="static"),
}
"""`hf-static` is its static cache without compilation; `hf-compiled`, what it does by itself."""
COMPILED = ("hf-compiled",)


def serves(way: str, batch: int) -> bool:
    """Whether a way exists at a batch size."""
    return batch == 1 or way != "hf-lookup"


class _Stamp(StoppingCriteria):
    """Note when the first token is there, and count forwards; stop nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.calls, self.first = 0, 0.0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if self.calls == 0:
            synchronize(self._device)
            self.first = time.perf_counter()
        self.calls += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=self._device)


class _Dictation(LogitsProcessor):
    """Make the next token of a trace the most likely one: one small operation per position."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        known = input_ids.shape[1] - len(self._trace.prompt)
        if known < len(self._trace.answer):
            scores[:, self._trace.answer[known]] = float("inf")
        return scores


def _start(device: torch.device) -> float:
    synchronize(device)
    reset_peak(device)
    return time.perf_counter()


def _stop(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def _mean_step(first: float, last: float, forwards: int) -> float | None:
    return (last - first) / (forwards - 1) if forwards > 1 else None


def forward_seconds(subject: Subject, rows: int, columns: int, cached: int) -> float:
    """Time our forward alone, with nothing decided: median of some.

    Args:
        subject: the model.
        rows: that run together.
        columns: of each row: its last token, drafts, and masks, half of each.
        cached: tokens in the cache.
    """
    runner = Runner(subject.model, num_rows=rows, max_positions=cached + 2 * columns)
    for _ in range(rows):
        runner.add_row()
    groups = columns // 2 // WINDOW
    plan = RowPlan((1,) * (columns - 1 - groups * WINDOW), tuple(range(groups)), WINDOW)
    tokens = [list(range(cached))] * rows
    times = []
    for repeat in range(_FORWARD_REPEATS + 2):
        runner.cached = [cached - 1 if repeat else 0] * rows
        start = _start(subject.device)
        runner.run(0, tokens, [plan] * rows)
        times.append(_stop(subject.device) - start)
    return statistics.median(times[2:])  # the first reads the prompt, the second warms up
