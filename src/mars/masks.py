"""One visibility rule for the training rows, as a dense mask and as a FlexAttention block mask.

A token sees, within its document, the clean tokens before its limit and the tokens of its own
block up to itself. For clean tokens that is ordinary causal attention; a mask sees the prefix of
its decoding step and the earlier masks of the same step. Clean tokens never see a mask.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from mars.streams import Streams

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visibility(streams: Streams) -> MaskMod:
    """Return the rule `mask_mod(b, h, q, kv) -> bool` on index tensors that broadcast."""
    document, limit, block = streams.document, streams.limit, streams.block
    num_clean = streams.num_clean

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        in_prefix = (kv < num_clean) & (kv < limit[b, q]) & (document[b, q] == document[b, kv])
        in_block = (block[b, q] == block[b, kv]) & (kv <= q)
        return in_prefix | in_block

    return mask_mod


def dense_mask(streams: Streams) -> Tensor:
    """Evaluate the rule everywhere: bool [B, 1, S, S], True where query (dim 2) sees key (dim 3).

    Every row of it has at least one True, so that no softmax is empty.
    """
    num_rows, length = streams.input_ids.shape
    index = torch.arange(length, device=streams.input_ids.device)
    row = torch.arange(num_rows, device=index.device)
    zero = torch.zeros((), dtype=torch.long, device=index.device)
    return visibility(streams)(row[:, None, None, None], zero, index[:, None], index)


def block_mask(streams: Streams) -> BlockMask:
    """Compile the rule to a FlexAttention block mask (for CUDA; equal to `dense_mask`)."""
    num_rows, length = streams.input_ids.shape
    device = streams.input_ids.device
    return create_block_mask(visibility(streams), num_rows, None, length, length, device=device)
