"""Prompts of every format: the conversation up to the answer that is asked for."""

import json

import pytest

from mars.data.formats import FORMATS, detect_format
from mars.data.prompts import PromptRecord, prompt_messages, read_prompt_records
from mars.errors import UserError

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}

RECORDS = [
    ({"messages": [USER]}, [USER]),
    ({"messages": [USER, ANSWER]}, [USER]),
    ({"messages": [USER, ANSWER], "system": "Be brief."}, [SYSTEM, USER]),
    ({"messages": [SYSTEM, USER, ANSWER, USER, ANSWER]}, [SYSTEM, USER, ANSWER, USER]),
    ({"messages": [USER, ANSWER], "prompt_ids": [1], "answer_ids": [2]}, [USER]),
    ({"conversations": [{"from": "human", "value": "Why?"}]}, [USER]),
    (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "x"}]},
        [USER],
    ),
    ({"prompt": "Why?"}, [USER]),
    ({"prompt": "Why?", "completion": "x"}, [USER]),
    ({"prompt": "Why?", "completion": None, "answer": "x"}, [USER]),
    ({"prompt": [SYSTEM, USER]}, [SYSTEM, USER]),
    ({"prompt": [USER], "completion": [ANSWER]}, [USER]),
    ({"instruction": "Why?"}, [USER]),
    ({"instruction": "Why", "input": "me?", "output": "x"}, [{**USER, "content": "Why\n\nme?"}]),
    ({"instruction": "Why?", "history": [["Why?", "Because."]]}, [USER, ANSWER, USER]),
    ({"question": "Why?"}, [USER]),
    ({"question": "Why?", "answer": "x", "system": "Be brief."}, [SYSTEM, USER]),
]


@pytest.mark.parametrize(("record", "messages"), RECORDS)
def test_prompt_of_a_record(record, messages):
    before = json.dumps(record)
    assert prompt_messages(record) == messages
    assert json.dumps(record) == before


def test_every_format_but_text_is_covered():
    answers = {"completion": "", "output": "", "answer": ""}
    covered = {detect_format({**answers, **record}).name for record, _ in RECORDS}
    assert covered == {dataset_format.name for dataset_format in FORMATS} - {"text"}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "Why?"}, "no prompt was found. Columns: text; .*--columns prompt=NAME"),
        ({}, "Columns: none"),
        ({"prompt": " "}, "the prompt is empty"),
        ({"prompt": 3}, "must be|list of messages"),
        ({"messages": [SYSTEM]}, "no user turn"),
        ({"messages": [ANSWER]}, "no user turn"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"messages": [USER], "tools": [{}]}, "'tools' is not supported"),
    ],
)
def test_records_without_a_prompt(record, words):
    with pytest.raises(UserError, match=words):
        prompt_messages(record)


def test_lines_of_text_and_objects(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('Why?\n\n{"question": "Why?", "source": "s"}\n{"messages": 3}\n')
    expected = [PromptRecord(messages=[USER]), PromptRecord(messages=[USER], source="s")]
    assert read_prompt_records(path, limit=2) == expected
    with pytest.raises(UserError, match=r"record 2 .*expected a list of messages"):
        read_prompt_records(str(path))
    with pytest.raises(UserError, match="neither columns nor splits"):
        read_prompt_records(path, columns={"prompt": "x"})


def test_columns_and_limit(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text("problem,answer\nWhy?,x\nHow?,y\n")
    prompts = read_prompt_records(path, columns={"question": "problem"}, limit=1)
    assert prompts == [PromptRecord(messages=[USER])]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "\n", "no prompts"),
        ("a.jsonl", "", "no records"),
        ("a.txt", "x\n{oops\n", "line 2: not valid JSON"),
        ("a.jsonl", "x\n", "line 1: not valid JSON"),
        ("none.txt", None, "no such file"),
        ("none.jsonl", None, "no such file"),
    ],
)
def test_bad_files(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=words):
        read_prompt_records(str(path))
