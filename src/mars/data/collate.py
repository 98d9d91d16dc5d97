"""Pack examples into rows and make tensors of them.

B rows, L tokens a row. A row holds one or more documents (examples); padding is at its right end.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mars.data.dataset import Example

IGNORED_LABEL = -100
PADDING_DOCUMENT = -1


def pack(examples: Sequence[Example], max_length: int) -> list[list[Example]]:
    """Distribute examples over rows of at most `max_length` tokens (best-fit decreasing).

    The longest example first, each goes to the fullest row that still has room. The result depends
    on nothing but the arguments; every example is in exactly one row.

    Raises:
        ValueError: an example is longer than a row.
    """
    rows: list[list[Example]] = []
    space: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for example in sorted(examples, key=lambda e: -len(e.input_ids)):
        length = len(example.input_ids)
        if length > max_length:
            raise ValueError(f"example {example.example_id}: {length} tokens > {max_length}")
        fit = bisect_left(space, (length, -1))
        if fit < len(space):
            left, row = space.pop(fit)
        else:
            left, row = max_length, len(rows)
            rows.append([])
        rows[row].append(example)
        insort(space, (left - length, row))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Make one batch of tensors from rows of examples (see `pack`; unpacked: `[[example], ...]`).

    All tensors are int64 of shape [B, L]:

    * `input_ids`: tokens, right padded with `pad_token_id`.
    * `labels`: the token itself where it is supervised, else -100. Label t belongs to token t (it
      is not shifted): the output at t - 1 predicts it.
    * `document_ids`: 0, 1, ... for the documents of a row, -1 for padding.
    * `position_ids`: from 0 in every document; 0 for padding.
    * `example_ids`: the `example_id` of the token's document, -1 for padding.

    Padding is where `document_ids` is -1, whatever the tokens are.
    """

    pad_token_id: int
    pad_to_multiple_of: int = 1
    """L is rounded up to a multiple of this."""

    def __post_init__(self) -> None:
        if self.pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of must be >= 1, got {self.pad_to_multiple_of}")

    def __call__(self, rows: Sequence[Sequence[Example]]) -> dict[str, Tensor]:
        """Return the batch of these rows."""
        columns = [_row_columns(row) for row in rows]
        longest = max(len(column["input_ids"]) for column in columns)
        length = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        padding = {
            "input_ids": self.pad_token_id,
            "labels": IGNORED_LABEL,
            "document_ids": PADDING_DOCUMENT,
            "position_ids": 0,
            "example_ids": PADDING_DOCUMENT,
        }
        return {
            name: torch.tensor([_padded(column[name], length, value) for column in columns])
            for name, value in padding.items()
        }


def _padded(values: list[int], length: int, value: int) -> list[int]:
    return values + [value] * (length - len(values))


def _row_columns(row: Sequence[Example]) -> dict[str, list[int]]:
    columns: dict[str, list[int]] = {
        name: [] for name in ("input_ids", "labels", "document_ids", "position_ids", "example_ids")
    }
    for document, example in enumerate(row):
        length = len(example.input_ids)
        columns["input_ids"] += example.input_ids
        columns["labels"] += [
            token if target else IGNORED_LABEL
            for token, target in zip(example.input_ids, example.supervised, strict=True)
        ]
        columns["document_ids"] += [document] * length
        columns["position_ids"] += range(length)
        columns["example_ids"] += [example.example_id] * length
    return columns
