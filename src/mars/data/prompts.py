"""Read any dataset as prompts: conversations that end where a model is to answer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars.data.dataset import read_records
from mars.data.files import SUFFIXES, file_suffix, read_lines
from mars.data.formats import Message, Record, Text, check_messages, detect_format, read_record
from mars.errors import UserError

# The column of the question and that of the answer, which a prompt need not have.
ANSWERS = {"prompt": "completion", "instruction": "output", "question": "answer"}
CONVERSATIONS = ("messages", "conversations")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """A conversation for a model to continue."""

    messages: list[Message]
    """Its last assistant turn, if that was the end, has been dropped."""
    source: Any = None
    """The record's column of this name: where it comes from."""


def read_prompt_records(
    source: str | Path,
    *,
    split: str = "train",
    columns: dict[str, str] | None = None,
    limit: int | None = None,
) -> list[PromptRecord]:
    """Read the prompts of a dataset, in every format but `text`; answers are not needed.

    Args:
        source: what `read_records` reads, or another text file with one prompt a line (text, or
            a record as a JSON object).
        split: the split of a hub dataset.
        columns: {standard name: name in the file}; only these columns are then read.
        limit: read only the first so many records.

    Raises:
        UserError: the source cannot be read or is empty, or a record has no prompt (with its
            index).
    """
    path = Path(source).expanduser()
    if path.is_file() and file_suffix(path) not in SUFFIXES:
        if columns or split != "train":
            raise UserError(f"{source} is read line by line: it has neither columns nor splits")
        records = read_lines(path, limit=limit)
    else:
        name = path if path.suffix == ".txt" else source  # the hub has no such names
        records = read_records(name, split=split, columns=columns, limit=limit)
    rows: list[Record] = [dict(record) for record in records]
    prompts = []
    for index, record in enumerate(rows):
        try:
            prompts.append(
                PromptRecord(messages=prompt_messages(record), source=record.get("source"))
            )
        except UserError as error:
            raise UserError(f"record {index} (counted from 0): {error}") from error
    return prompts


def prompt_messages(record: Record) -> list[Message]:
    """Return the conversation of a record up to the answer that a model is to give.

    Raises:
        UserError: the record is in none of the formats, does not fit its format, or asks nothing.
    """
    given = {name: value for name, value in record.items() if value is not None}
    if not any(name in given for name in (*CONVERSATIONS, *ANSWERS)):
        raise UserError(
            f"no prompt was found. Columns: {', '.join(given) or 'none'}; a prompt is in one of "
            f"{', '.join((*CONVERSATIONS, *ANSWERS))}. Rename the column, or map it: "
            "--columns prompt=NAME"
        )
    messages = _conversation(given)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or not any(m["role"] == "user" for m in messages):
        raise UserError("there is no user turn to answer")
    if not messages[-1]["content"].strip():
        raise UserError("the prompt is empty")
    return messages


def _conversation(given: dict[str, Any]) -> list[Message]:
    """Read a record with the reader of its format, as if it had an empty answer."""
    given = {name: v for name, v in given.items() if name not in ("prompt_ids", "answer_ids")}
    if not any(name in given for name in CONVERSATIONS) and "prompt" in given:
        if not isinstance(given["prompt"], str):
            return check_messages(given["prompt"])
        given["completion"] = ""
    for question, answer in ANSWERS.items():
        if question in given:
            given.setdefault(answer, "")
    converted = read_record(given, detect_format(given))
    if isinstance(converted, Text):
        return [{"role": "user", "content": converted.prompt}]
    return converted.messages
