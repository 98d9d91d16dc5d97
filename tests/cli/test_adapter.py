"""`--adapter`, wherever there is one: what it accepts, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest

from mars.checkpoint import load
from mars.gated import CONFIG_FILE, WEIGHTS_FILE, read_config

SHORT = ["--max-new-tokens", 12]


def answer(mars, *flags) -> tuple[dict, str]:
    """Return the JSON record and standard error."""
    outcome = mars("generate", "hello", *SHORT, "--json", "--no-ngram", *flags)
    assert outcome.exit_code == 0, outcome.stderr
    return json.loads(outcome.stdout), outcome.stderr


def test_it_drafts_and_says_what_ar_says(mars, plain_folder, gated_folder):
    ar, _ = answer(mars, "--model", plain_folder, "--mode", "ar")
    for flags in (["--model", plain_folder, "--adapter", gated_folder], ["--model", gated_folder]):
        exact, stderr = answer(mars, *flags)
        assert exact["mode"] == "exact"
        assert exact["token_ids"] == ar["token_ids"]
        assert stderr == ""


@pytest.mark.parametrize("flags", [[], ["--adapter", "none"], ["--adapter", "auto"]])
def test_a_named_model_has_none_of_its_own(mars, plain_folder, flags):
    record, _ = answer(mars, "--model", plain_folder, *flags)
    assert record["mode"] == "ar"


@pytest.mark.parametrize(
    ("flags", "mode"),
    [([], "exact"), (["--adapter", "auto"], "exact"), (["--adapter", "none"], "ar")],
)
def test_the_default_model_takes_the_shipped_one(
    mars, plain_folder, gated_folder, monkeypatch, flags, mode
):
    monkeypatch.setattr("mars.checkpoint.ensure_default_model", lambda: plain_folder)
    monkeypatch.setattr("mars.checkpoint.shipped_adapter", lambda: gated_folder)
    record, stderr = answer(mars, *flags)
    assert record["mode"] == mode
    assert stderr == ""


def test_the_shipped_one_fits_in_a_wheel():
    """Its files have the names that pyproject.toml lists as package data."""
    root = Path(__file__).parents[2]
    listed = (root / "pyproject.toml").read_text()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        assert f'"default_adapter/*{Path(name).suffix}"' in listed


def test_chat(mars, plain_folder, gated_folder):
    flags = ["--model", plain_folder, "--adapter", gated_folder, "--no-ngram", *SHORT]
    outcome = mars("chat", *flags, stdin="hello\n")
    assert outcome.exit_code == 0, outcome.stderr
    assert "[exact: " in outcome.stderr
    assert "plain AR model" not in outcome.stderr


def test_bench(mars, plain_folder, gated_folder, tmp_path):
    file = tmp_path / "bench.json"
    flags = ["--adapter", gated_folder, "--no-ngram", "--repeats", 1, "--json", file, *SHORT]
    outcome = mars("bench", "--model", plain_folder, *flags)
    assert outcome.exit_code == 0, outcome.stderr
    record = json.loads(file.read_text())
    assert record["settings"]["adapter"] == str(gated_folder)
    assert [row["mode"] for row in record["rows"]] == ["ar", "exact"]
    assert record["rows"][1]["identical_outputs"] == 1


def test_distilled_answers_are_those_of_the_base(mars, fails, plain_folder, gated_folder, tmp_path):
    (tmp_path / "p.txt").write_text("hello\n")
    for model, out in ((plain_folder, "a.jsonl"), (gated_folder, "b.jsonl")):
        outcome = mars("distill", tmp_path / "p.txt", tmp_path / out, "--model", model, *SHORT)
        assert outcome.exit_code == 0, outcome.stderr
    first, second = (json.loads((tmp_path / n).read_text()) for n in ("a.jsonl", "b.jsonl"))
    assert first["answer_ids"] == second["answer_ids"]
    assert first["fingerprint"] == second["fingerprint"]
    message = fails("distill", tmp_path / "p.txt", tmp_path / "c.jsonl", "--adapter", gated_folder)
    assert "--adapter" in message


COMMANDS = [("generate", "x"), ("chat",), ("bench",), ("demo",)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_unusable_adapters(mars, plain_folder, gated_folder, edited, tmp_path, command):
    def message(model: object, adapter: object) -> str:
        outcome = mars(*command, "--model", model, "--adapter", adapter, stdin="")
        assert outcome.exit_code == 2
        assert "Traceback" not in outcome.stderr
        return outcome.stderr

    assert f"no {CONFIG_FILE}" in message(plain_folder, tmp_path)
    assert f"no {CONFIG_FILE}" in message(plain_folder, tmp_path / "nothing")
    assert "itself a gated adapter" in message(gated_folder, gated_folder)

    other = load(plain_folder, device="cpu")
    other.model.lm_head.weight.data += 1
    other.save(tmp_path / "other")
    said = message(tmp_path / "other", gated_folder)
    assert "fingerprint" in said
    assert str(plain_folder) in said

    broken = tmp_path / "broken"
    shutil.copytree(gated_folder, broken)
    (broken / WEIGHTS_FILE).write_bytes(b"cut short")
    assert "Cannot read" in message(plain_folder, broken)
    (broken / CONFIG_FILE).write_text("{}")
    assert "format version" in message(plain_folder, broken)


@pytest.mark.parametrize("command", COMMANDS[:3], ids=lambda words: words[0])
def test_a_window_larger_than_trained(fails, plain_folder, gated_folder, command):
    flags = ["--model", plain_folder, "--adapter", gated_folder, "--window", 4]
    assert "block size 3" in fails(*command, *flags, stdin="hello\n")


def test_merge_refuses(fails, gated_folder, tmp_path):
    assert "--adapter" in fails("merge", gated_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def train_flags(tmp_path: Path) -> list[object]:
    data = tmp_path / "data.jsonl"
    records = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(6)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [
        *("--data", data, "--max-steps", 1, "--report-to", "none", "--max-length", 128),
        *("--probe-size", 1, "--disable-tqdm", "True", "--output-dir", tmp_path / "out"),
        *("--per-device-train-batch-size", 1, "--block-size", 3, "--lora-rank", 2),
    ]


def test_from_training_to_generation_and_on(
    mars, plain_folder, gated_folder, tmp_path, train_flags
):
    for start in (plain_folder, gated_folder):
        outcome = mars("train", "--method", "gated", "--model", start, *train_flags)
        assert outcome.exit_code == 0, outcome.output
        assert read_config(tmp_path / "out").base == str(plain_folder)
        record, _ = answer(mars, "--model", plain_folder, "--adapter", tmp_path / "out")
        assert record["mode"] == "exact"
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_other_methods_refuse_to_go_on(fails, gated_folder, train_flags, method):
    flags = ["--method", method, "--model", gated_folder, *train_flags]
    flags = flags[: flags.index("--lora-rank")]
    assert "--method gated" in fails("train", *flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train-minutes", 1], "--train-minutes belongs to --train"),
        (["--output", "x"], "--output belongs to --train"),
        (["--train", "--adapter", "x"], "leave out --adapter"),
    ],
)
def test_options_of_the_demo_that_do_not_go_together(fails, flags, words):
    assert words in fails("demo", *flags)
