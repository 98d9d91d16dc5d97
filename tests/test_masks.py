"""The FlexAttention block mask equals the dense mask, whatever the shape."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from mars.masks import block_mask, dense_mask, visibility
from mars.streams import IGNORE, PADDING, Streams, build_streams, tile_blocks


@st.composite
def random_streams(draw) -> Streams:
    """Draw streams of random lengths, documents, spans, phases and block sizes."""
    seed = draw(st.integers(0, 2**31))
    num_rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 300))
    block_size, share = draw(st.integers(1, 16)), draw(st.floats(0, 1))
    generator = torch.Generator().manual_seed(seed)
    is_new = torch.rand(num_rows, length, generator=generator) < 0.02
    document = is_new.long().cumsum(1)
    document[:, length - draw(st.integers(0, length // 2)) :] = PADDING
    input_ids = torch.randint(4, 90, (num_rows, length), generator=generator)
    supervised = torch.rand(num_rows, length, generator=generator) < share
    labels = torch.where(supervised & (document != PADDING), input_ids, IGNORE)
    phase = torch.randint(0, block_size, (num_rows, length), generator=generator)
    positions = torch.arange(length).expand(num_rows, length)
    blocks = tile_blocks(labels, document, phase, block_size)
    return build_streams(input_ids, labels, document, positions, blocks, mask_token_id=3)


def expand(mask: BlockMask, streams: Streams) -> torch.Tensor:
    """Evaluate a block mask: full blocks are visible, partial ones follow the rule."""
    length = streams.input_ids.shape[1]
    size_q, size_kv = mask.BLOCK_SIZE
    rule = dense_mask(streams)[:, 0]
    expanded = torch.zeros_like(rule)
    partial = (mask.kv_num_blocks[:, 0], mask.kv_indices[:, 0], False)
    full = (mask.full_kv_num_blocks[:, 0], mask.full_kv_indices[:, 0], True)
    for counts, indices, is_full in (partial, full):
        for row in range(counts.shape[0]):
            for q in range(counts.shape[1]):
                for kv in indices[row, q, : counts[row, q]].tolist():
                    a = slice(q * size_q, min((q + 1) * size_q, length))
                    b = slice(kv * size_kv, min((kv + 1) * size_kv, length))
                    expanded[row, a, b] = True if is_full else rule[row, a, b]
    return expanded


@settings(max_examples=300, deadline=None)
@given(random_streams(), st.sampled_from([16, 64, 128]))
def test_block_mask_equals_dense_mask(streams, size):
    num_rows, length = streams.input_ids.shape
    mask = create_block_mask(
        visibility(streams), num_rows, None, length, length, device="cpu", BLOCK_SIZE=size
    )
    assert torch.equal(expand(mask, streams), dense_mask(streams)[:, 0])


@settings(max_examples=50, deadline=None)
@given(random_streams())
def test_no_query_is_blind(streams):
    assert dense_mask(streams).any(-1).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=10, deadline=None)
@given(random_streams())
def test_flex_attention_equals_dense_attention(streams):
    num_rows, length = streams.input_ids.shape
    torch.manual_seed(0)
    q, k, v = (torch.randn(num_rows, 2, length, 16) for _ in range(3))
    flex = flex_attention(q, k, v, block_mask=block_mask(streams))
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(streams))
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)
