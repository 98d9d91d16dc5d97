"""The demo from end to end, on a tiny model."""

import json
from importlib.resources import files

import pytest

from mars.demo.main import demo, two_columns
from mars.errors import UserError


@pytest.fixture
def tiny_folder(tmp_path, tiny_checkpoint):
    checkpoint = tiny_checkpoint("llama", max_position_embeddings=1024)
    checkpoint.mars = None
    checkpoint.save(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def test_demo_trains_compares_and_proves_plain_loading(tiny_folder, tmp_path, capsys):
    demo(model=tiny_folder, train_minutes=0, threshold=0.5, output=tmp_path / "out")
    printed = capsys.readouterr().out
    assert "1. Training: 10 steps" in printed
    assert printed.count("\n> ") == 8
    assert "threshold 0.5" in printed
    assert "the same tokens as our ar mode" in printed
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_demo_does_not_overwrite(tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(UserError, match="not empty"):
        demo(output=tmp_path)


def test_columns_keep_every_word():
    text = two_columns("one two\n\nthree", "four")
    assert text.split() == ["one", "two", "|", "four", "|", "three", "|"]


def test_training_answers_belong_to_the_prompts():
    folder = files("mars.demo")
    prompts = {
        json.loads(line)["prompt"]
        for line in folder.joinpath("train_prompts.jsonl").read_text().splitlines()
    }
    shown = {
        json.loads(line)["prompt"]
        for line in folder.joinpath("show_prompts.jsonl").read_text().splitlines()
    }
    records = [json.loads(x) for x in folder.joinpath("train.jsonl").read_text().splitlines()]
    asked = [record["messages"][0]["content"] for record in records]
    assert len(records) > 200
    assert len(set(asked)) == len(asked)
    assert set(asked) <= prompts
    assert not shown & prompts, "the shown prompts are unseen"
