"""`mars demo`: train for a few minutes, then watch both modes side by side."""

from pathlib import Path
from typing import Annotated

import typer

from mars.cli.options import Model, Threshold


def demo(
    model: Model = None,
    train_minutes: Annotated[
        float, typer.Option(min=0.0, max=10.0, help="Time for the training.")
    ] = 8.0,
    threshold: Threshold = 0.7,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the trained checkpoint here.")
    ] = None,
) -> None:
    """Train for a few minutes, then compare both modes.

    The prompts of the comparison are not among those of the training.
    """
    from mars.demo.main import demo as run_demo

    run_demo(model=model, train_minutes=train_minutes, threshold=threshold, output=output)
