"""The masked stream, by enumeration: every mask is a mask of a decoding step."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.masks import dense_mask
from mars.streams import IGNORE, PADDING, Streams, build_streams, tile_blocks

MASK = 3


@st.composite
def rows(draw, max_tokens: int = 24):
    """Draw a batch: documents in a row, each with supervised spans, then padding."""
    num_rows = draw(st.integers(1, 3))
    lengths = [draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)) for _ in range(num_rows)]
    width = max(1, *(sum(row) for row in lengths)) + draw(st.integers(0, 3))
    batch = {
        k: torch.zeros(num_rows, width, dtype=torch.long) for k in ("input_ids", "position_ids")
    }
    batch["labels"] = torch.full((num_rows, width), IGNORE)
    batch["document"] = torch.full((num_rows, width), PADDING)
    for row, documents in enumerate(lengths):
        at = 0
        for number, length in enumerate(documents):
            for position in range(length):
                token = draw(st.integers(4, 99))
                batch["input_ids"][row, at] = token
                batch["position_ids"][row, at] = position
                batch["document"][row, at] = number
                if position > 0 and draw(st.booleans()):
                    batch["labels"][row, at] = token
                at += 1
    return batch


def make_streams(batch: dict[str, torch.Tensor], block_size: int, phase: int) -> Streams:
    phases = torch.full_like(batch["labels"], phase)
    blocks = tile_blocks(batch["labels"], batch["document"], phases, block_size)
    return build_streams(**batch, blocks=blocks, mask_token_id=MASK)


def spans(batch: dict[str, torch.Tensor], row: int) -> list[tuple[int, int]]:
    """List the supervised spans [first, end) of a row, the slow way."""
    labels, document = batch["labels"][row].tolist(), batch["document"][row].tolist()
    found, t = [], 0
    while t < len(labels):
        end = t
        while end < len(labels) and labels[end] != IGNORE and document[end] == document[t]:
            end += 1
        if end > t:
            found.append((t, end))
        t = max(end, t + 1)
    return found


@settings(max_examples=200, deadline=None)
@given(rows(), st.integers(1, 6), st.data())
def test_every_mask_is_a_mask_of_a_decoding_step(batch, block_size, data):
    phase = data.draw(st.integers(0, block_size - 1))
    streams = make_streams(batch, block_size, phase)
    visible = dense_mask(streams)[:, 0]
    num_clean = streams.num_clean
    for row in range(len(batch["labels"])):
        expected_targets = [t for a, e in spans(batch, row) for t in range(a + 1, e)]
        masks = [i for i in range(num_clean, visible.shape[1]) if streams.offset[row, i] > 0]
        targets = []
        for i in masks:
            j, s = int(streams.offset[row, i]), int(streams.limit[row, i])
            t = s + j  # slot arithmetic: mask j after prefix 0..s-1 predicts token s + j
            targets.append(t)
            assert 1 <= j <= block_size
            assert any(a <= s and t < e for a, e in spans(batch, row))
            assert streams.input_ids[row, i] == MASK
            assert streams.target[row, i] == batch["input_ids"][row, t]
            assert streams.position_ids[row, i] == batch["position_ids"][row, s] + j - 1
            assert streams.source[row, i] == t - 1
            # It sees the whole prefix of its document, and masks 1..j of the same step.
            document = batch["document"][row]
            prefix = {k for k in range(s) if document[k] == document[t]}
            own = {m for m in masks if streams.limit[row, m] == s and streams.offset[row, m] <= j}
            assert len(own) == j
            assert set(torch.nonzero(visible[row, i]).flatten().tolist()) == prefix | own
        assert targets == expected_targets  # each once; a span's first token is the clean stream's


@settings(max_examples=100, deadline=None)
@given(rows(), st.integers(1, 6), st.data())
def test_clean_stream_is_plain_causal_and_never_sees_a_mask(batch, block_size, data):
    streams = make_streams(batch, block_size, data.draw(st.integers(0, block_size - 1)))
    visible = dense_mask(streams)[:, 0]
    document = batch["document"]
    for row in range(len(document)):
        for t in range(streams.num_clean):
            seen = set(torch.nonzero(visible[row, t]).flatten().tolist())
            assert seen == {k for k in range(t + 1) if document[row, k] == document[row, t]}
            follows = t + 1 < streams.num_clean and document[row, t + 1] == document[row, t]
            expected = int(batch["labels"][row, t + 1]) if follows else IGNORE
            assert streams.target[row, t] == expected


def test_all_prefixes_and_offsets_are_trained_over_the_phases():
    length, first, block_size = 12, 4, 4
    tokens = torch.arange(10, 10 + length)[None]
    labels = tokens.clone()
    labels[:, :first] = IGNORE
    batch = {
        "input_ids": tokens,
        "labels": labels,
        "document": torch.zeros_like(tokens),
        "position_ids": torch.arange(length)[None],
    }
    seen = set()
    for phase in range(block_size):
        streams = make_streams(batch, block_size, phase)
        is_mask = streams.offset[0] > 0
        seen |= set(
            zip(
                streams.limit[0][is_mask].tolist(), streams.offset[0][is_mask].tolist(), strict=True
            )
        )
    assert seen == {
        (p, j) for p in range(first, length) for j in range(1, block_size + 1) if p + j < length
    }


def test_padding_is_never_a_token_id():
    """A pad id inside the text counts like any token; only `document` says what padding is."""
    batch = {
        "input_ids": torch.tensor([[0, 0, 0, 0]]),
        "labels": torch.tensor([[IGNORE, 0, 0, IGNORE]]),
        "document": torch.tensor([[0, 0, 0, PADDING]]),
        "position_ids": torch.tensor([[0, 1, 2, 0]]),
    }
    streams = make_streams(batch, 4, 0)
    assert streams.target[0].tolist() == [0, 0, IGNORE, IGNORE, 0]
    assert streams.offset[0].tolist() == [0, 0, 0, PADDING, 1]


def test_no_masks_gives_the_clean_stream_alone():
    tokens = torch.tensor([[5, 6, 7]])
    labels = torch.full_like(tokens, IGNORE)
    batch = {
        "input_ids": tokens,
        "labels": labels,
        "document": torch.zeros_like(tokens),
        "position_ids": torch.arange(3)[None],
    }
    streams = make_streams(batch, 4, 0)
    assert streams.input_ids.tolist() == tokens.tolist()
    assert (streams.target == IGNORE).all()
