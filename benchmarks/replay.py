"""Let a model decode a text that another one has written, at the cost of its own forwards.

Random weights accept no draft, so their speed says nothing. A `Trace` holds an answer of a real
model and, for every place of it, what its masks predicted there. Both are functions of the text
alone, whatever the layout and the batch: so a replay accepts, plans and looks up what the real
model did, exactly. Every forward and every decision is computed all the same; only what they
decide is thrown away.
"""

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from mars.decoding import scheduler
from mars.decoding.decision import Decision
from mars.decoding.drafts import Draft
from mars.decoding.options import DecodingOptions
from mars.decoding.plan import RowPlan
from mars.decoding.request import Request

_PER_MILLE = 1000


@dataclass(frozen=True, slots=True)
class Trace:
    """A prompt, its answer, and the drafts that masks made of it."""

    prompt: list[int]
    answer: list[int]
    drafts: list[list[Draft]]
    """Entry n: what masks predict to come after the first n tokens of the answer."""

    def request(self, name: str, options: DecodingOptions, decode: Callable) -> Request:
        """Ask for the answer, or its beginning; `name` is what `replay` knows the trace by."""
        return Request(
            prompt=name,
            prompt_ids=self.prompt,
            options=options,
            window=0 if options.mode == "ar" else max(map(len, self.drafts)),
            end_ids=frozenset(),
            decode=decode,
        )


class Step(NamedTuple):
    """A forward whose outputs were decided on."""

    end: float
    """When its decisions had reached the host, by `time.perf_counter`."""
    rows: int
    columns: int
    """Last tokens, drafts and masks of all rows."""


def replayed(trace: Trace, known: int, plan: RowPlan, real: Decision) -> Decision:
    """Say what the trace says after `known` tokens of the answer, in place of the real decision."""
    ahead = trace.answer[known:]
    pairs = zip(plan.drafts, ahead, strict=False)
    accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    tokens = ahead[: accepted + 1]
    return replace(
        real, tokens=tokens, num_accepted=accepted, drafts=_found(trace, known, plan, tokens)
    )


def suggested(trace: Trace, known: int, plan: RowPlan, real: Decision) -> Decision:
    """Put the drafts of the trace in place of the real ones; what is said stays real."""
    return replace(real, drafts=_found(trace, known, plan, real.tokens))


def _found(trace: Trace, known: int, plan: RowPlan, tokens: Sequence[int]) -> list[Draft]:
    """Return what the masks have found that stood behind the last right draft, if any did."""
    following = known + len(tokens)
    if len(tokens) - 1 not in plan.groups or following >= len(trace.drafts):
        return []
    return trace.drafts[following][: plan.window]


@contextmanager
def replay(
    traces: Mapping[str, Trace],
    change: Callable[[Trace, int, RowPlan, Decision], Decision] = replayed,
) -> Generator[list[Step]]:
    """Change all decisions inside the block, and note when they were there.

    Args:
        traces: by the `prompt` of the requests. Others are left alone.
        change: `replayed` or `suggested`.
    """
    decide, steps = scheduler.decide_outputs, []

    def decide_and_change(
        outputs: Any, model: Any, rows: Any, plans: Sequence[RowPlan], *rest: Any
    ) -> list[Decision]:
        decisions = decide(outputs, model, rows, plans, *rest)  # waits for the device
        columns = sum(1 + len(plan.drafts) + plan.num_masks for plan in plans)
        steps.append(Step(time.perf_counter(), len(rows), columns))
        changed = []
        for row, plan, real in zip(rows, plans, decisions, strict=True):
            trace = traces.get(row.request.prompt)
            known = len(row.tokens) - len(row.request.prompt_ids)
            changed.append(real if trace is None else change(trace, known, plan, real))
        return changed

    scheduler.decide_outputs = decide_and_change
    try:
        yield steps
    finally:
        scheduler.decide_outputs = decide


def write_traces(path: Path, traces: Sequence[Trace], about: Mapping[str, Any]) -> None:
    """Write traces, one a line, and what is to be known of them; confidences per mille."""
    lines = []
    for trace in traces:
        record = {
            "prompt": trace.prompt,
            "answer": trace.answer,
            "drafts": [[draft.token for draft in drafts] for drafts in trace.drafts],
            "confidence": [
                [round(_PER_MILLE * draft.confidence) for draft in drafts]
                for drafts in trace.drafts
            ],
        }
        lines.append(json.dumps(record, separators=(",", ":")))
    head = json.dumps(dict(about), indent=1).removesuffix("\n}")
    path.write_text(head + ',\n "traces": [\n' + ",\n".join(lines) + "\n]}\n")


def read_traces(path: Path) -> tuple[list[Trace], dict[str, Any]]:
    """Read what `write_traces` has written: the traces, and what is to be known of them."""
    about = json.loads(path.read_text())
    traces = [
        Trace(
            record["prompt"],
            record["answer"],
            [
                [Draft(token, chance / _PER_MILLE) for token, chance in zip(*both, strict=True)]
                for both in zip(record["drafts"], record["confidence"], strict=True)
            ],
        )
        for record in about.pop("traces")
    ]
    return traces, about
