"""Options that several commands share, and what they stand for."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mars.decoding.options import DecodingOptions
from mars.errors import UserError

if TYPE_CHECKING:
    from mars.checkpoint import Checkpoint

DEFAULTS = DecodingOptions()

Model = Annotated[
    str | None, typer.Option(help="Hub id or local folder; the default model if left out.")
]
Adapter = Annotated[
    str,
    typer.Option(
        metavar="FOLDER|auto|none",
        help="Gated adapter for the model, as `mars train --method gated` saves it. auto: the "
        "shipped one, if no model is named.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        help="Precision the model runs in. auto: that of its weights, or float32 where this "
        "processor is slow in it.",
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        metavar="exact|threshold|ar",
        help="exact: verify drafts; says what ar says. threshold: commit drafts the model is sure "
        "of; changes the text. ar: one token per forward. "
        f"Default: {DEFAULTS.mode}, with --threshold or --confidence threshold.",
    ),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        help="tau: how sure a draft must be in the threshold mode. Lower is faster; 1 is ar. "
        f"Default: {DEFAULTS.threshold}."
    ),
]
Confidence = Annotated[
    str | None,
    typer.Option(
        metavar="probability|entropy|margin",
        help=f"What the threshold is compared with. Default: {DEFAULTS.confidence}.",
    ),
]
Window = Annotated[
    int | None,
    typer.Option(help="Masks per group; the block size of the training if left out."),
]
Layout = Annotated[
    str,
    typer.Option(
        metavar="auto|linear|partial|full",
        help="exact: feed what pays on this machine (auto), or be ready with masks if all drafts "
        "are right, for the likeliest outcomes, for all.",
    ),
]
MaxGroups = Annotated[int, typer.Option(help="partial layout: most groups of masks per forward.")]
Ngram = Annotated[
    bool, typer.Option("--ngram/--no-ngram", help="exact: also draft what followed before.")
]
DraftThreshold = Annotated[
    float, typer.Option(help="exact: cut drafts that are less likely than this to be right.")
]
Logprobs = Annotated[
    int | None,
    typer.Option(help="With --json: log-probability of every token and of the N most likely."),
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


def load_checkpoint(model: str | None, dtype: str, adapter: str = "none") -> "Checkpoint":
    """Load a model for decoding; progress is shown only to people."""
    from transformers.utils import logging

    from mars.checkpoint import load

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return load(model, dtype=dtype, adapter=None if adapter == "none" else adapter)


def decoding_options(
    checkpoint: "Checkpoint",
    *,
    mode: str | None,
    threshold: float | None = None,
    confidence: str | None = None,
    stop: list[str] | None = None,
    **values: Any,
) -> DecodingOptions:
    """Build decoding options; say so if there will be no drafts but those of n-grams.

    Raises:
        UserError: an option is not valid, or belongs to another mode.
    """
    given = {"threshold": threshold, "confidence": confidence}
    given = {name: value for name, value in given.items() if value is not None}
    mode = mode or ("threshold" if given else DEFAULTS.mode)
    if given and mode != "threshold":
        raise UserError(f"--{min(given)} belongs to --mode threshold, not to --mode {mode}.")
    options = DecodingOptions(mode=mode, stop=tuple(stop or ()), **given, **values)  # type: ignore
    if mode == "exact" and checkpoint.mars is None and options.ngram:
        typer.echo(
            f"{checkpoint.name} is a plain AR model: drafts come from what the text repeats, not "
            "from masks (see `mars train`)",
            err=True,
        )
    return options
