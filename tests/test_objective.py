"""The chunked loss against a naive float64 implementation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.errors import UserError
from mars.objective import Objective, stream_loss
from mars.streams import IGNORE, Streams, build_streams, tile_blocks

WIDTH, VOCABULARY = 8, 23


def make_streams(seed: int, block_size: int, share: float) -> Streams:
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(4, VOCABULARY, (2, 13), generator=generator)
    document = torch.tensor([[0] * 13, [0] * 6 + [1] * 5 + [-1] * 2])
    supervised = torch.rand(2, 13, generator=generator) < share
    labels = torch.where(supervised & (document >= 0), input_ids, IGNORE)
    phase = torch.randint(0, block_size, (2, 13), generator=generator)
    blocks = tile_blocks(labels, document, phase, block_size)
    return build_streams(input_ids, labels, document, torch.zeros_like(labels), blocks, 3)


def naive_loss(hidden: torch.Tensor, streams: Streams, weight: torch.Tensor, o: Objective):
    """Add up the terms of the objective one by one, in float64, from all logits at once."""
    log_probs = (hidden.double() @ weight.double().T).log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for row, place in torch.nonzero(streams.target != IGNORE).tolist():
        offset = int(streams.offset[row, place])
        nll = -log_probs[row, place, streams.target[row, place]]
        if offset == 0:
            total = total + o.clean_weight * nll
            continue
        w = o.masked_weight
        if o.offset_decay is not None:
            w *= math.exp(-(offset - 1) / o.offset_decay)
        if o.masked_loss == "distill":
            teacher = log_probs[row, streams.source[row, place]].detach()
            nll = (teacher.exp() * (teacher - log_probs[row, place])).sum()
        total = total + w * nll
    return total


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([1, 4, 8, 16, 5]),
    st.floats(0, 1),
    st.sampled_from(["ce", "distill"]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([None, 2.0]),
    st.integers(1, 40),
)
def test_chunked_loss_equals_naive_float64(seed, block, share, kind, clean, decay, chunk):
    objective = Objective(masked_loss=kind, clean_weight=clean, offset_decay=decay)
    streams = make_streams(seed, block, share)
    torch.manual_seed(seed)
    hidden = torch.randn(*streams.input_ids.shape, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    sums = stream_loss(
        hidden, streams, lambda h: h @ weight.T, objective, block_size=block, chunk_tokens=chunk
    )
    expected = naive_loss(hidden, streams, weight, objective)
    torch.testing.assert_close(sums.loss.double(), expected, atol=1e-4, rtol=1e-5)
    got = torch.autograd.grad(sums.loss, (hidden, weight), allow_unused=True)
    if expected.requires_grad:
        want = torch.autograd.grad(expected, (hidden, weight))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, atol=1e-4, rtol=1e-4)


def test_statistics_per_offset():
    streams = make_streams(1, 4, 0.9)
    hidden = torch.randn(*streams.input_ids.shape, WIDTH)
    weight = torch.randn(VOCABULARY, WIDTH)
    sums = stream_loss(hidden, streams, lambda h: h @ weight.T, Objective(), block_size=4)
    log_probs = (hidden @ weight.T).log_softmax(-1)
    for offset in range(5):
        at = (streams.offset == offset) & (streams.target != IGNORE)
        chosen = log_probs[at].gather(1, streams.target[at][:, None])
        torch.testing.assert_close(sums.nll[offset], -chosen.sum())
        assert sums.count[offset] == at.sum()
        assert sums.correct[offset] == (log_probs[at].argmax(-1) == streams.target[at]).sum()


def test_logits_never_exist_for_more_than_a_chunk():
    streams = make_streams(2, 4, 1.0)
    sizes = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden @ torch.ones(WIDTH, VOCABULARY)

    hidden = torch.randn(*streams.input_ids.shape, WIDTH)
    stream_loss(hidden, streams, head, Objective(), block_size=4, chunk_tokens=5)
    assert max(sizes) <= 5
    assert sum(sizes) >= (streams.target != IGNORE).sum()


def test_outputs_without_weight_cost_nothing():
    streams = make_streams(2, 4, 1.0)
    seen = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return hidden @ torch.ones(WIDTH, VOCABULARY)

    hidden = torch.randn(*streams.input_ids.shape, WIDTH)
    objective = Objective(clean_weight=0)
    stream_loss(hidden, streams, head, objective, block_size=4, chunk_tokens=1)
    assert sum(seen) == ((streams.target != IGNORE) & (streams.offset > 0)).sum()


def test_nothing_supervised_gives_a_differentiable_zero():
    streams = make_streams(0, 4, 0.0)
    hidden = torch.randn(*streams.input_ids.shape, WIDTH, requires_grad=True)
    sums = stream_loss(hidden, streams, lambda h: h, Objective(), block_size=4)
    sums.loss.backward()
    assert sums.loss == 0
    assert (hidden.grad == 0).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"masked_loss": "mse"},
        {"clean_weight": -1.0},
        {"masked_weight": 0.0, "clean_weight": 0.0},
        {"offset_decay": 0.0},
        {"offset_decay": float("nan")},
        {"offset_decay": float("inf")},
        {"clean_weight": float("nan")},
        {"masked_weight": float("nan")},
        {"masked_weight": float("inf")},
    ],
)
def test_bad_objectives_are_refused(bad):
    with pytest.raises(UserError):
        Objective(**bad)
