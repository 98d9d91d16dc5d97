"""`mars data preview`."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    records = [{"question": f"What is {n}?", "answer": "n" * n} for n in range(1, 6)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_preview_shows_the_supervised_text_and_its_share(mars, questions, folder):
    outcome = mars("data", "preview", questions, "--model", folder, "--examples", 2)
    assert outcome.exit_code == 0, outcome.stderr
    assert "⟦n<|im_end|>⟧" in outcome.stdout
    assert "⟦nn<|im_end|>⟧" in outcome.stdout
    assert "nnn" not in outcome.stdout
    assert "5 records in question/answer format" in outcome.stdout
    assert "all 5 examples" in outcome.stdout


def test_limit_reads_only_the_first_records(mars, questions, folder):
    outcome = mars("data", "preview", questions, "--model", folder, "--limit", 2)
    assert "all 2 examples" in outcome.stdout


def test_long_records(mars, fails, questions, folder):
    command = ["data", "preview", questions, "--model", folder]
    dropped = mars(*command, "--max-length", 34)
    assert dropped.exit_code == 0, dropped.stderr
    assert "2 left out" in dropped.stdout
    assert "max_length=34" in fails(*command, "--max-length", 34, "--on-long", "error")
    assert "on_long" in fails(*command, "--on-long", "skip")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", "", "no records"),
        ("a.jsonl", '{"colour": "red"}\n', "colour"),
        ("a.jsonl", '{"colour": "red"}\n', "--columns question=NAME"),
        ("a.jsonl", '{"question": "Why?"}\n', "answer"),
        ("a.jsonl", "{oops\n", "line 1"),
        ("a.docx", "x", "unknown kind of file"),
        ("a.csv", "question,answer\nonly\n", "record 0"),
    ],
)
def test_bad_files(fails, folder, tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    assert words in fails("data", "preview", tmp_path / name, "--model", folder)


def test_missing_file(fails, folder, tmp_path):
    message = fails("data", "preview", tmp_path / "none.jsonl", "--model", folder)
    assert "no such file" in message
