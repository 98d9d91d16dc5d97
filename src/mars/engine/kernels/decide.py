"""The decisions of a step on the CPU, for rows that ask for nothing but tokens.

Shapes: B rows; O outputs: of every row its last token and drafts, row by row, then the masks, row
by row; D width; V vocabulary.
"""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from mars.draft_head import Correction
from mars.engine.kernels.compiler import load_kernels

_POINTERS = (
    *("head", "logits", "hidden", "real_start", "mask_start", "drafts", "groups", "group_start"),
    *("window", "sampling", "length", "uses_head"),
    *("choice", "accepted", "num_masks", "draft", "probability"),
)
_SIZES = ("rows", "vocabulary", "width", "forbidden", "most", "threads")


class _Head(ctypes.Structure):
    """`struct head` of decide.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("from_hidden", "bias", "from_token", "output")),
        *((name, ctypes.c_void_p) for name in ("embedding", "logit")),
        ("inner", ctypes.c_int64),
    )


class _Decision(ctypes.Structure):
    """`struct decision`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
    )


class _Sampling(ctypes.Structure):
    """`struct sampling` of sample.h."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("temperature", "top_p", "min_p")),
        *((name, ctypes.c_int64) for name in ("top_k", "seed")),
    )


class Sampling(NamedTuple):
    """How a row samples; `mars.decoding.options.DecodingOptions` says what the numbers mean."""

    temperature: float
    """0: it does not; it is greedy."""
    top_p: float
    min_p: float
    top_k: int
    seed: int


class RowOutputs(NamedTuple):
    """What one row has fed."""

    drafts: Sequence[int]
    groups: Sequence[int]
    """Accept lengths of the groups of masks."""
    window: int
    """Masks per group."""
    length: int = 0
    """Committed tokens; greedy rows need not tell."""
    sampling: Sampling | None = None
    """None: greedy."""
    uses_head: bool = True
    """Whether the draft head corrects what the masks say, if there is one."""


class RowDecision(NamedTuple):
    """What the outputs mean for one row."""

    tokens: list[int]
    """The drafts that were right, and the token after them."""
    drafts: list[int]
    """What the masks behind them predict."""
    probabilities: list[float]
    """Top-1 probability of each."""


def decide_rows(
    logits_OV: Tensor,
    hidden_OD: Tensor,
    rows: Sequence[RowOutputs],
    *,
    correction: Correction | None,
    forbidden: int | None,
) -> list[RowDecision] | None:
    """Verify drafts and read the masks behind the last right one.

    Args:
        logits_OV: bf16 or fp32; overwritten at `forbidden`.
        hidden_OD: last hidden states in the same dtype, for the draft head.
        rows: what each row has fed.
        correction: the draft head in float32, or None; its hidden states are not looked at.
        forbidden: a token that is no part of any distribution.

    Returns:
        One decision per row, or None where the kernel cannot be used.
    """
    dtype = logits_OV.dtype
    kernels = load_kernels(dtype)
    tensors = [logits_OV, hidden_OD]
    if correction is not None:
        tensors += [correction.embedding_VD, correction.output_VD]
    is_fit = all(_is_fit(tensor, dtype) for tensor in tensors)
    head = None if correction is None else _head(correction)
    if kernels is None or not is_fit or (head is None) != (correction is None):
        return None
    real = [0, *accumulate(len(row.drafts) + 1 for row in rows)]
    masks = [*accumulate((len(r.groups) * r.window for r in rows), initial=real[-1])]
    most = max(row.window for row in rows)
    inputs = [
        array("q", numbers)
        for numbers in (
            real,
            masks,
            [token for row in rows for token in row.drafts],
            [length for row in rows for length in row.groups],
            [0, *accumulate(len(row.groups) for row in rows)],
            [row.window for row in rows],
            [row.length for row in rows],
            [int(row.uses_head) for row in rows],
        )
    ]
    sampling = None
    if any(row.sampling is not None for row in rows):
        settings = [row.sampling or Sampling(0.0, 1.0, 0.0, 0, 0) for row in rows]
        sampling = (_Sampling * len(rows))(*settings)
    sizes = (real[-1], len(rows), len(rows), len(rows) * most)
    choice, accepted, num_masks, draft = (array("q", bytes(8 * size)) for size in sizes)
    probability = array("f", bytes(4 * len(rows) * most))
    outputs = (choice, accepted, num_masks, draft, probability)
    call = _Decision(
        None if head is None else ctypes.addressof(head),
        *(logits_OV.data_ptr(), hidden_OD.data_ptr()),
        *(numbers.buffer_info()[0] for numbers in inputs[:-2]),
        None if sampling is None else ctypes.addressof(sampling),
        *(numbers.buffer_info()[0] for numbers in (*inputs[-2:], *outputs)),
        *(len(rows), logits_OV.shape[1], hidden_OD.shape[1]),
        *(-1 if forbidden is None else forbidden, most, torch.get_num_threads()),
    )
    if kernels.mars_decide(ctypes.byref(call)):
        raise MemoryError("no memory for the decisions of a step")
    return [
        RowDecision(
            choice[real[row] : real[row] + accepted[row] + 1].tolist(),
            draft[row * most : row * most + num_masks[row]].tolist(),
            probability[row * most : row * most + num_masks[row]].tolist(),
        )
        for row in range(len(rows))
    ]


def _head(correction: Correction) -> _Head | None:
    head = correction.head
    weights = head.from_hidden.weight, head.from_hidden.bias, head.from_token.weight
    weights = *weights, head.output.weight
    if not all(_is_fit(weight, torch.float32) for weight in weights):
        return None
    pointers = [weight.data_ptr() for weight in weights]
    pointers += [correction.embedding_VD.data_ptr(), correction.output_VD.data_ptr()]
    return _Head(*pointers, head.output.in_features)


def _is_fit(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
