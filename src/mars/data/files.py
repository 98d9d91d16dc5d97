"""Read records and prompts from local files: JSONL, JSON, CSV, Parquet, plain text lines."""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import IO, Any

from mars.data.formats import Message, check_messages, check_text
from mars.errors import UserError

TEXT_SUFFIXES = (".jsonl", ".json", ".csv")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet")
_LONGEST_FIELD = (1 << 31) - 1  # what fits everywhere
# The last two: a cut and a damaged .gz file.
UNREADABLE = (OSError, UnicodeDecodeError, EOFError, zlib.error)


def file_suffix(path: Path) -> str:
    """Return the lower-case suffix that names the format, without a final `.gz`."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def read_file(path: Path, *, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the records of a file; the suffix says how. Text formats may be compressed (`.gz`).

    Raises:
        UserError: unknown suffix, unreadable or empty file, or a line that cannot be parsed (with
            file name and line number).
    """
    suffix = file_suffix(path)
    compressed = path.name.lower().endswith(".gz")
    if suffix not in (TEXT_SUFFIXES if compressed else SUFFIXES):
        raise UserError(
            f"{path}: unknown kind of file; accepted are {', '.join(SUFFIXES)} "
            f"(and {', '.join(s + '.gz' for s in TEXT_SUFFIXES)})"
        )
    read = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}[suffix]
    try:
        records = list(islice(read(path), limit))
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if not records:
        raise UserError(f"{path}: there are no records in this file")
    return records


def read_lines(path: Path, *, limit: int | None = None) -> list[dict[str, Any]]:
    """Read one record a line; blank lines are skipped.

    A line that starts with `{` is a JSON object; any other line is itself a prompt.

    Raises:
        UserError: unreadable or empty file, or a line that cannot be parsed (with its number).
    """
    try:
        with _open_text(path) as stream:
            records = [
                _parse_object(line, where) if line.lstrip().startswith("{") else {"prompt": line}
                for where, line in islice(_lines(stream, str(path)), limit)
            ]
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if not records:
        raise UserError(f"{path}: there are no prompts in this file")
    return records


def read_prompts(source: str | Path | IO[str]) -> list[str | list[Message]]:
    """Read prompts for generation, one a line; blank lines are skipped.

    A line that starts with `{` is a JSON object with `prompt` (text) or `messages` (a list of chat
    messages); any other line is itself a prompt.

    Args:
        source: path of a file, or an open text stream such as `sys.stdin`.

    Raises:
        UserError: unreadable file, no prompt at all, or a line that is neither (with its number).
    """
    if not isinstance(source, str | Path):
        return _prompts(source, getattr(source, "name", "standard input"))
    try:
        with _open_text(Path(source)) as stream:
            return _prompts(stream, str(source))
    except UNREADABLE as error:
        raise UserError(f"{source}: cannot be read: {error}") from error


def _prompts(stream: IO[str], name: str) -> list[str | list[Message]]:
    prompts = []
    for where, line in _lines(stream, name):
        try:
            prompts.append(_prompt(line, where) if line.lstrip().startswith("{") else line)
        except UserError as error:
            raise error if where in str(error) else UserError(f"{where}: {error}") from error
    if not prompts:
        raise UserError(f"{name}: there are no prompts in this file")
    return prompts


def _prompt(line: str, where: str) -> str | list[Message]:
    record = _parse_object(line, where)
    given = [key for key in ("prompt", "messages") if record.get(key) is not None]
    if len(given) != 1:
        keys = ", ".join(record) or "none"
        raise UserError(f"needs either 'prompt' or 'messages'; its keys are: {keys}")
    if given == ["messages"]:
        return check_messages(record["messages"])
    if not record["prompt"]:
        raise UserError("'prompt' is empty")
    return check_text(record["prompt"], "'prompt'")


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with _open_text(path) as stream:
        for where, line in _lines(stream, str(path)):
            yield _parse_object(line, where)


def _json(path: Path) -> Iterator[dict[str, Any]]:
    with _open_text(path) as stream:
        content = stream.read()
    if not content.strip():
        return
    try:
        value = _loads(content, str(path))
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}"
        raise UserError(f"{where}: not valid JSON: {error.msg} (lines of JSON: .jsonl)") from error
    records = value.get("data") if isinstance(value, dict) else value
    if not isinstance(records, list):
        raise UserError(f'{path}: expected a list of records or {{"data": [...]}}')
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise UserError(f"{path}, record {index}: expected an object, got {str(record)[:60]}")
        yield record


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(_LONGEST_FIELD)  # the default, 131,072 characters, cuts off long texts
    with _open_text(path, newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            for record in reader:
                if None in record:
                    raise UserError(f"{path}, line {reader.line_num}: more values than columns")
                yield dict(record)
        except csv.Error as error:
            line = reader.reader.line_num
            raise UserError(f"{path}, line {line}: not valid CSV: {error}") from error


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{path}: Parquet needs pyarrow: pip install 'mars-lm[train]'") from error
    try:
        yield from parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a valid Parquet file: {error}") from error


def _open_text(path: Path, newline: str | None = None) -> AbstractContextManager[IO[str]]:
    # utf-8-sig: files written on Windows may start with a byte order mark.
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def _lines(stream: IO[str], name: str) -> Iterator[tuple[str, str]]:
    """Yield (place for messages, line without its end) of the lines that are not blank."""
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield f"{name}, line {number}", line.rstrip("\n")


def _loads(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UserError(f"{where}: the JSON is nested too deeply") from error


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = _loads(line, where)
    except json.JSONDecodeError as error:
        message = f"{where}: not valid JSON: {error.msg} at column {error.colno}"
        raise UserError(message) from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, got {line[:60]}")
    return value
