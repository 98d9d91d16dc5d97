"""Every training option: a flag of `mars sft` and `mars train`, and a key of a YAML recipe."""

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments

from mars.data.formats import parse_columns
from mars.draft_objective import DraftObjective
from mars.errors import UserError
from mars.objective import Objective

CHOICES = {
    "method": ("full", "lora", "gated"),
    "weighting": ("accept", "decay", "uniform"),
    "mask_embeddings": ("per-offset", "shared"),
    "on_long": ("drop", "truncate", "error"),
    "save_dtype": ("bfloat16", "float32"),
}
# Smallest and largest value; an int as the smallest asks for an integer.
RANGES = {
    "block_size": (1, math.inf),
    "max_length": (2, math.inf),
    "probe_size": (0, math.inf),
    "probe_steps": (1, math.inf),
    "anchors": (1, math.inf),
    "draft_head": (0, math.inf),
    "lora_rank": (1, math.inf),
    "lora_alpha": (1, math.inf),
    "lora_dropout": (0.0, 1.0),
    "per_device_train_batch_size": (1, math.inf),
    "gradient_accumulation_steps": (1, math.inf),
    "learning_rate": (0.0, math.inf),
    "weight_decay": (0.0, math.inf),
    "seed": (0, 2**32 - 1),
}
# Options that a method would ignore: there they keep their default.
FOREIGN = {
    "gated": (
        *("lora_alpha", "lora_dropout", "mask_token_id", "masked_loss", "masked_weight"),
        *("clean_weight", "save_dtype"),
    ),
    "full": ("weighting", "anchors", "mask_embeddings", "lora_targets", "draft_head"),
    "lora": ("weighting", "anchors", "mask_embeddings", "lora_targets", "draft_head"),
}
LEARNING_RATE = {"full": 2e-5, "lora": 2e-4, "gated": 1e-3}
# Options of transformers that MARS would ignore, or that would break it: they keep their default.
UNSUPPORTED = {
    "eval_strategy": "the probe (--probe_size, --probe_steps) measures held-out examples",
    "eval_on_start": "the probe (--probe_size, --probe_steps) measures held-out examples",
    "do_eval": "the probe (--probe_size, --probe_steps) measures held-out examples",
    "do_predict": "`mars generate` and `mars bench` decode",
    "load_best_model_at_end": "there is no evaluation that could tell the best",
    "label_names": "MARS builds its own labels",
    "label_smoothing_factor": "MARS computes its own loss",
    "use_liger_kernel": "MARS computes its own loss",
    "remove_unused_columns": "MARS reads its own columns",
    "train_sampling_strategy": "rows are shuffled; --packing evens out their lengths",
}


@dataclass
class MarsArguments(TrainingArguments):
    """Options of MARS, on top of all those of `transformers.TrainingArguments`."""

    model: str | None = field(
        default=None,
        metadata={
            "help": "Hub id or local folder (of a gated adapter: goes on training it); the default "
            "model if left out."
        },
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
    method: Literal["full", "lora", "gated"] = field(
        default="full",
        metadata={"help": "full (all weights), lora, or gated (acts at masks only; AR unchanged)."},
    )
    lora_rank: int = field(default=16, metadata={"help": "Rank of the LoRA matrices."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of LoRA: alpha / rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before LoRA."})
    lora_targets: str = field(
        default="all-linear",
        metadata={"help": "gated: linear layers with LoRA: all-linear, or names: q_proj,v_proj."},
    )
    mask_embeddings: Literal["per-offset", "shared"] = field(
        default="per-offset", metadata={"help": "gated: one embedding per mask, or one in all."}
    )
    anchors: int = field(
        default=64, metadata={"help": "gated: mask blocks per row, at random places."}
    )
    draft_head: int = field(
        default=0,
        metadata={"help": "gated: width of a head that corrects drafts one by one; 0: none."},
    )
    weighting: Literal["accept", "decay", "uniform"] = field(
        default="accept",
        metadata={"help": "gated: weight of offsets: accept (by accepted length), decay, uniform."},
    )
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
    learning_rate: float | None = field(  # pyrefly: ignore[bad-override]
        default=None, metadata={"help": "Peak; none: 2e-5 (full), 2e-4 (lora), 1e-3 (gated)."}
    )
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
        self._check_values()
        if not torch.cuda.is_available():
            self.use_cpu = True
        if self.learning_rate is None:
            self.learning_rate = LEARNING_RATE[self.method]
        self._check_method()
        _ = self.objective, self.draft_objective, self.column_names  # validate
        super().__post_init__()

    def _check_values(self) -> None:
        """Compare the options as they were given with the tables; `super()` changes some."""
        for name in ("data", "output_dir"):
            if not getattr(self, name):
                raise UserError(f"--{name} is missing. Give it as a flag or in the recipe.")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}."
                )
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if name == "learning_rate" and value is None:
                continue
            kind = int if isinstance(least, int) else int | float
            if not isinstance(value, kind) or not least <= value <= most:
                noun = "an integer" if isinstance(least, int) else "a number"
                upper = f" and at most {most}" if most < math.inf else ""
                raise UserError(f"{name} must be {noun} of at least {least}{upper}, got {value!r}.")
        for option in (f for f in fields(self) if f.init):
            value = getattr(self, option.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{option.name} must be a finite number, got {value}.")
            if option.name in UNSUPPORTED and value != option.default:
                raise UserError(
                    f"{option.name} is not supported ({UNSUPPORTED[option.name]}): leave it at "
                    f"{option.default!r}; got {value!r}."
                )

    def _check_method(self) -> None:
        by_name = {option.name: option for option in fields(self)}
        for name in FOREIGN[self.method]:
            value, default = getattr(self, name), by_name[name].default
            if value != default:
                raise UserError(
                    f"{name} has no meaning for --method {self.method}: leave it at {default!r}; "
                    f"got {value!r}."
                )
        if self.method == "gated" and self.offset_decay is not None and self.weighting != "decay":
            raise UserError(
                f"offset_decay needs --weighting decay with --method gated; got {self.weighting!r}."
            )

    @property
    def draft_objective(self) -> DraftObjective:
        """The loss of `gated`."""
        gamma = {} if self.offset_decay is None else {"gamma": self.offset_decay}
        return DraftObjective(weighting=self.weighting, **gamma)

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
    with option_errors():
        parsed, unknown = parser.parse_args_into_dataclasses(
            args=arguments, look_for_args_file=False, return_remaining_strings=True
        )
    if unknown:
        raise UserError(f"Unknown option {unknown[0]!r}. `mars train --help` lists all options.")
    return parsed


@contextmanager
def option_errors() -> Generator[None]:
    """Turn what `transformers` and `torch` raise for unusable options into UserError."""
    try:
        yield
    except (ValueError, ImportError, RuntimeError) as error:  # the text of a UserError stays
        raise UserError(str(error)) from error


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
