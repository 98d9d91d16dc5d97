"""Gumbel noise on the CPU: `mars.counter.gumbel` in one pass over the numbers."""

import torch
from torch import Tensor

from mars.engine.kernels.compiler import load_kernels


def gumbel_noise(state: Tensor, ids: Tensor) -> Tensor | None:
    """Return the noise of ids, given the hash of the coordinates before them.

    Args:
        state: int64 (..., 1), of `mars.counter.hash64`.
        ids: int64 (V,) for all, or of the shape of the result.

    Returns:
        float32 (..., V), within 1e-6 (relative and absolute) of torch's operations; None where
        there is no kernel or another shape, dtype or device.
    """
    kernels = load_kernels()
    shape = (*state.shape[:-1], ids.shape[-1])
    is_shared = ids.ndim == 1
    if kernels is None or state.shape[-1:] != (1,) or not (is_shared or ids.shape == shape):
        return None
    if any(x.device.type != "cpu" or x.dtype != torch.int64 for x in (state, ids)):
        return None
    state, ids = state.contiguous(), ids.contiguous()
    noise = torch.empty(shape, dtype=torch.float32)
    kernels.mars_gumbel(
        *(noise.data_ptr(), state.data_ptr(), ids.data_ptr(), is_shared),
        *(state.numel(), ids.shape[-1], torch.get_num_threads()),
    )
    return noise
