"""Options that several commands share, and what they stand for."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mars.decoding.options import DecodingOptions

if TYPE_CHECKING:
    from mars.checkpoint import Checkpoint

DEFAULTS = DecodingOptions()

Model = Annotated[
    str | None, typer.Option(help="Hub id or local folder; the default model if left out.")
]
Dtype = Annotated[
    str, typer.Option(metavar="float32|bfloat16|float16", help="Precision the model runs in.")
]
Mode = Annotated[
    str | None,
    typer.Option(
        metavar="ar|threshold",
        help="ar: one token per forward. threshold: also commit drafts the model is sure of. "
        f"Default: {DEFAULTS.mode}, for a plain AR model ar.",
    ),
]
Threshold = Annotated[
    float | None,
    typer.Option(help="tau: how sure a draft must be. Lower is faster; 1 is the ar mode."),
]
Confidence = Annotated[
    str,
    typer.Option(metavar="probability|entropy|margin", help="What the threshold is compared with."),
]
Window = Annotated[
    int | None,
    typer.Option(help="Masks per forward; the block size of the training if left out."),
]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate per answer.")]
BatchSize = Annotated[
    int, typer.Option(min=1, help="Prompts that run together; does not change the answers.")
]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='One prompt a line: plain text, or an object with "prompt" or "messages".',
    ),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy; else at least 0.001.")]
TopP = Annotated[float, typer.Option(help="Sample from this share of the probability.")]
TopK = Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this times the top one.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: discourage repetition.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")
]


def load_checkpoint(model: str | None, dtype: str) -> "Checkpoint":
    """Load a model for decoding; progress is shown only to people."""
    from transformers.utils import logging

    from mars.checkpoint import load

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return load(model, dtype=dtype)


def decoding_options(
    checkpoint: "Checkpoint", *, mode: str | None, stop: list[str] | None = None, **values: Any
) -> DecodingOptions:
    """Build decoding options; without a mode, a plain AR model is decoded as one, and told so."""
    if mode is None and checkpoint.mars is None:
        message = f"{checkpoint.name} is a plain AR model: using --mode ar (see `mars train`)"
        typer.echo(message, err=True)
        mode = "ar"
    values["mode"] = DEFAULTS.mode if mode is None else mode
    return DecodingOptions(stop=tuple(stop or ()), **values)
