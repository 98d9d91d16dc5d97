"""Every dataset format, and every way in which a record can fail to fit it."""

import pytest

from mars.data.formats import FORMATS, Chat, Text, check_messages, convert, detect_format
from mars.errors import UserError

QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}


def read(record):
    return convert(record, detect_format(record))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [QUESTION, ANSWER]},
        {"messages": [{**QUESTION, "tool_calls": None, "id": 3}, ANSWER], "tools": None},
        {
            "conversations": [
                {"from": "human", "value": "Why?"},
                {"from": "gpt", "value": "Because."},
            ]
        },
        {"conversations": [{**QUESTION, "weight": 0}, {**ANSWER, "weight": 1}]},
        {"conversations": [{"from": None, **QUESTION}, {"from": "assistant", "value": "Because."}]},
        {"instruction": "Why?", "output": "Because."},
        {"instruction": "Why?", "input": "", "output": "Because.", "text": "rendered"},
        {"instruction": "Why?", "input": None, "output": "Because.", "history": None},
        {"question": "Why?", "answer": "Because."},
    ],
)
def test_formats_of_the_same_conversation_agree(record):
    assert read(record) == Chat(messages=[QUESTION, ANSWER])


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [SYSTEM, QUESTION, ANSWER]},
        {"messages": [QUESTION, ANSWER], "system": "Be brief."},
        {"conversations": [QUESTION, ANSWER], "system": "Be brief."},
        {"instruction": "Why?", "output": "Because.", "system": "Be brief."},
        {"question": "Why?", "answer": "Because.", "system": "Be brief."},
    ],
)
def test_system_prompt_comes_first(record):
    assert read(record).messages == [SYSTEM, QUESTION, ANSWER]


def test_alpaca_input_and_history():
    record = {
        "instruction": "Translate.",
        "input": "chat",
        "output": "cat",
        "history": [["Hello", "Hi"], ["Ready?", "Yes"]],
    }
    contents = [message["content"] for message in read(record).messages]
    assert contents == ["Hello", "Hi", "Ready?", "Yes", "Translate.\n\nchat", "cat"]


def test_prompt_completion_of_both_shapes():
    assert read({"prompt": "a", "completion": "b"}) == Text(prompt="a", completion="b")
    chat = read({"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]})
    assert chat == Chat(messages=[QUESTION, ANSWER, QUESTION, ANSWER], context=3)


def test_plain_text():
    assert read({"text": "abc", "id": 1}) == Text(completion="abc")


def test_undetected_format_lists_columns_and_formats():
    with pytest.raises(UserError, match="not recognised") as error:
        detect_format(["body", "title"])
    assert "body, title" in str(error.value)
    for dataset_format in FORMATS:
        assert f"{dataset_format.name}: {', '.join(dataset_format.required)}" in str(error.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": []}, "list of messages is empty"),
        ({"messages": "hello"}, "expected a list of messages, got str"),
        ({"messages": ["hello"]}, "message 0 is str"),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": None}]},
            "must be text, got null",
        ),
        ({"messages": [QUESTION, {"role": "assistant", "content": [1]}]}, "must be text, got list"),
        ({"messages": [QUESTION, {"role": "tool", "content": "x"}]}, "role 'tool' is none of"),
        ({"messages": [QUESTION, {"content": "x"}]}, "role None is none of"),
        ({"messages": [QUESTION, {**ANSWER, "tool_calls": [1]}]}, "'tool_calls' is not supported"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0}]}, "weight 0"),
        ({"messages": [QUESTION, {**ANSWER, "train": False}]}, "weight 0"),
        ({"messages": [QUESTION]}, "no assistant turn"),
        ({"messages": [ANSWER, QUESTION, ANSWER]}, "no user turn before it"),
        ({"messages": [SYSTEM, QUESTION, ANSWER], "system": "x"}, "keep one"),
        ({"messages": [QUESTION, ANSWER], "tools": [{"name": "f"}]}, "'tools' is not supported"),
        ({"conversations": [{"from": "human", "value": 3}]}, "must be text, got int"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "role 'bot' is none of"),
        ({"conversations": 3}, "expected a list of messages, got int"),
        ({"prompt": "a", "completion": [ANSWER]}, "must both be text or both"),
        ({"prompt": [QUESTION, ANSWER], "completion": [QUESTION]}, "no assistant turn"),
        ({"prompt": "a", "completion": "b", "system": "x"}, "'system' is not supported"),
        ({"instruction": "a", "output": 1}, "'output' must be text, got int"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, "'history' must be a list"),
        ({"instruction": "a", "output": "b", "history": 5}, "'history' must be a list"),
        ({"question": "a", "answer": None}, "'answer' of the question/answer format is null"),
        ({"text": None}, "'text' of the text format is null"),
        ({"text": "half \ud800 character"}, "not valid Unicode"),
    ],
)
def test_bad_records(record, message):
    with pytest.raises(UserError, match=message):
        read(record)


def test_missing_column():
    with pytest.raises(UserError, match="'answer' of the question/answer format is missing"):
        convert({"question": "a"}, detect_format(["question", "answer"]))


def test_messages_for_generation_need_no_answer():
    assert check_messages([{**QUESTION, "id": 1}]) == [QUESTION]
