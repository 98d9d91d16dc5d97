"""Packing keeps every token once; batches know their padding by construction."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars.data.collate import Collator, pack
from mars.data.dataset import Example


def example(example_id: int, *ids: int, first_target: int = 1) -> Example:
    supervised = [i >= first_target for i in range(len(ids))]
    return Example(input_ids=list(ids), supervised=supervised, example_id=example_id)


LENGTHS = st.lists(st.integers(1, 9), max_size=30)


@given(lengths=LENGTHS, max_length=st.integers(9, 20))
def test_packing_keeps_every_example_once(lengths, max_length):
    examples = [example(i, *[7] * length) for i, length in enumerate(lengths)]
    rows = pack(examples, max_length)
    packed = sorted(e.example_id for row in rows for e in row)
    assert packed == list(range(len(lengths)))
    sizes = [sum(len(e.input_ids) for e in row) for row in rows]
    assert all(0 < size <= max_length for size in sizes)
    assert rows == pack(examples, max_length)
    # No two rows would fit into one: the last document of a row went to no earlier row.
    assert sum(size <= max_length / 2 for size in sizes) <= 1


def test_best_fit_decreasing():
    examples = [example(i, *[7] * length) for i, length in enumerate([2, 6, 3, 4, 2])]
    rows = pack(examples, 10)
    # 6 opens a row, 4 fills it; 3 opens a row; both 2s join it, the earlier one first.
    assert [[e.example_id for e in row] for row in rows] == [[1, 3], [2, 0, 4]]


def test_fullest_row_is_preferred():
    examples = [example(i, *[7] * length) for i, length in enumerate([6, 7, 3])]
    assert [[e.example_id for e in row] for row in pack(examples, 10)] == [[1, 2], [0]]


def test_packing_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="example 3: 3 tokens > 2"):
        pack([example(3, 1, 2, 3)], 2)


def test_batch_by_hand():
    rows = [[example(4, 5, 6, 7, first_target=2), example(9, 8, 0)], [example(1, 3)]]
    batch = Collator(pad_token_id=0, pad_to_multiple_of=4)(rows)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]],
        "labels": [[-100, -100, 7, -100, 0, -100, -100, -100], [-100] * 8],
        "document_ids": [[0, 0, 0, 1, 1, -1, -1, -1], [0, -1, -1, -1, -1, -1, -1, -1]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 0, 0], [0] * 8],
        "example_ids": [[4, 4, 4, 9, 9, -1, -1, -1], [1, -1, -1, -1, -1, -1, -1, -1]],
    }
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    multiple=st.integers(1, 8),
    pad_token_id=st.integers(0, 3),
)
def test_no_token_is_lost_or_invented(lengths, multiple, pad_token_id):
    # Tokens 0..3, so that padding cannot be told from tokens by id.
    examples = [example(i, *(j % 4 for j in range(n))) for i, n in enumerate(lengths)]
    rows = pack(examples, 16)
    batch = Collator(pad_token_id=pad_token_id, pad_to_multiple_of=multiple)(rows)
    assert batch["input_ids"].shape[1] % multiple == 0
    real = batch["document_ids"] >= 0
    assert real.sum() == sum(lengths)
    assert (batch["labels"][~real] == -100).all()
    assert (batch["input_ids"][~real] == pad_token_id).all()
    assert ((batch["example_ids"] >= 0) == real).all()
    for e in examples:
        mine = batch["example_ids"] == e.example_id
        assert batch["input_ids"][mine].tolist() == e.input_ids
        assert (batch["labels"][mine] != -100).tolist() == e.supervised
        assert batch["position_ids"][mine].tolist() == list(range(len(e.input_ids)))
        assert batch["document_ids"][mine].unique().numel() == 1
    targets = batch["labels"] != -100
    assert (batch["labels"][targets] == batch["input_ids"][targets]).all()


def test_bad_multiple():
    with pytest.raises(ValueError, match="pad_to_multiple_of"):
        Collator(pad_token_id=0, pad_to_multiple_of=0)
