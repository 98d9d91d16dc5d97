"""The demo from end to end, on a tiny model."""

import json
from importlib.resources import files
from types import SimpleNamespace

import pytest

from mars.checkpoint import load
from mars.demo.main import compare, demo, hint, prompts, show, summary
from mars.errors import UserError
from mars.gated import is_adapter_folder
from tests.cli.conftest import save_random_adapter


@pytest.fixture
def tiny_folder(tmp_path, tiny_checkpoint):
    checkpoint = tiny_checkpoint("llama", max_position_embeddings=1024)
    checkpoint.mars = None
    checkpoint.save(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.fixture
def adapter(tiny_folder, tmp_path):
    save_random_adapter(tiny_folder, tmp_path / "adapter")
    return tmp_path / "adapter"


def result(*token_ids, text="said"):
    return SimpleNamespace(
        token_ids=list(token_ids), text=text, seconds=1.0, forwards=2, tokens_per_forward=1.5
    )


def test_demo_compares_and_proves_plain_loading(tiny_folder, adapter, capsys):
    demo(model=tiny_folder, adapter=adapter)
    printed = capsys.readouterr().out
    assert printed.count("\n> ") == len(prompts()) == 8
    assert printed.count("\n[ar: ") == printed.count("\n[exact: ") == 8
    for way in ("ar  ", "exact  ", "exact without n-grams  "):
        assert f"\n{way}" in printed
    assert "the same tokens as our exact mode" in printed
    assert f"mars chat --model {tiny_folder} --adapter {adapter}\n" in printed
    assert "Training" not in printed


def test_demo_trains_first(tiny_folder, tmp_path, capsys):
    demo(model=tiny_folder, train_minutes=0, output=tmp_path / "out")
    printed = capsys.readouterr().out
    assert "Training an adapter: 10 steps of 4 answers" in printed
    assert "\n  before  " in printed
    assert "\n  after   " in printed
    assert printed.count("\n> ") == 8
    assert f"--adapter {tmp_path / 'out'}" in printed
    assert is_adapter_folder(tmp_path / "out")


def test_without_an_adapter_there_is_nothing_to_show(tiny_folder, monkeypatch):
    with pytest.raises(UserError, match=f"no adapter for {tiny_folder}.*mars demo --train"):
        demo(model=tiny_folder)
    monkeypatch.setattr("mars.checkpoint.ensure_default_model", lambda: tiny_folder)
    monkeypatch.setattr("mars.checkpoint.shipped_adapter", lambda: None)
    with pytest.raises(UserError, match=r"default model in this installation.*mars demo --train"):
        demo()


def test_demo_does_not_overwrite(tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(UserError, match="not an empty folder"):
        demo(train_minutes=0, output=tmp_path)
    with pytest.raises(UserError, match="not an empty folder"):
        demo(train_minutes=0, output=tmp_path / "precious.txt")


def test_training_starts_from_a_base_model(adapter, tmp_path):
    with pytest.raises(UserError, match="starts from a base model"):
        demo(model=str(adapter), train_minutes=0, output=tmp_path / "out")


def test_a_slow_machine_sees_fewer_prompts(tiny_folder, adapter, capsys):
    checkpoint = load(tiny_folder, adapter=adapter)
    answers = compare(checkpoint, ["a", "b", "c"], max_seconds=0)
    assert {len(results) for results in answers.values()} == {1}
    assert "1 of 3 prompts" in capsys.readouterr().out
    assert answers["ar"][0].token_ids == answers["exact"][0].token_ids
    assert answers["ar"][0].token_ids == answers["exact without n-grams"][0].token_ids


def test_equal_answers_are_shown_once_others_with_the_place():
    assert show(result(1, 2), result(1, 2)).count("said") == 1
    text = show(result(1, 2, 3, text="ar"), result(1, 5, 3, text="other"))
    assert text.splitlines()[1::2] == ["ar", "other"]
    assert text.endswith("(They part at token 2.)")
    assert show(result(1, 2), result(1, 2, 3)).endswith("(They part at token 3.)")


def test_the_table_says_whether_answers_differ():
    same = {"ar": [result(1, 2)], "exact": [result(1, 2)]}
    assert "100%" in summary(same).splitlines()[-1]
    text = summary({"ar": [result(1, 2), result(4, 4)], "exact": [result(1, 2), result(4, 5)]})
    assert "50%" in text
    assert "docs/exactness.md" in text


def test_the_hint_names_what_was_used():
    assert "mars chat\n" in hint(None, "auto", is_trained=False)
    assert "mars chat --adapter out\n" in hint(None, "out", is_trained=True)
    assert "mars demo --train" not in hint(None, "out", is_trained=True)


def test_training_answers_belong_to_the_prompts():
    folder = files("mars.demo")
    asked_for = {
        json.loads(line)["prompt"]
        for line in folder.joinpath("train_prompts.jsonl").read_text().splitlines()
    }
    records = [json.loads(x) for x in folder.joinpath("train.jsonl").read_text().splitlines()]
    asked = [record["messages"][0]["content"] for record in records]
    assert len(records) > 200
    assert len(set(asked)) == len(asked)
    assert set(asked) <= asked_for
    assert not set(prompts()) & asked_for, "the shown prompts are unseen"
