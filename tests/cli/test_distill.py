"""`mars distill`: prompts in, training data out."""

import json
from pathlib import Path

import pytest

from mars.cli.distill import show_progress
from mars.data import PromptRecord
from mars.distill import answer_options, distill

SHORT = ["--max-new-tokens", 6, "--dtype", "float32", "--batch-size", 2]
LINES = [
    "one",
    '{"question": "two?", "source": "s"}',
    '{"messages": [{"role": "user", "content": "3"}]}',
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(LINES))
    return path


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_from_prompts_to_training(mars, folder, plain_folder, prompts, tmp_path):
    out = tmp_path / "out" / "answers.jsonl"
    command = ["distill", prompts, out, "--model", plain_folder, *SHORT, "--temperature", 0]
    outcome = mars(*command, "--temperature", 0.9, "--temperature", 0, "--seed", 5)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout == ""
    assert "6 answers: 0 were there, 6 written" in outcome.stderr
    assert "tokens/s" in outcome.stderr
    assert "6/6" in outcome.stderr
    assert f"saved to {out}" in outcome.stderr
    assert sorted(r["temperature"] for r in records(out)) == [0.0] * 3 + [0.9] * 3
    assert {r["seed"] for r in records(out)} == {5}
    assert [r["source"] for r in records(out) if "source" in r] == ["s", "s"]

    preview = mars("data", "preview", out, "--model", folder)
    assert preview.exit_code == 0, preview.stderr
    assert "6 records in distilled format: 6 examples" in preview.stdout
    trained = mars(
        *("train", "--model", plain_folder, "--data", out, "--output-dir", tmp_path / "model"),
        *("--max-steps", 1, "--report-to", "none", "--probe-size", 1, "--disable-tqdm", "True"),
        *("--block-size", 2, "--max-length", 128),
    )
    assert trained.exit_code == 0, trained.stderr


def test_the_same_command_goes_on(mars, folder, prompts, tmp_path):
    out = tmp_path / "a.jsonl"
    command = ["distill", prompts, out, "--model", folder, *SHORT]
    assert mars(*command, "--limit", 2).exit_code == 0
    outcome = mars(*command)
    assert outcome.exit_code == 0, outcome.stderr
    assert "3 answers: 2 were there, 1 written" in outcome.stderr
    assert "3 answers: 3 were there, 0 written" in mars(*command).stderr
    assert len(records(out)) == 3


def test_options_reach_the_decoder(mars, folder, tmp_path):
    (tmp_path / "p.csv").write_text("problem,answer\nWhy?,x\n")
    command = ["distill", tmp_path / "p.csv", tmp_path / "a.jsonl", "--model", folder]
    outcome = mars(
        *(*command, "--columns", "question=problem", "--max-new-tokens", 3),
        *("--temperature", 1.2, "--top-p", 0.5, "--seed", 9),
    )
    assert outcome.exit_code == 0, outcome.stderr
    (record,) = records(tmp_path / "a.jsonl")
    assert record["messages"][0]["content"] == "Why?"
    assert len(record["answer_ids"]) <= 3
    assert (record["temperature"], record["top_p"], record["seed"]) == (1.2, 0.5, 9)


def test_an_interruption_leaves_a_file_to_go_on_from(mars, folder, prompts, tmp_path, monkeypatch):
    def interrupted(tallies):
        for tally in tallies:
            if tally.num_written:
                raise KeyboardInterrupt

    command = ["distill", prompts, tmp_path / "a.jsonl", "--model", folder, *SHORT]
    with monkeypatch.context() as patch:
        patch.setattr("mars.cli.distill.show_progress", interrupted)
        outcome = mars(*command)
    assert outcome.exit_code == 130
    assert "the same command goes on from here" in outcome.stderr
    assert "3 answers: 1 were there, 2 written" in mars(*command).stderr


def test_the_file_is_closed_when_the_display_breaks(tiny_checkpoint, tmp_path, monkeypatch):
    """An error outside the generator must not leave it suspended with what it has to write."""
    monkeypatch.setattr("tqdm.tqdm.update", lambda *_: 1 / 0)
    prompt = PromptRecord(messages=[{"role": "user", "content": "a"}])
    options = answer_options([0.0], seed=0, top_p=1.0, max_new_tokens=2)
    tallies = distill(
        tiny_checkpoint("llama"), [prompt], tmp_path / "a.jsonl", options, batch_size=1
    )
    with pytest.raises(ZeroDivisionError):
        show_progress(tallies)
    assert tallies.gi_frame is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.jsonl", "OUT"], "no such file"),
        (["PROMPTS", "FOLDER"], "is a folder"),
        (["PROMPTS", "answers.txt"], "name the file answers.jsonl"),
        (["EMPTY", "OUT"], "no prompts"),
        (["TEXT", "OUT"], "no prompt was found"),
        (["TEXT", "TEXT"], "holds the prompts"),
        (["PROMPTS", "OUT", "--model", "no/such-model"], "no/such-model"),
        (["PROMPTS", "OUT", "--temperature", -1], "temperature"),
        (["PROMPTS", "OUT", "--top-p", 0], "top_p"),
        (["PROMPTS", "OUT", "--dtype", "int8"], "int8"),
        (["PROMPTS", "OUT", "--max-new-tokens", 600], "too long"),
        (["PROMPTS", "OUT", "--batch-size", 0], "batch-size"),
        (["PROMPTS"], "out"),
    ],
)
def test_errors(fails, folder, prompts, tmp_path, arguments, words):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n')
    places = {
        "PROMPTS": prompts,
        "OUT": tmp_path / "out.jsonl",
        "FOLDER": tmp_path,
        "EMPTY": tmp_path / "empty.txt",
        "TEXT": tmp_path / "text.jsonl",
    }
    given = [places.get(argument, argument) for argument in arguments]
    model = [] if "--model" in given else ["--model", folder]
    assert words in fails("distill", *given, *model).replace("\n", " ")
    assert not (tmp_path / "out.jsonl").exists()
