"""`mars sft` and `mars train`: help, bad input, and short runs whose results the CLI can use."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mars.checkpoint import load
from mars.training.arguments import MarsArguments


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    records = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(12)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def flags(plain_folder: Path, data: Path) -> list[object]:
    """Two steps on a tiny model."""
    return [
        *("--model", plain_folder, "--data", data, "--max-steps", 2, "--report-to", "none"),
        *("--per_device_train_batch_size", 2, "--max_length", 128, "--probe-size", 2),
        *("--disable_tqdm", "True"),
    ]


@pytest.mark.parametrize("command", ["sft", "train"])
def test_help_shows_our_own_options_first(mars, command):
    outcome = mars(command, "--help")
    assert outcome.exit_code == 0
    ours, _, theirs = outcome.stdout.partition("Options of transformers")
    for name in MarsArguments.__annotations__:
        assert f"--{name} " in ours
        assert f"--{name} " not in theirs
    assert "--gradient_accumulation_steps" in theirs


def test_help_of_sft_shows_its_own_default(mars):
    assert "Weight of the masked stream [0.0]" in mars("sft", "--help").stdout
    assert "Weight of the masked stream [1.0]" in mars("train", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--data is missing"),
        (["none.yaml"], "none.yaml"),
        (["--blok-size", 4], "--blok-size"),
        (["--block-size", 0], "block_size"),
        (["--block_size", "four"], "four"),
        (["--method", "qlora"], "method"),
        (["--masked-loss", "mse"], "masked_loss"),
        (["--clean-weight", -1], "clean_weight"),
    ],
)
def test_bad_options(mars, data, tmp_path, arguments, words):
    given = (
        arguments
        if not arguments or arguments == ["none.yaml"]
        else [*("--data", data, "--output_dir", tmp_path / "out"), *arguments]
    )
    outcome = mars("train", *given)
    assert outcome.exit_code == 2
    assert words in outcome.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no records"),
        ('{"colour": "red"}\n', "colour"),
        ('{"question": "Why?"}\n', "answer"),
        ('{"question": "Why?", "answer": "x"}\n', "probe_size"),
    ],
)
def test_bad_data_leaves_nothing_behind(fails, flags, data, tmp_path, content, words):
    data.write_text(content)
    assert words in fails("train", *flags, "--output-dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mask_outside_the_vocabulary(fails, flags, tmp_path):
    message = fails("train", *flags, "--output-dir", tmp_path / "out", "--mask-token-id", 999)
    assert "outside the vocabulary" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("extra", [[], ["--method", "lora"]], ids=["full", "lora"])
def test_a_trained_model_generates_several_tokens(
    mars: Callable, flags: list[object], tmp_path: Path, extra: list[str]
):
    out = tmp_path / "out"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("block_size: 9\nlearning_rate: 1e-3\n")
    outcome = mars("train", recipe, *flags, *extra, "--output-dir", out, "--block-size", 2)
    assert outcome.exit_code == 0, outcome.output
    assert f"saved to {out}" in outcome.stderr
    if extra:
        assert mars("merge", out, tmp_path / "merged").exit_code == 0
        out = tmp_path / "merged"
    mars_config = load(out, device="cpu").mars
    assert mars_config is not None
    assert mars_config.block_size == 2  # flags win over the recipe
    answer = mars("generate", "x", "--model", out, "--json", "--threshold", 0, "--stop", "~")
    assert answer.exit_code == 0, answer.stderr
    assert json.loads(answer.stdout)["tokens_per_forward"] > 1


def test_sft_trains_a_plain_model(mars, flags, tmp_path):
    out = tmp_path / "out"
    outcome = mars("sft", *flags, "--output-dir", out)
    assert outcome.exit_code == 0, outcome.output
    assert load(out, device="cpu").mars is None


@pytest.mark.parametrize("place", ["flag", "recipe"])
def test_sft_refuses_a_masked_stream(fails, flags, tmp_path, place):
    (tmp_path / "recipe.yaml").write_text("masked_weight: 1.0\n")
    given = {"flag": [*flags, "--masked-weight", 1], "recipe": [tmp_path / "recipe.yaml", *flags]}
    message = fails("sft", *given[place], "--output-dir", tmp_path / "out")
    assert "masked_weight must be 0" in message
    assert not (tmp_path / "out").exists()
