"""Recognise the usual dataset formats; convert one record to a `Chat`, a `Text`, a `Trajectory`.

Everything here is pure: a record is a mapping of column names to values, as a JSON line gives it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mars.errors import UserError

Record = Mapping[str, Any]
Message = dict[str, str]
"""A chat message: `role` is "system", "user" or "assistant", `content` is text."""

ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
COLUMNS_ADVICE = (
    "--columns question=NAME,answer=NAME (in Python columns={'question': 'NAME', ...}), with the "
    "names of your file"
)
# These change what a model is given or what it should answer, so they cannot be ignored.
UNSUPPORTED_COLUMNS = ("tools", "functions", "images", "videos", "audios")
UNSUPPORTED_MESSAGE_KEYS = (
    *("tool_calls", "tool_call_id", "function_call"),
    *("reasoning_content", "thinking", "images", "audio"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to be written out by the tokenizer's chat template."""

    messages: list[Message]
    context: int = 0
    """Number of leading messages that are given: their assistant turns are not learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Text that is tokenised as it stands, without a chat template."""

    prompt: str = ""
    """Given, not learnt; empty for plain text."""
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What a model answered, token by token (`mars distill`); it is learnt as it is."""

    messages: list[Message]
    """The prompt: what came before the answer."""
    text: str
    """The answer as text."""
    prompt_ids: list[int]
    """The prompt as the model got it."""
    answer_ids: list[int]
    """The answer. An end token is the last one, unless the answer was cut."""
    model: str | None = None
    """Name of the model, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One dataset format: the columns that identify it and how a record of it is read."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    read: Callable[[Record], Chat | Text | Trajectory]


def parse_columns(text: str) -> dict[str, str]:
    """Read `prompt=instruction,completion=output`: the standard name and the file's name of each.

    Raises:
        UserError: the text has another shape.
    """
    pairs = [[part.strip() for part in pair.split("=")] for pair in text.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise UserError(
            f"columns must look like prompt=instruction,completion=output; got {text!r}."
        )
    return dict(pairs)


def detect_format(columns: Collection[str]) -> Format:
    """Return the first of `FORMATS` whose required columns are all present.

    Raises:
        UserError: no format fits; lists the columns found and the formats accepted.
    """
    for candidate in FORMATS:
        if set(candidate.required) <= set(columns):
            return candidate
    accepted = "\n".join(f"  {f.name}: {', '.join(f.required)}" for f in FORMATS)
    raise UserError(
        f"the dataset format was not recognised. Columns found: {', '.join(columns) or 'none'}.\n"
        f"Formats accepted, with the columns each needs:\n{accepted}\n"
        f"Rename the columns, or map them: {COLUMNS_ADVICE}."
    )


def convert(record: Record, dataset_format: Format) -> Chat | Text | Trajectory:
    """Read one record of a dataset whose format is known.

    Raises:
        UserError: as `read_record`; also if there is no assistant turn to learn from.
    """
    converted = read_record(record, dataset_format)
    if isinstance(converted, Chat):
        _check_turns(converted)
    return converted


def read_record(record: Record, dataset_format: Format) -> Chat | Text | Trajectory:
    """Read one record, which need not hold anything to learn.

    Raises:
        UserError: a column is missing or empty (null), a value has the wrong type, a role is
            unknown, or the record uses something unsupported.
    """
    for name in (*UNSUPPORTED_COLUMNS, "system"):
        if record.get(name) and name not in dataset_format.optional:
            raise UserError(
                f"column '{name}' is not supported in the {dataset_format.name} format: remove it, "
                f"or name the columns to read: {COLUMNS_ADVICE}"
            )
    for name in dataset_format.required:
        if record.get(name) is None:
            state = "is null" if name in record else "is missing"
            raise UserError(f"column '{name}' of the {dataset_format.name} format {state}")
    return dataset_format.read(record)


def check_messages(messages: object) -> list[Message]:
    """Return the messages reduced to `role` and `content`.

    Raises:
        UserError: not a list of messages, unknown role, content that is no text, tool calls.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise UserError(f"expected a list of messages, got {type(messages).__name__}")
    if not messages:
        raise UserError("the list of messages is empty")
    return [_check_message(message, index) for index, message in enumerate(messages)]


def _check_message(message: object, index: int) -> Message:
    if not isinstance(message, Mapping):
        raise UserError(f"message {index} is {type(message).__name__}, expected role and content")
    for key in UNSUPPORTED_MESSAGE_KEYS:
        if message.get(key):
            raise UserError(f"message {index}: '{key}' is not supported; remove this record")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UserError(f"message {index}: role {role!r} is none of {', '.join(ROLES)}")
    if role == "assistant" and (message.get("weight") == 0 or message.get("train") is False):
        raise UserError(f"message {index}: assistant turns of weight 0 are not supported")
    return {"role": str(role), "content": check_text(content, f"content of message {index}")}


def check_text(value: object, what: str) -> str:
    """Return the value if it is text that a tokenizer can read; `what` names it in the error."""
    if not isinstance(value, str):
        name = "null" if value is None else type(value).__name__
        raise UserError(f"{what} must be text, got {name}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not valid Unicode: {error}; repair the file") from error
    return value


def _check_turns(chat: Chat) -> None:
    """Check that there is something to learn and that a user speaks first, as templates need."""
    roles = [message["role"] for message in chat.messages]
    if "assistant" not in roles[chat.context :]:
        raise UserError(f"no assistant turn to learn from (roles: {', '.join(roles)})")
    if "user" not in roles[: roles.index("assistant")]:
        raise UserError("the first assistant turn has no user turn before it; remove that turn")


def _read_messages(record: Record) -> Chat:
    return Chat(messages=_with_system(record, check_messages(record["messages"])))


def _read_distilled(record: Record) -> Trajectory:
    messages = check_messages(record["messages"])
    if messages[-1]["role"] != "assistant":
        raise UserError("the last message must be the answer of the assistant")
    prompt_ids, answer_ids = _token_ids(record, "prompt_ids"), _token_ids(record, "answer_ids")
    model = record.get("model")
    return Trajectory(
        messages=messages[:-1],
        text=messages[-1]["content"],
        prompt_ids=prompt_ids,
        answer_ids=answer_ids,
        model=None if model is None else str(model),
    )


def _token_ids(record: Record, name: str) -> list[int]:
    ids = record[name]
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str) and len(ids) > 0
    if not is_list or not all(type(token) is int and token >= 0 for token in ids):
        raise UserError(f"column '{name}' must be a list of token ids, got {str(ids)[:60]!r}")
    return list(ids)


def _read_sharegpt(record: Record) -> Chat:
    turns = record["conversations"]
    if isinstance(turns, Sequence) and not isinstance(turns, str):
        turns = [_from_sharegpt(turn) for turn in turns]
    return Chat(messages=_with_system(record, check_messages(turns)))


def _from_sharegpt(turn: object) -> object:
    """Rename from/value to role/content; anything else is left for `check_messages` to judge."""
    if not isinstance(turn, Mapping) or turn.get("from") is None:
        return turn
    role = str(turn["from"])
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {**rest, "role": SHAREGPT_ROLES.get(role, role), "content": turn.get("value")}


def _read_prompt_completion(record: Record) -> Chat | Text:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text(prompt=_text(record, "prompt"), completion=_text(record, "completion"))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError("prompt and completion must both be text or both be lists of messages")
    given = check_messages(prompt)
    return Chat(messages=given + check_messages(completion), context=len(given))


def _read_alpaca(record: Record) -> Chat:
    question = _text(record, "instruction")
    if record.get("input"):
        question = f"{question}\n\n{_text(record, 'input')}"
    pairs = [*_history(record), (question, _text(record, "output"))]
    return Chat(messages=_with_system(record, _dialogue(pairs)))


def _history(record: Record) -> Iterable[tuple[str, str]]:
    history = record.get("history") or []
    if not isinstance(history, list) or any(
        not isinstance(p, list) or len(p) != 2 for p in history
    ):
        raise UserError(
            f"'history' must be a list of [question, answer] pairs, got {str(history)[:60]}"
        )
    for question, answer in history:
        yield check_text(question, "'history'"), check_text(answer, "'history'")


def _read_question_answer(record: Record) -> Chat:
    pairs = [(_text(record, "question"), _text(record, "answer"))]
    return Chat(messages=_with_system(record, _dialogue(pairs)))


def _read_text(record: Record) -> Text:
    return Text(completion=_text(record, "text"))


def _dialogue(pairs: Iterable[tuple[str, str]]) -> list[Message]:
    return [
        {"role": role, "content": content}
        for pair in pairs
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]


def _with_system(record: Record, messages: list[Message]) -> list[Message]:
    """Put the text of an optional column `system` before the conversation."""
    if not record.get("system"):
        return messages
    if messages[0]["role"] == "system":
        raise UserError("there is both a column 'system' and a system message; keep one")
    return [{"role": "system", "content": _text(record, "system")}, *messages]


def _text(record: Record, name: str) -> str:
    return check_text(record[name], f"column '{name}'")


# In order of preference: Alpaca files, for example, often carry a rendered `text` as well.
FORMATS = (
    Format(
        name="distilled",
        required=("messages", "prompt_ids", "answer_ids"),
        optional=(
            *("source", "temperature", "top_p", "seed", "finish_reason"),
            *("model", "fingerprint", "repeats"),
        ),
        read=_read_distilled,
    ),
    Format(name="chat", required=("messages",), optional=("system",), read=_read_messages),
    Format(name="ShareGPT", required=("conversations",), optional=("system",), read=_read_sharegpt),
    Format(
        name="prompt/completion",
        required=("prompt", "completion"),
        read=_read_prompt_completion,
    ),
    Format(
        name="Alpaca",
        required=("instruction", "output"),
        optional=("input", "system", "history"),
        read=_read_alpaca,
    ),
    Format(
        name="question/answer",
        required=("question", "answer"),
        optional=("system",),
        read=_read_question_answer,
    ),
    Format(name="text", required=("text",), read=_read_text),
)
