"""Layers of quantised models are packed as levels, without a bit of difference."""

import copy

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars import load
from mars.decoding.plan import RowPlan
from mars.engine.kernels import linear
from mars.engine.kernels.linear import PackedLinears
from mars.gated import GatedAdapter
from tests.engine.test_decoder import add_adapter, is_fused, open_rows, small_model, tokens_of
from tests.engine.test_linear_kernel import BF16, apply, assert_right, dtype, needs_bf16, path

__all__ = ["dtype", "path"]  # fixtures

DENSE, NARROW, SHORT, LEVELS_4, LEVELS_8 = range(5)
FORMS = {Kind.Q4_0: LEVELS_4, Kind.Q4_1: LEVELS_4, Kind.Q8_0: LEVELS_8}

pytestmark = [
    needs_bf16,
    pytest.mark.usefixtures("path"),
    pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True),
]


def quantised(weight: Tensor, kind: Kind) -> nn.Linear:
    """Return a layer whose weights went through a quantisation of GGUF, as transformers does it."""
    numbers = gguf.quants.quantize(weight.numpy(), kind)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False).to(BF16)
    layer.weight.data = torch.from_numpy(gguf.quants.dequantize(numbers, kind)).to(BF16)
    return layer


def form_of(layer: nn.Linear) -> int:
    PackedLinears(layer)
    return linear._packed[layer].layer.form


@torch.no_grad()
def apply_dense(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a copy of the layer that is packed as it is."""
    same = nn.Linear(layer.in_features, layer.out_features, bias=False).to(BF16)
    same.weight.data = layer.weight.data.clone()
    with PackedLinears(nn.Identity(), same):
        assert linear._packed[same].layer.form in (DENSE, NARROW)
        return same(x)


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(list(FORMS)),
    rows=st.sampled_from([1, 2, 8, 13, 16, 17, 22, 31, 32, 33, 64, 65, 140]),
    outputs=st.sampled_from([1, 16, 31, 32, 100, 192]),
    inputs=st.sampled_from([32, 64, 96, 512, 576]),
    scale=st.sampled_from([1e-4, 0.02, 1.0, 300.0]),
    shift=st.sampled_from([0.0, 0.5, -2.0]),
    seed=st.integers(0, 999),
)
def test_they_give_what_dense_ones_give(
    kind: Kind, rows: int, outputs: int, inputs: int, scale: float, shift: float, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = scale * (torch.randn(outputs, inputs) + shift)
    if outputs > 2:  # blocks of equal weights
        weight[0, :32] = 0
        weight[-1, -32:] = scale
    layer = quantised(weight, kind)
    assert form_of(layer) == FORMS[kind]
    x = torch.randn(rows, inputs).to(BF16)
    assert torch.equal(apply(layer, x), apply_dense(layer, x))


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("value", [0.0123, torch.inf, torch.nan, 1e-39])
@pytest.mark.parametrize("place", [(0, 0), (69, 95), (40, 33)])
def test_one_weight_beside_the_levels_makes_a_layer_dense(
    kind: Kind, value: float, place: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    layer = quantised(torch.randn(70, 96), kind)
    layer.weight.data[place] = value
    assert form_of(layer) == DENSE
    x = torch.randn(5, 96).to(BF16)
    assert torch.equal(apply(layer, x).nan_to_num(), apply_dense(layer, x).nan_to_num())


def test_other_weights_and_widths_are_dense() -> None:
    torch.manual_seed(0)
    assert form_of(nn.Linear(64, 64).to(BF16)) == DENSE
    layer = quantised(torch.randn(64, 96), Kind.Q4_1)
    layer.weight.data = layer.weight.data[:, :80].contiguous()
    layer.in_features = 80
    assert form_of(layer) == DENSE


@pytest.mark.parametrize("kind", FORMS)
def test_changed_weights_are_packed_again_as_levels_or_not(kind: Kind) -> None:
    torch.manual_seed(0)
    layer, x = quantised(torch.randn(40, 64), kind), torch.randn(3, 64).to(BF16)
    with torch.no_grad(), PackedLinears(layer):
        assert_right(layer, x, layer(x))
        layer.weight.copy_(quantised(torch.randn(40, 64), kind).weight)
        assert torch.equal(layer(x), apply_dense(layer, x))
        assert linear._packed[layer].layer.form == FORMS[kind]
        layer.weight.add_(torch.randn(40, 64))
        assert torch.equal(layer(x), apply_dense(layer, x))
        assert linear._packed[layer].layer.form == DENSE
    # A change behind torch's back; a zero that has lost its sign is none.
    layer = quantised(torch.randn(40, 64), kind)
    layer.weight.data[layer.weight.data.abs() < 0.2] = -0.0
    again = quantised(torch.randn(40, 64), kind)
    apply(again, x)
    again.weight.data.copy_(layer.weight.data)
    assert torch.equal(apply(again, x), apply_dense(again, x))


def test_views_with_other_strides() -> None:
    torch.manual_seed(0)
    wide = quantised(torch.randn(40, 128), Kind.Q4_1)
    layer = nn.Linear(64, 40, bias=False).to(BF16)
    layer.weight.data = wide.weight.data[:, 32:96]
    assert form_of(layer) == LEVELS_4
    x = torch.randn(3, 64).to(BF16)
    assert torch.equal(apply(layer, x), apply_dense(layer, x))


def test_all_blocks_of_many_are_found() -> None:
    """Steps and bases of every kind, from weights near to each other to weights far apart."""
    generator = np.random.default_rng(0)
    for kind, form in FORMS.items():
        width = 10.0 ** generator.uniform(-4, 3, (512, 1))
        shift = width * generator.uniform(-2, 2, (512, 1))
        weight = (width * generator.standard_t(3, (512, 256)) + shift).astype(np.float32)
        assert form_of(quantised(torch.from_numpy(weight), kind)) == form


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])  # 13 columns each: one tile to four, and more
def test_masks_get_the_same_with_lora(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(hidden_size=96, intermediate_size=128, head_dim=32, num_attention_heads=6)
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.weight.data = quantised(layer.weight.data.float(), Kind.Q4_1).weight.data
    same = copy.deepcopy(model)
    adapter = add_adapter(model, targets=("q_proj", "o_proj", "up_proj", "down_proj"))
    twin = GatedAdapter(same, adapter.config).to(BF16).requires_grad_(False)
    twin.load_state_dict(adapter.state_dict())

    def logits(model: PreTrainedModel) -> list[Tensor]:
        runner = open_rows(model, rows)
        tokens = [tokens_of(row) for row in range(rows)]
        return list(runner.forward(0, tokens, [RowPlan()] * rows)) + list(
            runner.forward(0, [[*t, 7] for t in tokens], [RowPlan((5, 6, 7, 8), (0, 4), 4)] * rows)
        )

    found = logits(model)
    assert linear._packed[model.model.layers[0].mlp.up_proj].layer.form == LEVELS_4
    monkeypatch.setattr(linear, "_LEVELS", [])
    expected = logits(same)
    assert is_fused(model)
    assert is_fused(same)
    assert linear._packed[same.model.layers[0].mlp.up_proj].layer.form == DENSE
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert found[3].shape[1] == 8


@pytest.mark.slow
def test_the_default_model_takes_a_third_of_the_memory() -> None:
    model = load(None, dtype="bfloat16", adapter=None).model
    PackedLinears(model)
    layers = [m for m in model.modules() if type(m) is nn.Linear]
    packed = [linear._packed[layer] for layer in layers]
    forms = [one.layer.form for one in packed]
    assert forms.count(LEVELS_4) == 210
    assert forms.count(LEVELS_8) == 1
    size = sum(one.memory.nbytes for one in packed)
    assert size == pytest.approx(
        sum(m.weight.nbytes for m in layers[:-1]) * 5 / 16 + layers[-1].weight.nbytes * 17 / 32
    )
