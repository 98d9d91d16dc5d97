"""Attention of few queries to many cached slots, with grouped key-value heads.

Shapes: B rows, T queries, K slots, H query heads, G of them per key-value head, D head width.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from mars.engine.kernels.attention import cpu_attention
from mars.errors import UserError

SLOTS = 16  # see `additive_mask`
# Arguments with which some models ask for more than softmax(q k) v.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, with the interface of the attention functions of `transformers`.

    On the CPU our own kernel does it where it can, and gives a query the same bits whatever stands
    beside it. Else the G query heads that share a key-value head become G times as many queries of
    that head, so keys and values are read once and never repeated.

    Args:
        module: the attention layer.
        query: (B, H, T, D).
        key: (B, H / G, K, D).
        value: as `key`.
        attention_mask: bool (B, 1, T, K), True is visible, or what `additive_mask` makes of it;
            every query sees at least one slot.
        scaling: factor of the scores; None is 1 / sqrt(D).
        **kwargs: what else the model passes.

    Returns:
        (B, T, H, D), and None for the attention weights.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UserError(f"{type(module).__name__} needs {name}, which is not supported yet.")
    output = cpu_attention(query, key, value, attention_mask, scaling)
    if output is not None:
        return output, None
    rows, heads, columns, width = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(rows, heads // groups, groups * columns, width)
        if attention_mask.shape[2] == columns:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, heads, columns, -1).transpose(1, 2), None


def additive_mask(visible: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Make once, for all layers, of bool (B, 1, T, K) what the kernels of GPUs want of a mask.

    From a mask of booleans every call would make it anew, and pad it unless K is a multiple of
    `SLOTS`.

    Returns:
        (B, 1, G T, K), 0 where a slot is visible, else -inf; for the folded queries.
    """
    mask = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
    return mask.repeat(1, 1, groups, 1)
