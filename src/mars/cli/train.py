"""`mars sft` and `mars train`: both stages of the training, with all their options."""

import sys
from dataclasses import MISSING, Field, fields
from typing import Any

import typer

from mars.errors import UserError

USAGE = """usage: mars {command} [RECIPE.yaml] [--option value ...]

A recipe is a YAML file that maps options to values; flags win over it. Flags may be written with
dashes or underscores. On several devices: accelerate launch -m mars {command} ...
"""


def sft(ctx: typer.Context) -> None:
    """Fine-tune as a plain AR model (stage 1)."""
    _train("sft", ctx.args, masked_weight=0.0)


def train(ctx: typer.Context) -> None:
    """Teach a model to predict several tokens (stage 2)."""
    _train("train", ctx.args)


def _train(command: str, arguments: list[str], **defaults: Any) -> None:
    from mars.training.arguments import parse_arguments

    if {"-h", "--help"} & set(arguments):
        typer.echo(describe_options(command, defaults))
        return
    args = parse_arguments(arguments, **defaults)
    if command == "sft" and args.masked_weight != 0:
        raise UserError(
            f"`mars sft` trains the clean stream alone: masked_weight must be 0, got "
            f"{args.masked_weight}. Use `mars train` for both streams."
        )

    from mars.training.run import train as run_training

    folder = run_training(args)
    if args.process_index == 0:
        print(f"saved to {folder}", file=sys.stderr)


def describe_options(command: str, defaults: dict[str, Any]) -> str:
    """Return the help text: the options of MARS first, then those of `transformers`."""
    from mars.training.arguments import MarsArguments

    own = MarsArguments.__annotations__
    known = [f for f in fields(MarsArguments) if f.init]
    ours = [_describe(f, defaults) for name in own for f in known if f.name == name]
    others = [_describe(f, defaults) for f in known if f.name not in own]
    return "\n".join(
        [
            USAGE.format(command=command),
            "Options of MARS:",
            *ours,
            "",
            "Options of transformers.TrainingArguments (its documentation says more):",
            *others,
        ]
    )


def _describe(option: Field, defaults: dict[str, Any]) -> str:
    default = defaults.get(option.name, option.default)
    shown = "" if default in (None, MISSING, "") else f" [{default}]"
    sentence = str(option.metadata.get("help", "")).strip().split(". ")[0].rstrip(".")
    return f"  --{option.name:<28} {' '.join(sentence.split())}{shown}"
