import math

import pytest
import torch

from mars.counter import gumbel, hash64, uniform


def test_hash_is_splitmix64_of_one_coordinate() -> None:
    # First outputs of the published splitmix64 with state 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(hash64(i)) % (1 << 64) for i in range(3)] == expected


def test_a_number_depends_on_its_coordinates_alone() -> None:
    ids = torch.arange(1000)
    whole = gumbel(torch.tensor([[5], [6]])[..., None], torch.tensor([[7, 8, 9]])[..., None], ids)
    assert whole.shape == (2, 3, 1000)
    assert torch.equal(whole[1, 2], gumbel(6, 9, ids))
    assert torch.equal(whole[0, 1, 300:400], gumbel(5, 8, ids[300:400]))


@pytest.mark.parametrize(
    ("left", "right"), [((1, 2), (2, 1)), ((0, 0), (0, 1)), ((0, 0), (1, 0)), ((-1, 4), (1, 4))]
)
def test_neighbours_have_unrelated_streams(left: tuple[int, int], right: tuple[int, int]) -> None:
    ids = torch.arange(10_000)
    a, b = uniform(*left, ids), uniform(*right, ids)
    assert (a == b).float().mean() < 0.001
    for shift in range(5):
        correlation = torch.corrcoef(torch.stack([a[: -shift or None], b[shift:]]))[0, 1]
        assert abs(correlation) < 0.05


def test_hashes_of_a_grid_are_distinct_and_their_bits_balanced() -> None:
    grid = hash64(torch.arange(50)[:, None, None], torch.arange(50)[:, None], torch.arange(100))
    assert grid.unique().numel() == grid.numel()
    bits = (grid.flatten()[:, None] >> torch.arange(64)) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() < 0.005


def test_uniform_moments_and_open_interval() -> None:
    numbers = uniform(3, 4, torch.arange(1_000_000))
    assert numbers.dtype == torch.float32
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(1 / 2, abs=0.002)
    assert numbers.var().item() == pytest.approx(1 / 12, abs=0.001)
    counts = torch.histc(numbers, 20, 0, 1)
    assert ((counts - 50_000) ** 2 / 50_000).sum() < 50  # chi-square, 19 degrees of freedom


@pytest.mark.parametrize("extreme", [0, -1])
def test_uniform_stays_open_at_extreme_hashes(
    extreme: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mars.counter.hash64", lambda *parts: torch.tensor([extreme]))
    assert 0 < uniform(0).item() < 1
    assert math.isfinite(gumbel(0).item())


def test_gumbel_moments() -> None:
    noise = gumbel(11, torch.arange(1000)[:, None], torch.arange(1000))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)


def test_gumbel_argmax_draws_from_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.049, 0.001])
    draws = (
        probabilities.log() + gumbel(1, torch.arange(200_000)[:, None], torch.arange(5))
    ).argmax(-1)
    share = draws.bincount(minlength=5) / len(draws)
    assert torch.allclose(share, probabilities, atol=0.004)
    assert share[4].item() == pytest.approx(0.001, rel=0.3)
