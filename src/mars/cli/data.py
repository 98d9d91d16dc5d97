"""`mars data preview`: what a model would learn from a dataset."""

import os
import sys
from typing import Annotated

import typer

from mars.cli.options import Model

app = typer.Typer(no_args_is_help=True, help="Look at training data.")


@app.callback()
def data() -> None:
    """Look at training data."""


@app.command()
def preview(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="JSONL, JSON, CSV or Parquet file, or a `datasets` hub id."
        ),
    ],
    model: Model = None,
    examples: Annotated[int, typer.Option(min=0, help="Examples to print.")] = 3,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read only the first records; all if left out.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a hub dataset.")] = "train",
    columns: Annotated[
        str | None, typer.Option(help="Other column names: prompt=instruction,completion=output.")
    ] = None,
    max_length: Annotated[int, typer.Option(help="Longest example, in tokens.")] = 1024,
    on_long: Annotated[
        str, typer.Option(metavar="drop|truncate|error", help="What happens to longer ones.")
    ] = "drop",
    last_turn_only: Annotated[
        bool, typer.Option("--last-turn-only", help="Supervise only the last assistant turn.")
    ] = False,
) -> None:
    """Print examples with their loss mask.

    Also the share of supervised tokens, and what was left out.
    Supervised text is green, or between ⟦ and ⟧ when the output is not a terminal.
    """
    from mars.checkpoint import load_tokenizer
    from mars.data import build_examples, preview, read_records
    from mars.data.formats import parse_columns

    names = parse_columns(columns) if columns else None
    records = read_records(source, split=split, columns=names, limit=limit)
    tokenizer, eos_token_ids = load_tokenizer(model)
    built, report = build_examples(
        records,
        tokenizer,
        max_length=max_length,
        last_turn_only=last_turn_only,
        on_long=on_long,  # type: ignore[arg-type]  # build_examples checks it
        eos_token_ids=eos_token_ids,
    )
    typer.echo(report.describe())
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    typer.echo(preview(built, tokenizer, limit=examples, color=color), color=color)
