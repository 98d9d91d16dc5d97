"""A training row computes, at every mask, the logits of the decoding step it stands for."""

import pytest
import torch

from mars.masks import dense_mask
from mars.streams import IGNORE, build_streams, tile_blocks
from tests.conftest import FAMILIES, make_model

MASK, LENGTH, FIRST = 3, 14, 5


def packed_rows(block_size: int, phase: int):
    """Two rows: one document; two documents and padding."""
    torch.manual_seed(1)
    input_ids = torch.randint(4, 260, (2, LENGTH))
    document = torch.tensor([[0] * LENGTH, [0] * 6 + [1] * 6 + [-1] * 2])
    position_ids = torch.stack(
        [torch.arange(LENGTH), torch.cat([torch.arange(6), torch.arange(6), torch.zeros(2).long()])]
    )
    supervised = torch.zeros(2, LENGTH, dtype=torch.bool)
    supervised[0, FIRST:] = True
    supervised[1, 2:6] = True
    supervised[1, 8:12] = True
    labels = torch.where(supervised, input_ids, IGNORE)
    phases = torch.full_like(labels, phase)
    blocks = tile_blocks(labels, document, phases, block_size)
    return build_streams(input_ids, labels, document, position_ids, blocks, MASK)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_size", "phase"), [(4, 0), (4, 3), (3, 1), (1, 0)])
@torch.no_grad()
def test_training_row_equals_decoding_step(family, block_size, phase):
    model = make_model(family)
    streams = packed_rows(block_size, phase)
    logits = model(
        input_ids=streams.input_ids,
        attention_mask=dense_mask(streams),
        position_ids=streams.position_ids,
        use_cache=False,
    ).logits
    compared = 0
    for row, place in torch.nonzero(streams.offset >= 0).tolist():
        # The decoding step: the document's real tokens before the block, then j masks.
        s, j = int(streams.limit[row, place]), int(streams.offset[row, place])
        document = streams.document[row]
        is_prefix = (document[:s] == document[place]) & (torch.arange(s) < streams.num_clean)
        step = torch.cat([streams.input_ids[row, :s][is_prefix], torch.full((j,), MASK)])
        expected = model(input_ids=step[None], use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[row, place], expected, atol=2e-4, rtol=1e-4)
        compared += 1
    assert compared == (streams.offset >= 0).sum() > 30
