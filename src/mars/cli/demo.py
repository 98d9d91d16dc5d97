"""`mars demo`: watch the exact mode say what ar says, in fewer forwards."""

from pathlib import Path
from typing import Annotated

import typer

from mars.cli.options import Adapter, Model
from mars.errors import UserError

TRAIN_MINUTES = 6.0


def demo(
    model: Model = None,
    adapter: Adapter = "auto",
    train: Annotated[
        bool, typer.Option("--train", help="First train an adapter for some minutes.")
    ] = False,
    train_minutes: Annotated[
        float | None,
        typer.Option(min=0.0, max=60.0, help=f"With --train: how long. Default: {TRAIN_MINUTES}."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With --train: keep the trained adapter here."),
    ] = None,
) -> None:
    """Compare one token per forward with several, on some prompts.

    With --train, too, the prompts of the comparison are not among those of the training.
    """
    for name, value in {"--train-minutes": train_minutes, "--output": output}.items():
        if value is not None and not train:
            raise UserError(f"{name} belongs to --train.")
    if train and adapter not in ("auto", "none"):
        raise UserError("--train makes an adapter of its own: leave out --adapter.")
    minutes = TRAIN_MINUTES if train_minutes is None else train_minutes

    from mars.demo.main import demo as run_demo

    run_demo(
        model=model,
        adapter=None if adapter == "none" else adapter,
        train_minutes=minutes if train else None,
        output=output,
    )
