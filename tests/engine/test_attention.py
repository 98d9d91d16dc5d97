import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from mars.engine.attention import grouped_attention
from mars.errors import UserError


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_equals_attention_with_repeated_heads(
    groups: int, columns: int, scaling: float | None
) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 2 * groups, columns, 8)
    key, value = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
    visible = torch.rand(2, 1, columns, 9) < 0.5
    visible[..., 0] = True
    expected = scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        attn_mask=visible,
        scale=scaling,
    )
    output, weights = grouped_attention(torch.nn.Module(), query, key, value, visible, scaling)
    assert weights is None
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_attention_with_extras_is_refused() -> None:
    tensor = torch.zeros(1, 1, 1, 4)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(UserError, match="softcap"):
        grouped_attention(torch.nn.Module(), tensor, tensor, tensor, mask, softcap=30.0)
