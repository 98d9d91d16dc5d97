"""`mars distill`: let a model answer prompts, for training on its own answers."""

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mars.cli.options import (
    DEFAULTS,
    BatchSize,
    Dtype,
    MaxNewTokens,
    Model,
    Seed,
    TopP,
    load_checkpoint,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from mars.distill import Tally

# How often the progress is shown: to people, and in a log.
_INTERVALS_SECONDS = (0.2, 30.0)


def distill(
    prompts: Annotated[
        str,
        typer.Argument(help="JSONL, JSON, CSV, Parquet, lines of text, or a `datasets` hub id."),
    ],
    out: Annotated[
        Path, typer.Argument(help="The answers: a .jsonl file, new or of an earlier run.")
    ],
    model: Model = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="0 is greedy. Repeat it for several answers per prompt. Default: 0."),
    ] = None,
    top_p: TopP = DEFAULTS.top_p,
    seed: Seed = DEFAULTS.seed,
    max_new_tokens: MaxNewTokens = DEFAULTS.max_new_tokens,
    batch_size: BatchSize = 64,
    dtype: Dtype = "auto",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read only the first prompts; all if left out.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a hub dataset.")] = "train",
    columns: Annotated[
        str | None, typer.Option(help="Other column names: question=problem.")
    ] = None,
) -> None:
    """Let a model answer prompts; `mars train` learns from the answers.

    Prompts are records of any format that training reads; an answer at their end is dropped.
    There is no --adapter: the answers are those of ar, which no adapter changes.
    Answers that OUT already holds are kept and not asked for again, so the same command goes on
    after an interruption.
    """
    from mars.data import read_prompt_records
    from mars.data.formats import parse_columns
    from mars.distill import answer_options, check_output
    from mars.distill import distill as run_distill

    check_output(out, prompts)
    options = answer_options(
        temperature or [0.0], seed=seed, top_p=top_p, max_new_tokens=max_new_tokens
    )
    names = parse_columns(columns) if columns else None
    records = read_prompt_records(prompts, split=split, columns=names, limit=limit)
    checkpoint = load_checkpoint(model, dtype)
    try:
        tally = show_progress(run_distill(checkpoint, records, out, options, batch_size=batch_size))
    except KeyboardInterrupt:
        typer.echo("the same command goes on from here", err=True)
        raise
    typer.echo(tally.describe(), err=True)
    typer.echo(f"saved to {out}", err=True)


def show_progress(tallies: "Generator[Tally]") -> "Tally":
    """Run to the end, with a progress bar on stderr; return the final tally."""
    from tqdm import tqdm

    tally = next(tallies)
    start = time.perf_counter()
    interval = _INTERVALS_SECONDS[not sys.stderr.isatty()]
    bar = tqdm(
        total=tally.num_wanted,
        initial=tally.num_found,
        unit="answer",
        mininterval=interval,
        file=sys.stderr,
    )
    with bar, closing(tallies):
        for tally in tallies:
            if tally.num_done > bar.n:
                rate = tally.num_tokens / (time.perf_counter() - start)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                bar.update(tally.num_done - bar.n)
    return tally
