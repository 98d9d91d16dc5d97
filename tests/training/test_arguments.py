"""Training options: every value that cannot work is refused with a message, before any work."""

import pytest

from mars.errors import UserError
from mars.training.arguments import RANGES, UNSUPPORTED, MarsArguments, parse_arguments

GIVEN = ["--data=data.jsonl", "--output_dir=out"]


@pytest.mark.parametrize(
    "option",
    [
        "--seed=-1",
        "--lora_dropout=2",
        "--lora_alpha=0",
        "--per_device_train_batch_size=0",
        "--gradient_accumulation_steps=0",
        "--train_sampling_strategy=group_by_length",
        "--eval_strategy=steps",
        "--eval_on_start=true",
        "--use_liger_kernel=true",
        "--do_eval=true",
        "--load_best_model_at_end=true",
        "--label_names=foo",
        "--label_smoothing_factor=0.1",
        "--remove_unused_columns=true",
        "--clean_weight=nan",
        "--masked_weight=inf",
        "--weight_decay=nan",
        "--learning_rate=inf",
        "--learning_rate=-1",
    ],
)
def test_bad_values(option):
    with pytest.raises(UserError, match=option[2:].partition("=")[0]):
        parse_arguments([*GIVEN, option])


def test_defaults_pass_and_the_tables_name_options():
    parse_arguments(GIVEN)
    assert MarsArguments.__dataclass_fields__.keys() >= RANGES.keys() | UNSUPPORTED.keys()


@pytest.mark.parametrize("missing", ["data", "output_dir"])
def test_missing_options(missing):
    given = [option for option in GIVEN if not option.startswith(f"--{missing}")]
    with pytest.raises(UserError, match=f"--{missing} is missing"):
        parse_arguments(given)


def test_a_recipe_may_hold_numbers_and_booleans(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("weight_decay: 0\nlora_dropout: 0\nresume_from_checkpoint: true\n")
    assert parse_arguments([str(recipe), *GIVEN]).weight_decay == 0
