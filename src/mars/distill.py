"""Self-distillation: a model answers prompts, and its answers become training data.

The file of answers is all the memory there is: a run takes up what it finds there, so it can be
interrupted at any time, and prompts, temperatures and seeds can be added later.
"""

import hashlib
import json
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from mars.checkpoint import Checkpoint
from mars.data.formats import Message, check_messages
from mars.data.prompts import PromptRecord
from mars.decoding.generate import prepare, run
from mars.decoding.options import DecodingOptions
from mars.decoding.prompts import encode
from mars.decoding.request import Request, Result
from mars.errors import UserError
from mars.gated import fingerprint

# Requests that wait at the same time, per row of the batch. They run in order of length, for
# little padding; the more, the rarer the moments when no request is left to fill the batch.
CHUNK_ROWS = 32
_BEGINNING = b'{"messages": '
_FINGERPRINT_DIGITS = 16


@dataclass(slots=True, kw_only=True)
class Tally:
    """How far a run has come. Answers are counted per prompt and temperature."""

    num_wanted: int
    """All answers, of identical prompts only one."""
    num_identical_prompts: int
    num_found: int = 0
    """Already in the file."""
    num_written: int = 0
    num_cut: int = 0
    """Of the written ones, those that reached the most tokens allowed."""
    num_repeated: int = 0
    """Not written: the same prompt has an answer with the same tokens."""
    num_too_long: int = 0
    """Not asked for: prompt and answer may exceed the model's context."""
    num_tokens: int = 0
    """Generated so far, unfinished answers included."""

    @property
    def num_done(self) -> int:
        """Answers about which nothing is left to do."""
        return self.num_found + self.num_written + self.num_repeated + self.num_too_long

    def describe(self) -> str:
        """Return the tally as text for people, a few lines."""
        return (
            f"{self.num_wanted:,} answers: {self.num_found:,} were there, {self.num_written:,} "
            f"written ({self.num_cut:,} of them cut at the most tokens), {self.num_repeated:,} "
            f"not written because they repeat another answer to their prompt\n"
            f"too long for the model's context and left out: {self.num_too_long:,}; identical "
            f"prompts left out: {self.num_identical_prompts:,}"
        )


def answer_options(
    temperatures: Sequence[float], *, seed: int, top_p: float, max_new_tokens: int
) -> list[DecodingOptions]:
    """Return the options for one answer at every temperature, each once.

    Raises:
        UserError: a value is out of its range.
    """
    return [
        DecodingOptions(
            mode="ar",
            temperature=temperature,
            seed=seed,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
        )
        for temperature in dict.fromkeys(temperatures)
    ]


def check_output(path: Path, prompts: str | Path) -> None:
    """Refuse a file that could not be written or not be trained on.

    Raises:
        UserError: it is a folder, not named `.jsonl`, or the file of the prompts.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it, such as {path / 'answers.jsonl'}")
    if path.suffix != ".jsonl":
        raise UserError(f"{path}: the answers are JSON lines; name the file {path.stem}.jsonl")
    if path.exists() and Path(prompts).exists() and path.samefile(prompts):
        raise UserError(f"{path} holds the prompts; name another file for the answers")


def distill(
    checkpoint: Checkpoint,
    prompts: Sequence[PromptRecord],
    path: Path,
    options: Sequence[DecodingOptions],
    *,
    batch_size: int,
) -> Generator[Tally]:
    """Let the model answer every prompt with every one of the options; write what is new.

    1. Answers that the file holds are not asked for again.
    2. The others run in chunks, in each the longest prompt first; every answer is written as soon
       as it is finished. What is said does not depend on the order or the batch: the noise of an
       answer comes from its own prompt, temperature and seed.

    Args:
        checkpoint: from `mars.load`.
        prompts: from `read_prompt_records`.
        path: JSON lines, new or of an earlier run.
        options: from `answer_options`.
        batch_size: rows that run together.

    Yields:
        The same tally again and again, after every change.

    Raises:
        UserError: the file holds something else, or answers of another model; or no prompt fits
            the context.
    """
    tasks: dict[str, Task] = {}
    for task in (Task.of(prompt, o) for prompt in prompts for o in options):
        tasks.setdefault(task.key, task)
    tally = Tally(
        num_wanted=len(tasks), num_identical_prompts=len(prompts) - len(tasks) // len(options)
    )
    with AnswerFile(path, checkpoint) as answers:
        waiting = [task for task in tasks.values() if task.key not in answers.keys]
        tally.num_found = len(tasks) - len(waiting)
        yield tally
        chunk_size = CHUNK_ROWS * batch_size
        for start in range(0, len(waiting), chunk_size):
            chunk = _requests(checkpoint, waiting[start : start + chunk_size], tally)
            yield tally
            yield from _answer(checkpoint, chunk, answers, tally, batch_size)
    if tally.num_too_long == tally.num_wanted:
        raise UserError(
            f"all {len(prompts)} prompts are too long: with the answer they may exceed the model's "
            f"context of {checkpoint.context_length} tokens. Lower max_new_tokens, or shorten them."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt with the options for its answer."""

    prompt: PromptRecord
    options: DecodingOptions
    """As given: with the seed of the run."""
    digest: bytes
    """Of everything an answer depends on, except the model."""

    @classmethod
    def of(cls, prompt: PromptRecord, options: DecodingOptions) -> "Task":
        """Make the task of a prompt."""
        digest = _task_digest(prompt.messages, options.temperature, options.top_p, options.seed)
        return cls(prompt=prompt, options=options, digest=digest)

    @property
    def key(self) -> str:
        """What the file knows the task by."""
        return _key(self.digest)

    @property
    def noise_seed(self) -> int:
        """Seed of the sampler: prompts with the same noise would get answers that resemble."""
        return int.from_bytes(self.digest[-8:], "big", signed=True)


class AnswerFile:
    """A file of answers to add to; a context manager.

    Every record is written in one piece. Of an answer that repeats another one to its prompt,
    only the key is kept, in the field `repeats` of the next record, or on closing the last one.

    Attributes:
        keys: the tasks that have been answered.
    """

    def __init__(self, path: Path, checkpoint: Checkpoint) -> None:
        """Open the file and read what is there; half a last line is dropped.

        Raises:
            UserError: a line is no record of an answer, or one of another model.
        """
        self.keys: set[str] = set()
        self._answers: set[str] = set()
        self._repeats: list[str] = []
        self._last: tuple[int, dict[str, Any]] | None = None  # where the last record starts
        self._path = path
        self._checkpoint = checkpoint
        self._fingerprint = fingerprint(checkpoint.model)[:_FINGERPRINT_DIGITS]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("r+b" if path.exists() else "x+b")
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._repeats and self._last:
            start, record = self._last
            self._file.seek(start)
            self._file.truncate()
            self._write(record)
        self._file.close()
        if not self.keys:
            self._path.unlink()

    def add(self, task: Task, request: Request, result: Result) -> bool:
        """Record an answer; say whether it was new and has been written."""
        self.keys.add(task.key)
        answer = _answer_key(task.prompt.messages, result.token_ids)
        if answer in self._answers:
            self._repeats.append(task.key)
            return False
        self._answers.add(answer)
        reply = {"role": "assistant", "content": result.text}
        source = {} if task.prompt.source is None else {"source": task.prompt.source}
        record = {
            "messages": [*task.prompt.messages, reply],
            **source,
            "temperature": float(task.options.temperature),
            "top_p": float(task.options.top_p),
            "seed": task.options.seed,
            "finish_reason": result.finish_reason,
            "model": self._checkpoint.name,
            "fingerprint": self._fingerprint,
            "prompt_ids": request.prompt_ids,
            "answer_ids": result.token_ids,
        }
        self._write(record)
        return True

    def _write(self, record: dict[str, Any]) -> None:
        """Append a record, and the keys of the repeats before it."""
        known = record.get("repeats", "").split()
        # Text, and in every record: readers that infer types from the first lines stay content.
        record = record | {"repeats": " ".join([*known, *self._repeats])}
        self._last = self._file.tell(), record
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._repeats = []

    def _read(self) -> None:
        """Take up every record; leave the file positioned at its end."""
        start = 0
        for number, line in enumerate(self._file, start=1):
            is_complete = line.endswith(b"\n")
            try:
                record = json.loads(line) if line.strip() else None
            except ValueError as error:
                if is_complete or not (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
                    raise self._error(number, f"not valid JSON ({error})") from error
                self._file.truncate(start)
                break
            if record is not None:
                self._take(record, start, number)
            start += len(line)
            if not is_complete:  # an editor, or an interruption at the last byte
                self._file.write(b"\n")
        self._file.seek(0, os.SEEK_END)

    def _take(self, record: Any, start: int, number: int) -> None:
        try:
            messages = check_messages(record["messages"])[:-1]
            digest = _task_digest(
                messages, record["temperature"], record.get("top_p", 1.0), record["seed"]
            )
            answer = _answer_key(messages, record["answer_ids"])
            repeats = record.get("repeats", "").split()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._error(number, "this is no record of `mars distill`") from error
        self._check_model(record, messages, number)
        self.keys |= {_key(digest), *repeats}
        self._answers.add(answer)
        self._last = start, record

    def _error(self, number: int, what: str) -> UserError:
        return UserError(
            f"{self._path}, line {number}: {what}; remove the line, or name another file for the "
            "answers"
        )

    def _check_model(self, record: dict[str, Any], messages: list[Message], number: int) -> None:
        """Compare fingerprints; without one, in the first record, the tokens of the prompt."""
        found = record.get("fingerprint")
        if found is None and self._last is None:
            is_same = encode(self._checkpoint.tokenizer, messages) == record.get("prompt_ids")
        else:
            is_same = found in (None, self._fingerprint)
        if not is_same:
            name = record.get("model")
            maker = "another model" if name is None else f"the model {name!r} (other weights)"
            raise UserError(
                f"{self._path}, line {number}: this answer was given by {maker}, not by "
                f"{self._checkpoint.name!r}. Name another file for the answers, or the model that "
                "began this one."
            )


def _requests(
    checkpoint: Checkpoint, tasks: Sequence[Task], tally: Tally
) -> list[tuple[Task, Request]]:
    """Prepare the tasks that fit the model's context, the longest first."""
    pairs = []
    for task in tasks:
        ids = encode(checkpoint.tokenizer, task.prompt.messages)
        limit = checkpoint.context_length
        if limit is not None and len(ids) + task.options.max_new_tokens > limit:
            tally.num_too_long += 1
            continue
        options = replace(task.options, seed=task.noise_seed)
        pairs.append((task, prepare(checkpoint, ids, options)))
    return sorted(pairs, key=lambda pair: -len(pair[1].prompt_ids))


def _answer(
    checkpoint: Checkpoint,
    chunk: Sequence[tuple[Task, Request]],
    answers: AnswerFile,
    tally: Tally,
    batch_size: int,
) -> Generator[Tally]:
    for event in run(checkpoint, [request for _, request in chunk], batch_size=batch_size):
        tally.num_tokens += len(event.token_ids)
        if event.result is not None:
            is_new = answers.add(*chunk[event.index], event.result)
            tally.num_written += is_new
            tally.num_repeated += not is_new
            tally.num_cut += is_new and event.result.finish_reason == "length"
        yield tally


def _task_digest(messages: Sequence[Message], temperature: float, top_p: float, seed: int) -> bytes:
    """Hash what an answer depends on; greedy ones depend on neither filter nor seed."""
    sampling = [float(temperature), float(top_p), seed] if temperature else []
    return _digest([_turns(messages), sampling])


def _answer_key(messages: Sequence[Message], token_ids: Sequence[int]) -> str:
    return _key(_digest([_turns(messages), list(token_ids)]))


def _turns(messages: Sequence[Message]) -> list[list[str]]:
    return [[message["role"], message["content"]] for message in messages]


def _digest(value: object) -> bytes:
    return hashlib.sha256(json.dumps(value).encode()).digest()


def _key(digest: bytes) -> str:
    return digest[:8].hex()
