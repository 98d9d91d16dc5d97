"""From a file or a hub dataset to tokenised examples with their loss masks."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from transformers import PreTrainedTokenizerBase

from mars.data.files import SUFFIXES, file_suffix, read_file
from mars.data.formats import Format, Record, Text, Trajectory, convert, detect_format
from mars.data.template import Encoded, encode_chat, encode_text, encode_trajectory
from mars.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

OnLong = Literal["drop", "truncate", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One tokenised document."""

    input_ids: list[int]
    supervised: list[bool]
    """Per token: is it a target? The first never is, as nothing precedes it."""
    example_id: int
    """Position of the record in its file, from 0."""

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.supervised):
            raise ValueError(f"{len(self.input_ids)} tokens, {len(self.supervised)} mask values")
        if self.supervised and self.supervised[0]:
            raise ValueError("the first token of a document cannot be supervised")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What became of the records: `num_records` is the sum of examples and of what was left out."""

    format: str
    max_length: int
    num_records: int
    num_examples: int
    num_dropped: int
    """Longer than `max_length` and left out."""
    num_truncated: int
    """Longer than `max_length` and cut."""
    num_unsupervised: int
    """Left out because no token (any more) is a target."""
    num_tokens: int
    num_supervised_tokens: int
    ignored_columns: tuple[str, ...]

    def describe(self) -> str:
        """Return the report as text for people, a few lines."""
        share = 100 * self.num_supervised_tokens / max(1, self.num_tokens)
        ignored = ", ".join(self.ignored_columns) or "none"
        return (
            f"{self.num_records:,} records in {self.format} format: {self.num_examples:,} examples "
            f"of {self.num_tokens:,} tokens, {share:.1f} % supervised\n"
            f"longer than {self.max_length} tokens: {self.num_dropped:,} left out, "
            f"{self.num_truncated:,} truncated; without a supervised token and left out: "
            f"{self.num_unsupervised:,}; ignored columns: {ignored}"
        )


def read_records(
    source: str | Path,
    *,
    split: str = "train",
    columns: dict[str, str] | None = None,
    limit: int | None = None,
) -> "list[dict[str, Any]] | Dataset":
    """Read a dataset from a local file or from the hub.

    Args:
        source: a JSONL, JSON, CSV or Parquet file (text ones also as `.gz`), or a `datasets` id,
            with its configuration after a colon where it needs one: `openai/gsm8k:main`.
        split: the split of a hub dataset; a local file has none.
        columns: {standard name: name in the file}; only these columns are then read.
        limit: read only the first so many records.

    Raises:
        UserError: the source does not exist, cannot be read or is empty, or lacks a mapped column.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1, got {limit}")
    path = Path(source).expanduser()
    if path.is_file():
        if split != "train":
            raise UserError(f"{source} is a file and has no split '{split}'")
        records = read_file(path, limit=limit)
        return _rename(records, columns) if columns else records
    if path.is_dir():
        raise UserError(f"{source} is a folder; name a file in it")
    if isinstance(source, Path) or file_suffix(path) in SUFFIXES:
        raise UserError(f"{source}: there is no such file")
    dataset = _load_hub_dataset(source, split, limit)
    if not columns:
        return dataset
    _check_columns(columns, dataset.column_names)
    dataset = dataset.select_columns(list(columns.values()))
    renamed = dataset.rename_columns({name: standard for standard, name in columns.items()})
    return cast("Dataset", renamed)


def build_examples(
    records: "Iterable[Record] | Dataset",
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    last_turn_only: bool = False,
    on_long: OnLong = "drop",
    eos_token_ids: Collection[int],
) -> tuple[list[Example], BuildReport]:
    """Detect the format of the records and tokenise them with their loss masks.

    Args:
        records: what `read_records` returned.
        tokenizer: a fast tokenizer; with a chat template unless the data is text.
        max_length: longest example in tokens.
        last_turn_only: in conversations, supervise only the last assistant turn.
        on_long: what happens to longer ones: left out, cut at the end, or an error.
        eos_token_ids: the tokens where generation stops (`Checkpoint.eos_token_ids`).

    Returns:
        The examples in the order of the records, and a report that accounts for every record.

    Raises:
        UserError: unknown format, a record that does not fit it (with its index), or nothing left
            to learn from.
    """
    _check_options(max_length, on_long)
    rows: list[Record] = [dict(record) for record in records]
    dataset_format, ignored = _detect(rows)
    encoded = [
        _encode(record, index, dataset_format, tokenizer, eos_token_ids, last_turn_only)
        for index, record in enumerate(rows)
    ]
    num_long = sum(len(ids) > max_length for ids, _ in encoded)
    if num_long and on_long == "error":
        raise _too_long(encoded, max_length)
    candidates = [
        Example(input_ids=ids[:max_length], supervised=mask[:max_length], example_id=index)
        for index, (ids, mask) in enumerate(encoded)
        if len(ids) <= max_length or on_long == "truncate"
    ]
    examples = [example for example in candidates if any(example.supervised)]
    report = BuildReport(
        format=dataset_format.name,
        max_length=max_length,
        num_records=len(rows),
        num_examples=len(examples),
        num_dropped=len(rows) - len(candidates),
        num_truncated=num_long if on_long == "truncate" else 0,
        num_unsupervised=len(candidates) - len(examples),
        num_tokens=sum(len(example.input_ids) for example in examples),
        num_supervised_tokens=sum(sum(example.supervised) for example in examples),
        ignored_columns=ignored,
    )
    if not examples:
        raise _nothing_left(report, shortest=min(len(ids) for ids, _ in encoded))
    return examples, report


def _check_options(max_length: int, on_long: str) -> None:
    if max_length < 2 or on_long not in get_args(OnLong):
        raise UserError(
            f"max_length must be at least 2 and on_long one of {', '.join(get_args(OnLong))}; "
            f"got {max_length} and {on_long!r}"
        )


def _detect(rows: list[Record]) -> tuple[Format, tuple[str, ...]]:
    """Return the format of the columns of all records together, and the columns it ignores."""
    if not rows:
        raise UserError("there are no records in the dataset")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    dataset_format = detect_format(columns)
    used = dataset_format.required + dataset_format.optional
    return dataset_format, tuple(name for name in columns if name not in used)


def _encode(
    record: Record,
    index: int,
    dataset_format: Format,
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Collection[int],
    last_turn_only: bool,
) -> Encoded:
    try:
        converted = convert(record, dataset_format)
        if isinstance(converted, Text):
            return encode_text(converted, tokenizer, eos_token_ids=eos_token_ids)
        if isinstance(converted, Trajectory):
            return encode_trajectory(converted, tokenizer)
        return encode_chat(
            converted, tokenizer, eos_token_ids=eos_token_ids, last_turn_only=last_turn_only
        )
    except UserError as error:
        raise UserError(f"record {index} (counted from 0): {error}") from error


def _too_long(encoded: list[Encoded], max_length: int) -> UserError:
    lengths = {index: len(ids) for index, (ids, _) in enumerate(encoded) if len(ids) > max_length}
    first = min(lengths)
    return UserError(
        f"{len(lengths)} records are longer than max_length={max_length}, the first is record "
        f"{first} (counted from 0) with {lengths[first]} tokens; raise max_length, or set on_long "
        "to drop or truncate"
    )


def _nothing_left(report: BuildReport, *, shortest: int) -> UserError:
    if report.num_dropped == report.num_records:
        return UserError(
            f"all {report.num_records} records are longer than max_length={report.max_length} "
            f"(the shortest has {shortest} tokens); raise max_length or set on_long='truncate'"
        )
    return UserError(
        f"no token of the {report.num_records} records is supervised (all-zero loss mask), so "
        f"there is nothing to learn: {report.num_dropped} records are longer than "
        f"max_length={report.max_length}, {report.num_truncated} were cut there; in the others "
        "the chat template marks no assistant token, or the text has a single token"
    )


def _rename(records: list[dict[str, Any]], columns: dict[str, str]) -> list[dict[str, Any]]:
    _check_columns(columns, dict.fromkeys(name for record in records for name in record))
    return [
        {standard: record[name] for standard, name in columns.items() if name in record}
        for record in records
    ]


def _check_columns(columns: dict[str, str], found: Collection[str]) -> None:
    missing = [name for name in columns.values() if name not in found]
    if missing:
        raise UserError(
            f"there is no column {', '.join(missing)}; the columns are: {', '.join(found)}"
        )


def _load_hub_dataset(source: str, split: str, limit: int | None) -> "Dataset":
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(
            f"{source} is no local file, and hub datasets need: pip install 'mars-lm[train]'"
        ) from error
    name, _, configuration = source.partition(":")
    part = split if limit is None else f"{split}[:{limit}]"
    try:
        dataset = load_dataset(name, configuration or None, split=part)
    # The library raises many kinds of errors (network, authentication, unknown id or split).
    except Exception as error:
        raise UserError(
            f"{source} is no local file and cannot be loaded from the hub (split '{part}'): {error}"
        ) from error
    if not len(dataset):
        raise UserError(f"{source}: there are no records in split '{split}'")
    return dataset
