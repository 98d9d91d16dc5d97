"""`mars bench`: one checkpoint, the same prompts, one token per forward against several."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from mars.cli.generate import in_order, prepare_all
from mars.cli.options import (
    DEFAULTS,
    Adapter,
    BatchSize,
    DraftThreshold,
    Dtype,
    Layout,
    MaxGroups,
    MaxNewTokens,
    Model,
    Ngram,
    PromptsFile,
    Window,
    load_checkpoint,
)
from mars.decoding.options import DecodingOptions
from mars.errors import UserError
from mars.evaluation.agreement import agreement
from mars.evaluation.environment import describe_environment

if TYPE_CHECKING:
    from mars.checkpoint import Checkpoint
    from mars.decoding.request import Request

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a short letter that thanks a neighbour for watering the plants.",
    "A shop sells pens at 3 euros each. How much do 14 pens cost? Show the steps.",
    "List five things to pack for a weekend in the mountains.",
    "What is the difference between weather and climate?",
    "Write a Python function that reverses a list.",
    "Summarise the story of Little Red Riding Hood in four sentences.",
    "Give me a simple recipe for pancakes.",
)
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pass over all prompts."""

    seconds: float
    """Wall time of the pass, prompts included."""
    token_ids: list[list[int]]
    """The answers."""
    forwards: int
    """Sum over the answers."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(ids) for ids in self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all answers per second of wall time."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: a mode, over all repeats."""

    mode: str
    tokens_per_second: float
    """Median of the repeats."""
    tokens_per_forward: float
    ratio: float
    """Median over the repeats of tokens/s over those of AR in the same repeat."""
    leading_agreement: float
    """Share of tokens before the first that differs from AR."""
    identical_outputs: float
    """Share of answers equal to AR."""
    repeats: list[float]
    """Tokens/s of every repeat."""


def bench(
    prompts_file: PromptsFile = None,
    model: Model = None,
    adapter: Adapter = "auto",
    window: Window = None,
    layout: Layout = DEFAULTS.layout,
    max_groups: MaxGroups = DEFAULTS.max_groups,
    ngram: Ngram = DEFAULTS.ngram,
    draft_threshold: DraftThreshold = DEFAULTS.draft_threshold,
    threshold: Annotated[
        list[float] | None,
        typer.Option(help="Also measure the threshold mode with this tau; may be repeated."),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    batch_size: BatchSize = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Passes per mode.")] = 3,
    dtype: Dtype = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write all figures here.")
    ] = None,
) -> None:
    """Measure ar against exact, and against threshold if asked.

    Same checkpoint, same prompts, same engine; the modes take turns. Tokens/s include the reading
    of the prompts.
    """
    from mars.data.files import read_prompts

    if json_file is not None:
        check_writable(json_file)
    prompts = list(PROMPTS) if prompts_file is None else read_prompts(prompts_file)
    base = DecodingOptions(
        window=window,
        max_new_tokens=max_new_tokens,
        layout=layout,  # type: ignore[arg-type]
        max_groups=max_groups,
        ngram=ngram,
        draft_threshold=draft_threshold,
    )
    ways = [replace(base, mode="ar"), base]
    ways += [replace(base, mode="threshold", threshold=tau) for tau in threshold or []]
    modes = {label(options): options for options in ways}
    checkpoint = load_checkpoint(model, dtype, adapter)
    requests = {
        mode: prepare_all(checkpoint, prompts, options, raw=False)
        for mode, options in modes.items()
    }
    environment = describe_environment()
    settings = {
        "model": checkpoint.name,
        "adapter": "none" if checkpoint.adapter is None else adapter,
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "window": window,
        "layout": layout,
        "max_groups": max_groups,
        "ngram": ngram,
        "draft_threshold": draft_threshold,
        "batch_size": batch_size,
        "repeats": repeats,
        "dtype": str(checkpoint.model.dtype).removeprefix("torch."),
    }
    print(*(f"{name}: {value}" for name, value in (environment | settings).items()), sep="\n")
    rows = summarise(measure(checkpoint, requests, batch_size, repeats))
    print(table(rows))
    if json_file is not None:
        record = {"environment": environment, "settings": settings, "rows": [*map(asdict, rows)]}
        json_file.write_text(json.dumps(record, indent=2) + "\n")


def label(options: DecodingOptions) -> str:
    """Name a row after its mode and tau; say so if that, or the window, makes it the AR mode."""
    if options.mode == "ar":
        return "ar"
    name = f"threshold {options.threshold}" if options.mode == "threshold" else options.mode
    if options.window == 0:
        name += ", window 0"
    return f"ar ({name})" if options.is_ar else name


def check_writable(file: Path) -> None:
    """Refuse, before the work, a file that could not be written after it."""
    if file.is_dir():
        raise UserError(f"{file} is a folder. Name a file.")
    if not file.absolute().parent.is_dir():
        raise UserError(f"There is no folder {file.parent} to write {file.name} into.")


def measure(
    checkpoint: "Checkpoint",
    requests: "dict[str, list[Request]]",
    batch_size: int,
    repeats: int,
) -> dict[str, list[Run]]:
    """Run every mode `repeats` times, in turn, so that all see the same state of the machine."""
    for mode in requests:  # warm-up, not counted
        _run(checkpoint, [_shorten(r) for r in requests[mode][:batch_size]], batch_size)
    runs: dict[str, list[Run]] = {mode: [] for mode in requests}
    for _ in range(repeats):
        for mode in requests:
            runs[mode].append(_run(checkpoint, requests[mode], batch_size))
    return runs


def _shorten(request: "Request") -> "Request":
    budget = min(WARM_UP_TOKENS, request.options.max_new_tokens)
    return replace(request, options=replace(request.options, max_new_tokens=budget))


def _run(checkpoint: "Checkpoint", requests: "Sequence[Request]", batch_size: int) -> Run:
    from mars.decoding.generate import run

    started = time.perf_counter()
    results = list(in_order(run(checkpoint, requests, batch_size=batch_size)))
    return Run(
        seconds=time.perf_counter() - started,
        token_ids=[result.token_ids for result in results],
        forwards=sum(result.forwards for result in results),
    )


def summarise(runs: dict[str, list[Run]]) -> list[Row]:
    """Compare every mode with the first, which is AR."""
    baseline = next(iter(runs.values()))
    return [_row(mode, repeats, baseline) for mode, repeats in runs.items()]


def _row(mode: str, repeats: Sequence[Run], baseline: Sequence[Run]) -> Row:
    rates = [run.tokens_per_second for run in repeats]
    pairs = zip(rates, (run.tokens_per_second for run in baseline), strict=True)
    leading, identical = agreement(repeats[0].token_ids, baseline[0].token_ids)
    return Row(
        mode=mode,
        tokens_per_second=median(rates),
        tokens_per_forward=repeats[0].num_tokens / repeats[0].forwards,
        ratio=median(rate / reference for rate, reference in pairs),
        leading_agreement=leading,
        identical_outputs=identical,
        repeats=rates,
    )


def table(rows: Sequence[Row]) -> str:
    """Format the rows for people."""
    width = max(len(row.mode) for row in rows) + 2
    lines = [
        f"\n{'mode':<{width}}{'tokens/s':>10}{'TPF':>7}{'ratio':>8}{'leading':>10}{'identical':>11}"
    ]
    for row in rows:
        lines.append(
            f"{row.mode:<{width}}{row.tokens_per_second:>10.1f}{row.tokens_per_forward:>7.2f}"
            f"{row.ratio:>7.2f}x{row.leading_agreement:>10.1%}{row.identical_outputs:>11.1%}"
        )
    return "\n".join(
        [*lines, "leading: share of tokens before the first difference from ar; ratio: paired"]
    )
