"""Random numbers by counter: noise is a pure function of (seed, position, vocabulary id).

A generator with hidden state would tie a token to the batch, the step and the device that drew
it. Here every number is the hash of its own coordinates, so a request samples the same tokens
alone, in any batch and in any decoding mode.

The hash is splitmix64 (Steele, Lea and Flood, 2014), one round per coordinate: with the hash of
the coordinates before it as its state, a coordinate selects one output of that generator.
"""

import torch

# torch has no arithmetic on unsigned 64-bit integers: these are the signed numbers of equal bits.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

_UNIFORM_BITS = 40
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def hash64(*parts: int | torch.Tensor) -> torch.Tensor:
    """Hash integer coordinates to 64 well-mixed bits.

    Args:
        parts: integers or int64 tensors of shapes that broadcast, all on one device. Order matters.

    Returns:
        An int64 tensor of the broadcast shape, uniform over all 64-bit patterns.
    """
    device = next((part.device for part in parts if isinstance(part, torch.Tensor)), None)
    state = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        coordinate = torch.as_tensor(part, dtype=torch.int64, device=device)
        state = _mix(state + (coordinate + 1) * _GAMMA)
    return state


def uniform(*parts: int | torch.Tensor) -> torch.Tensor:
    """Return a uniform number for the coordinates: float32, in the open interval (0, 1).

    Numbers near 0 come in steps of 2**-40, numbers near 1 in the steps of a float32, 2**-24.
    """
    bits = _logical_shift(hash64(*parts), 64 - _UNIFORM_BITS)
    # The half step keeps 0 out; rounding to float32 could reach 1, the clamp keeps that out.
    return bits.float().add_(0.5).mul_(2.0**-_UNIFORM_BITS).clamp_(max=_LARGEST_BELOW_ONE)


def gumbel(*parts: int | torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise for the coordinates: float32, finite.

    argmax(log p + gumbel) is a draw from p. Large noise decides, and -log(-log(1 - u)) takes it
    from u near 0, where `uniform` has its fine steps: the largest value is 28.4, while 24 bits
    would end at 16.6 and never draw a rare token.
    """
    return uniform(*parts).neg_().log1p_().neg_().log_().neg_()


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser of splitmix64, in place: there may be a whole vocabulary of them."""
    bits ^= _logical_shift(bits, 30)
    bits *= _MIX_1
    bits ^= _logical_shift(bits, 27)
    bits *= _MIX_2
    bits ^= _logical_shift(bits, 31)
    return bits


def _logical_shift(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Shift right and fill with zeros (torch's own shift of signed integers copies the sign)."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)
