"""Every training option: a flag of `mars sft` and `mars train`, and a key of a YAML recipe."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from mars.data.formats import parse_columns
from mars.errors import UserError
from mars.objective import Objective

LEAST = {"block_size": 1, "max_length": 2, "probe_size": 0, "probe_steps": 1, "lora_rank": 1}


@dataclass
class MarsArguments(TrainingArguments):
    """Options of MARS, on top of all those of `transformers.TrainingArguments`."""

    model: str | None = field(
        default=None, metadata={"help": "Hub id or local folder; the default model if left out."}
    )
    data: str | None = field(
        default=None,
        metadata={"help": "JSONL, JSON, CSV or Parquet file, or a `datasets` hub id."},
    )
    split: str = field(default="train", metadata={"help": "Split of a hub data set."})
    columns: str | None = field(
        default=None,
        metadata={"help": "Other column names: prompt=instruction,completion=output."},
    )
    limit: int | None = field(default=None, metadata={"help": "Use only the first records."})
    max_length: int = field(default=1024, metadata={"help": "Longest example, in tokens."})
    on_long: Literal["drop", "truncate", "error"] = field(
        default="drop", metadata={"help": "Longer examples: drop, truncate or error."}
    )
    last_turn_only: bool = field(
        default=False, metadata={"help": "Supervise only the last assistant turn."}
    )
    packing: bool = field(
        default=False, metadata={"help": "Put several examples into one row of max_length."}
    )
    method: Literal["full", "lora"] = field(
        default="full", metadata={"help": "full (all weights) or lora."}
    )
    lora_rank: int = field(default=16, metadata={"help": "Rank of the LoRA matrices."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of LoRA: alpha / rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before LoRA."})
    block_size: int = field(default=4, metadata={"help": "Masks per block (the paper's B)."})
    mask_token_id: int | None = field(
        default=None, metadata={"help": "Token used as [MASK]; an unused one is chosen."}
    )
    masked_loss: Literal["ce", "distill"] = field(
        default="ce", metadata={"help": "ce (data) or distill (the model's own clean stream)."}
    )
    masked_weight: float = field(default=1.0, metadata={"help": "Weight of the masked stream."})
    clean_weight: float = field(
        default=1.0, metadata={"help": "Weight of the AR loss (lambda); 0 is the ablation."}
    )
    offset_decay: float | None = field(
        default=None, metadata={"help": "gamma of exp(-(j-1)/gamma); none: uniform."}
    )
    probe_size: int = field(
        default=16, metadata={"help": "Held-out examples measured while training; 0: none."}
    )
    probe_steps: int = field(
        default=50, metadata={"help": "Measure every so many steps, and at both ends."}
    )
    save_dtype: Literal["bfloat16", "float32"] = field(
        default="bfloat16", metadata={"help": "Precision of the final weights: or float32."}
    )
    # Defaults that differ from transformers: the paper's schedule (papers.md, 1.2), quiet output.
    output_dir: str | None = field(default=None, metadata={"help": "Where checkpoints go."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule."})
    warmup_steps: float = field(default=0.03, metadata={"help": "Steps, or a share below 1."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the data."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps."})
    save_steps: float = field(default=200, metadata={"help": "Save every so many steps."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Every parameter is used in every step."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Leave this False."})

    def __post_init__(self) -> None:
        for name, allowed in (
            ("method", ("full", "lora")),
            ("on_long", ("drop", "truncate", "error")),
            ("save_dtype", ("bfloat16", "float32")),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}."
                )
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UserError(f"{name} must be an integer of at least {least}, got {value!r}.")
        if self.eval_strategy not in ("no", IntervalStrategy.NO):
            raise UserError(
                "eval_strategy is not supported: the probe (--probe_size, --probe_steps) measures "
                "held-out examples."
            )
        if self.remove_unused_columns:
            raise UserError("remove_unused_columns must stay False: MARS reads its own columns.")
        if self.label_smoothing_factor:
            raise UserError("label_smoothing_factor is not supported: leave it at 0.")
        if not torch.cuda.is_available():
            self.use_cpu = True
        _ = self.objective, self.column_names  # validate
        super().__post_init__()

    @property
    def objective(self) -> Objective:
        """The losses and their weights."""
        return Objective(
            masked_loss=self.masked_loss,
            masked_weight=self.masked_weight,
            clean_weight=self.clean_weight,
            offset_decay=self.offset_decay,
        )

    @property
    def column_names(self) -> dict[str, str] | None:
        """`columns` as a mapping from the standard name to the file's."""
        if self.columns is None:
            return None
        return parse_columns(self.columns)


def parse_arguments(arguments: list[str], **defaults: Any) -> MarsArguments:
    """Read `[RECIPE.yaml] --flags`; flags win over the recipe, the recipe over `defaults`.

    Raises:
        UserError: unreadable recipe, unknown key or flag, missing data or output_dir.
    """
    usage = "mars train [RECIPE.yaml] [--option value ...]"
    parser = HfArgumentParser(MarsArguments, usage=usage, allow_abbrev=False)
    if arguments and not arguments[0].startswith("-"):
        defaults |= read_recipe(arguments[0])
        arguments = arguments[1:]
    parser.set_defaults(**defaults)
    try:
        parsed, unknown = parser.parse_args_into_dataclasses(
            args=arguments, look_for_args_file=False, return_remaining_strings=True
        )
    except (ValueError, ImportError) as error:  # UserError is a ValueError: its text stays
        raise UserError(str(error)) from error
    if unknown:
        raise UserError(f"Unknown option {unknown[0]!r}. `mars train --help` lists all options.")
    for name in ("data", "output_dir"):
        if not getattr(parsed, name):
            raise UserError(f"--{name} is missing. Give it as a flag or in the recipe.")
    return parsed


def read_recipe(path: str) -> dict[str, Any]:
    """Read a YAML recipe: a flat mapping from option to value."""
    if not Path(path).is_file():
        raise UserError(f"There is no recipe {path!r}. A recipe is a YAML file with options.")
    try:
        recipe = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"{path} must map option names to values.")
    unknown = sorted(set(recipe) - {f.name for f in fields(MarsArguments) if f.init})
    if unknown:
        raise UserError(f"{path}: unknown option {unknown[0]!r}. See `mars train --help`.")
    return recipe
