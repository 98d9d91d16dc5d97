import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.draft_head import Correction, DraftHead, largest


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 20_000),
    count=st.integers(1, 40),
    seed=st.integers(0, 99),
    levels=st.sampled_from([3, 10_000_000]),
)
def test_largest_equals_topk(size: int, count: int, seed: int, levels: int) -> None:
    """Also with many ties: then the indices may differ, but not the values at them."""
    count = min(count, size)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, levels, (2, 2, size), generator=generator).float()
    top, index = largest(values, count)
    assert torch.equal(top, values.topk(count, dim=-1).values)
    assert torch.equal(values.gather(-1, index), top)
    assert all(len(set(row.tolist())) == count for row in index.flatten(0, 1))


def test_largest_of_excluded_tokens() -> None:
    values = torch.full((1, 5000), float("-inf"))
    values[0, 4321] = 1.0
    top, index = largest(values, 4)
    assert (float(top[0, 0]), int(index[0, 0])) == (1.0, 4321)
    assert top[0, 1:].isinf().all()


def test_an_untrained_head_changes_nothing() -> None:
    head, hidden = DraftHead(6, 4), torch.randn(3, 6)
    assert torch.equal(head(hidden, torch.randn(3, 6)), hidden)


def test_corrected_logits_are_those_of_the_output_layer() -> None:
    torch.manual_seed(0)
    head = DraftHead(6, 4).requires_grad_(False)
    head.output.weight.normal_()
    embedding, output = torch.randn(20, 6), torch.randn(20, 6)
    hidden = torch.randn(2, 3, 6)
    correction = Correction(hidden, head, embedding, output)
    ids, previous = torch.tensor([[1, 7], [3, 3]]), torch.tensor([5, 9])
    logits = correction.logits(hidden[:, 1], ids, previous)
    for row in range(2):
        corrected = head(hidden[row, 1], embedding[previous[row]])
        for place in range(2):
            expected = float(output[ids[row, place]] @ corrected)
            assert float(logits[row, place]) == pytest.approx(expected, abs=1e-5)
