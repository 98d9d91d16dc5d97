"""The output folder: whether it is free, where a stopped run goes on, when it is finished."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from mars.errors import UserError
from mars.gated import CONFIG_FILE

IN_USE = (
    *("config.json", "adapter_config.json", CONFIG_FILE),
    *("log.jsonl", "checkpoint-*"),
)
# A resumable checkpoint has one of each line; transformers writes trainer_state.json last.
WEIGHTS = ("model*.safetensors", "adapter_model*", "pytorch_model*", "global_step*")
OPTIMIZER = ("optimizer*", "global_step*")  # one file, FSDP's files or folder, DeepSpeed's folder
CONFIGS = ("config.json", CONFIG_FILE)
PARTIAL = "unfinished"


def check_free(folder: Path) -> None:
    """Refuse a folder that holds an earlier run or a model, and a path that is a file.

    Raises:
        UserError: the folder is in use.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file. Choose a folder as --output_dir.")
    found = next((path for pattern in IN_USE for path in folder.glob(pattern)), None)
    if found is not None:
        raise UserError(
            f"{folder} already holds {found.name} of an earlier run or a model. Continue that run "
            "with --resume_from_checkpoint true, or choose another --output_dir."
        )


def resume_point(
    folder: Path, wanted: str | bool | None, *, needs_optimizer: bool, tell: Callable[[str], None]
) -> str | None:
    """Choose the checkpoint to go on from; None: start from the beginning.

    Args:
        folder: where the run writes its `checkpoint-*` folders.
        wanted: None or "false" (a new run), "true" (the newest complete one), or a folder. A YAML
            recipe gives true and false as bool.
        needs_optimizer: False if checkpoints are saved without it (`save_only_model`).
        tell: prints what was skipped.

    Raises:
        UserError: a new run would overwrite another, or the folder named is not complete.
    """
    choice = str(wanted or "false").lower()
    if choice == "false":
        check_free(folder)
        return None
    if choice != "true":
        missing = missing_part(Path(str(wanted)), needs_optimizer)
        if missing:
            raise UserError(f"{wanted!r} is not a checkpoint to resume from: it has no {missing}.")
        return str(wanted)
    numbered = [p for p in folder.glob("checkpoint-*") if p.name.rpartition("-")[2].isdigit()]
    for checkpoint in sorted(numbered, key=lambda p: int(p.name.rpartition("-")[2]), reverse=True):
        missing = missing_part(checkpoint, needs_optimizer)
        if not missing:
            return str(checkpoint)
        tell(f"{checkpoint} was not saved completely (no {missing}): skipped.")
    tell(f"{folder} holds no complete checkpoint: starting from the beginning.")
    return None


def missing_part(checkpoint: Path, needs_optimizer: bool) -> str | None:
    """Name what a checkpoint of the Trainer lacks; None if it is complete."""
    if not _has_any(checkpoint, WEIGHTS):
        return "weights"
    if needs_optimizer and not _has_any(checkpoint, OPTIMIZER):
        return "optimizer state"
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return "readable trainer_state.json"
    return None


def _has_any(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def replace_model(folder: Path) -> None:
    """Move the files of the finished model from `folder/PARTIAL` into `folder`.

    The config goes first and comes last: without it no program takes the folder for a model.
    """
    partial = folder / PARTIAL
    for name in CONFIGS:
        (folder / name).unlink(missing_ok=True)
    for path in sorted(partial.iterdir(), key=lambda p: p.name in CONFIGS):
        path.replace(folder / path.name)
    shutil.rmtree(partial)
