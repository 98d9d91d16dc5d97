"""Attention on the CPU: a query gets the same bits whatever stands beside it."""

import ctypes

import torch

from mars.engine.kernels.compiler import load_kernels
from mars.engine.kernels.linear import TILES, linear_path

_DTYPES = (torch.bfloat16, torch.float32)


class _Call(ctypes.Structure):
    """`struct call` of attention.c."""

    _fields_ = (
        ("sizes", ctypes.c_int64 * 7),
        ("strides", ctypes.c_int64 * 11),
        ("is_bf16", ctypes.c_int64),
        ("has_tiles", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("in_units", ctypes.c_int64),
        ("ahead", ctypes.c_int64),
    )


def cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor | None:
    """Attend on the CPU, without gradient; a query's result depends on nothing but what it sees.

    It is the same, bit by bit, for any number of columns, rows, invisible slots and threads.

    Args:
        query: (B, H, T, D), bf16 or fp32.
        key: (B, H / G, K, D), any strides.
        value: (B, H / G, K, W).
        mask: bool (B, 1, T, K), True is visible. A query that sees nothing gets zeros.
        scale: factor of the scores; None is 1 / sqrt(D).

    Returns:
        (B, T, H, W), or None where the kernel cannot be used.
    """
    if query.device.type != "cpu" or query.dtype not in _DTYPES or mask.dtype != torch.bool:
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return None
    kernels = load_kernels(query.dtype)
    if kernels is None:
        return None
    rows, heads, columns, width = query.shape
    kv_heads, slots, value_width = value.shape[1:]
    query, key, value, mask = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, mask)
    )
    call = _Call(
        (rows, heads, kv_heads, columns, slots, width, value_width),
        (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *mask.stride()[::2]),
        query.dtype == torch.bfloat16,
        query.dtype == torch.bfloat16 and linear_path(query.dtype) == TILES,
        torch.get_num_threads(),
        width**-0.5 if scale is None else scale,
    )
    output = query.new_empty(rows, columns, heads, value_width)
    pointers = [x.data_ptr() for x in (output, query, key, value, mask)]
    kernels.mars_attention(ctypes.byref(call), *pointers)
    return output
