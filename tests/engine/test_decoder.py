"""The decoder in one call: what the stock model computes, the same bits in any company."""

import copy
from contextlib import nullcontext
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars.decoding.plan import FlatColumns, RowPlan, lay_out, lay_out_flat
from mars.engine.decoder import FusedDecoder, gather_rows
from mars.engine.kernels.linear import _packed, linear_path
from mars.engine.runner import FlatOutputs, Runner
from mars.gated import GatedAdapter, GatedConfig
from tests.conftest import make_model, slots_of

DTYPE = torch.bfloat16  # of models; the fixture `dtype` sets it
FUSED = ["llama", "qwen2", "qwen3", "mistral"]
MOST_POSITIONS = 160

needs_kernel = pytest.mark.usefixtures("dtype")


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use models in bfloat16, then in float32 with weights that are numbers of bfloat16."""
    if not linear_path(request.param):
        pytest.skip("no C compiler, no such instructions, or switched off")
    monkeypatch.setitem(globals(), "DTYPE", request.param)


def small_model(family: str = "llama", **overrides: object) -> PreTrainedModel:
    """Build a model of odd sizes: heads of one and a half vectors, three per key-value head."""
    sizes = {
        "hidden_size": 84,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "head_dim": 24,
        "max_position_embeddings": MOST_POSITIONS,
    }
    return make_model(family, **(sizes | overrides)).to(torch.bfloat16).to(DTYPE)


def wide_model(family: str = "llama") -> PreTrainedModel:
    """Build a model whose heads fit matrix tiles and whose width is a multiple of 512."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
    return small_model(family, **sizes)


def add_adapter(model: PreTrainedModel, *, count: int = 4, targets=("q_proj", "up_proj")):
    config = GatedConfig(
        base=None, fingerprint="", block_size=4, rank=5, targets=targets, mask_embeddings=count
    )
    adapter = GatedAdapter(model, config)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    adapter.to(DTYPE).requires_grad_(False)
    return adapter


def tokens_of(row: int, length: int = 60) -> list[int]:
    return torch.randint(4, 260, (length,), generator=torch.Generator().manual_seed(row)).tolist()


def open_rows(model: PreTrainedModel, count: int, *, chunk: int = 512) -> Runner:
    runner = Runner(model, num_rows=count, max_positions=MOST_POSITIONS, prefill_chunk=chunk)
    for _ in range(count):
        runner.add_row()
    return runner


def is_fused(model: PreTrainedModel) -> bool:
    return FusedDecoder.of(model, MOST_POSITIONS) is not None


@pytest.fixture(params=["1", "avx512"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the best instructions there are, then AVX-512 BF16."""
    monkeypatch.setenv("MARS_KERNELS", request.param)


@needs_kernel
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("build", [small_model, wide_model])
@pytest.mark.parametrize("family", FUSED)
def test_it_is_as_near_to_float64_as_the_stock_model(family, build, monkeypatch):
    model = build(family)
    exact = copy.deepcopy(model).double()
    tokens = [tokens_of(row, 50 - 9 * row) for row in range(3)]
    plans = [RowPlan((9, 8, 7), (1, 3), 2), RowPlan(), RowPlan((5,), (0, 1), 3)]

    def error(model: PreTrainedModel) -> tuple[float, bool]:
        runner = open_rows(model, 3)
        runner.forward(0, [row[:-2] for row in tokens], [RowPlan()] * 3)
        fused = isinstance(runner.run(0, [row[:-1] for row in tokens], plans), FlatOutputs)
        real, masks = runner.forward(0, tokens, plans)
        wanted, wanted_masks = expected
        errors = [
            (real[row, -1 - len(plan.drafts) :] - wanted[row, -1 - len(plan.drafts) :])
            .double()
            .pow(2)
            .mean()
            for row, plan in enumerate(plans)
        ]
        errors += [
            (masks[row, : plan.num_masks] - wanted_masks[row, : plan.num_masks])
            .double()
            .pow(2)
            .mean()
            for row, plan in enumerate(plans)
            if plan.num_masks
        ]
        return float(sum(errors)), fused

    runner = open_rows(exact, 3)
    runner.forward(0, [row[:-2] for row in tokens], [RowPlan()] * 3)
    expected = runner.forward(0, tokens, plans)
    ours, is_ours = error(model)
    monkeypatch.setattr(FusedDecoder, "of", lambda *_: None)
    theirs, is_theirs = error(model)
    assert is_ours
    assert not is_theirs
    assert ours < 2.5 * theirs


def columns_one_by_one(model: PreTrainedModel, tokens: list[int], start: int) -> Tensor:
    """Return the logits at the tokens from `start` on: a prompt, then one column a forward."""
    runner = open_rows(model, 1)
    ends = range(start + 1, len(tokens) + 1)
    return torch.stack([runner.forward(0, [tokens[:end]], [RowPlan()])[0][0, -1] for end in ends])


@needs_kernel
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("build", [small_model, wide_model])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_position_gets_the_same_bits_in_any_company(build, has_adapter):
    """Bit by bit: 1 to 6 rows of 1 to 45 columns against one row, one column at a time."""
    model = build()
    if has_adapter:
        add_adapter(model)
    assert is_fused(model)
    starts = [3 + 2 * row for row in range(6)]
    expected = [columns_one_by_one(model, tokens_of(row), starts[row]) for row in range(6)]
    for num_rows in (1, 2, 3, 6):
        tokens = [tokens_of(row) for row in range(num_rows)]
        for columns in (1, 2, 8, 9, 16, 17, 32, 33, 45):
            runner = open_rows(model, num_rows, chunk=4 if columns % 2 else 512)
            prompts = [row[:start] for row, start in zip(tokens, starts, strict=False)]
            runner.forward(0, prompts, [RowPlan()] * num_rows)
            fed = [row[: len(prompt) + 1] for row, prompt in zip(tokens, prompts, strict=True)]
            plans = []
            for number, (row, part) in enumerate(zip(tokens, fed, strict=True)):
                num_drafts = min(columns - 1, 8 - number)  # rows differ in length
                groups = tuple(range(min(num_drafts + 1, (columns - 1 - num_drafts) // 4)))
                drafts = tuple(row[len(part) : len(part) + num_drafts])
                plans.append(RowPlan(drafts, groups, 4 if groups else 0))
            real, _ = runner.forward(0, fed, plans)
            for row, plan in enumerate(plans):
                count = len(plan.drafts) + 1
                assert torch.equal(real[row, -count:], expected[row][:count]), (num_rows, columns)


@needs_kernel
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_after_any_accept_pattern_the_cache_equals_a_fresh_prefill(data):
    model = model_of(data.draw(st.sampled_from(FUSED)), DTYPE)
    num_rows = data.draw(st.integers(1, 3))
    tokens = [tokens_of(row, data.draw(st.integers(1, 20))) for row in range(num_rows)]
    runner = open_rows(model, num_rows, chunk=data.draw(st.sampled_from([3, 64])))
    for _ in range(data.draw(st.integers(1, 4))):
        plans = []
        for _ in tokens:
            drafts = tuple(data.draw(st.lists(st.integers(4, 259), max_size=4)))
            groups = data.draw(st.sets(st.integers(0, len(drafts)), max_size=3))
            plans.append(RowPlan(drafts, tuple(sorted(groups)), data.draw(st.integers(1, 3))))
        runner.forward(0, tokens, plans)
        accepted = [data.draw(st.integers(0, len(plan.drafts))) for plan in plans]
        runner.keep(0, accepted)
        tokens = [
            [*row, *plan.drafts[:count], data.draw(st.integers(4, 259))]
            for row, plan, count in zip(tokens, plans, accepted, strict=True)
        ]
    logits = runner.forward(0, tokens, [RowPlan()] * num_rows)[0]
    for number, row in enumerate(tokens):
        fresh = open_rows(model, 1)
        assert torch.equal(fresh.forward(0, [row], [RowPlan()])[0][0], logits[number])
        for of_keys in (False, True):
            pairs = zip(slots_of(fresh, of_keys), slots_of(runner, of_keys), strict=True)
            for mine, theirs in pairs:
                assert torch.equal(mine[0, :, : len(row)], theirs[number, :, : len(row)])


@lru_cache
def model_of(family: str, dtype: torch.dtype) -> PreTrainedModel:
    return small_model(family).to(dtype)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing(threads: int) -> None:
    model, tokens = wide_model(), [tokens_of(0), tokens_of(1, 33)]
    before, outputs = torch.get_num_threads(), []
    for count in (1, threads):
        torch.set_num_threads(count)
        try:
            runner = open_rows(model, 2)
            outputs.append(runner.forward(0, tokens, [RowPlan((4, 5), (0, 2), 3)] * 2))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])


@needs_kernel
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("targets", [("q_proj",), ("o_proj", "down_proj"), ("gate_proj", "v_proj")])
def test_the_adapter_acts_on_masks_alone_as_in_the_stock_forward(count, targets, monkeypatch):
    model, tokens = small_model(), [tokens_of(0, 9), tokens_of(1, 12)]
    plans = [RowPlan((5, 6), (0, 2), 3), RowPlan((7,), (1,), 2)]
    plain = open_rows(model, 2).forward(0, tokens, plans)
    add_adapter(model, count=count, targets=targets)
    gated = open_rows(model, 2).forward(0, tokens, plans)
    assert torch.equal(plain[0][:, -2:], gated[0][:, -2:])
    monkeypatch.setattr(FusedDecoder, "of", lambda *_: None)
    stock = open_rows(model, 2).forward(0, tokens, plans)
    for row, plan in enumerate(plans):
        ours, theirs, without = (x[1][row, : plan.num_masks].float() for x in (gated, stock, plain))
        assert (ours - theirs).abs().mean() < 0.1 * (theirs - without).abs().mean()


@pytest.mark.skipif(not linear_path(torch.float32), reason="no kernel for float32")
@pytest.mark.parametrize("is_base_rounded", [False, True])
@pytest.mark.parametrize("is_adapter_rounded", [False, True])
def test_weights_of_16_and_of_32_bits_go_together(is_base_rounded, is_adapter_rounded, monkeypatch):
    """In float32 weights that are numbers of bfloat16 are packed in 16 bits."""
    model = small_model(attention_bias=True).float()
    adapter = add_adapter(model, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
    adapter.float()
    for module, is_rounded in ((model, is_base_rounded), (adapter, is_adapter_rounded)):
        for parameter in module.parameters():
            noise = 1 + 0.01 * torch.rand_like(parameter)
            changed = parameter.bfloat16().float() if is_rounded else parameter * noise
            parameter.data.copy_(changed)
    tokens = [tokens_of(row, 9 + row) for row in range(3)]
    plans = [RowPlan((5, 6), (0, 2), 3), RowPlan(), RowPlan((7,), (1,), 2)]
    ours = open_rows(model, 3).forward(0, tokens, plans)
    forms = {_packed[x].layer.form for x in (model.model.layers[0].mlp.up_proj, adapter.lora_a[0])}
    assert forms == {int(is_base_rounded), int(is_adapter_rounded)}  # of floats.c
    monkeypatch.setattr(FusedDecoder, "of", lambda *_: None)
    monkeypatch.setattr("mars.engine.runner.PackedLinears", lambda *_: nullcontext())
    theirs = open_rows(model, 3).forward(0, tokens, plans)
    for row, plan in enumerate(plans):
        count = 1 + len(plan.drafts)
        for mine, wanted in (
            (ours[0][row, -count:], theirs[0][row, -count:]),
            (ours[1][row, : plan.num_masks], theirs[1][row, : plan.num_masks]),
        ):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=2e-4)


class Doubled(nn.Linear):
    """A layer that only looks like one of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def spoil(model: PreTrainedModel, how: str) -> PreTrainedModel:
    layer = model.model.layers[1]
    if how == "hook":
        layer.mlp.register_forward_hook(lambda *_: None)
    elif how == "pre-hook":
        model.register_forward_pre_hook(lambda *_: None)
    elif how == "forward":
        layer.forward = layer.forward
    elif how == "layer":
        old = layer.self_attn.q_proj
        layer.self_attn.q_proj = Doubled(old.in_features, old.out_features, bias=False).to(DTYPE)
    elif how == "norm":
        layer.input_layernorm.variance_epsilon = 0.1
    elif how == "another dtype":
        layer.input_layernorm.half()
    elif how == "training":
        model.train()
    return model


@needs_kernel
@pytest.mark.parametrize(
    "how", ["hook", "pre-hook", "forward", "layer", "norm", "another dtype", "training"]
)
def test_what_it_cannot_do_is_left_to_the_stock_forward(how: str) -> None:
    assert is_fused(small_model())
    assert not is_fused(spoil(small_model(), how))


@needs_kernel
def test_other_architectures_are_left_to_the_stock_forward(monkeypatch) -> None:
    assert not is_fused(small_model("olmo2"))
    assert not is_fused(small_model(hidden_act="gelu"))
    assert not is_fused(small_model(intermediate_size=100))
    assert not is_fused(small_model().half())
    assert not is_fused(small_model().double())
    monkeypatch.setenv("MARS_KERNELS", "avx512")
    assert is_fused(small_model())


@needs_kernel
def test_changed_weights_are_seen_by_the_next_runner() -> None:
    model, tokens = small_model(), [tokens_of(0)]
    before = open_rows(model, 1).forward(0, tokens, [RowPlan()])[0]
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    after = open_rows(model, 1).forward(0, tokens, [RowPlan()])[0]
    assert not torch.equal(before, after)
    assert torch.equal(after, open_rows(copy.deepcopy(model), 1).forward(0, tokens, [RowPlan()])[0])


@st.composite
def fed_rows(draw: st.DrawFn) -> tuple[list[list[int]], list[RowPlan], list[int]]:
    tokens, plans, cached = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        tokens.append(draw(st.lists(st.integers(4, 99), min_size=1, max_size=9)))
        drafts = tuple(draw(st.lists(st.integers(4, 99), max_size=4)))
        groups = tuple(sorted(draw(st.sets(st.integers(0, len(drafts)), max_size=3))))
        plans.append(RowPlan(drafts, groups, draw(st.integers(1, 3)) if groups else 0))
        cached.append(draw(st.integers(0, len(tokens[-1]) - 1)))
    return tokens, plans, cached


@settings(max_examples=200)
@given(fed_rows(), st.sampled_from([10, 100]))
def test_columns_without_padding_are_those_with_padding(rows, most: int) -> None:
    tokens, plans, cached = rows
    padded = lay_out(tokens, plans, cached, mask_token_id=3, max_positions=most)
    flat = lay_out_flat(tokens, plans, cached, mask_token_id=3, max_positions=most)
    assert flat.num_slots == padded.num_slots
    is_real = torch.arange(padded.token_BT.shape[1]) < padded.num_real
    exists = padded.slot_BT >= 0
    for name in ("token", "position", "slot", "limit"):
        table = getattr(padded, f"{name}_BT")
        wanted = [*table[exists & is_real].tolist(), *table[exists & ~is_real].tolist()]
        found = getattr(flat, name)
        if name == "position":  # real ones never reach the bound
            wanted, found = ([min(x, most - 1) for x in numbers] for numbers in (wanted, found))
        assert found == wanted
    num_masks = len(flat.offset)
    masks = exists & ~is_real
    assert flat.offset == padded.offset_BT[masks].tolist()
    assert flat.first[len(flat.first) - num_masks :] == padded.first_BT[masks].tolist()
    assert_starts(flat, tokens, plans, cached)


def assert_starts(flat: FlatColumns, tokens, plans, cached) -> None:
    reals = [
        len(row) - start + len(plan.drafts)
        for row, plan, start in zip(tokens, plans, cached, strict=True)
    ]
    assert [b - a for a, b in pairwise(flat.real_start)] == reals
    assert [b - a for a, b in pairwise(flat.mask_start)] == [plan.num_masks for plan in plans]
    assert flat.mask_start[0] == flat.real_start[-1]
    wanted: list[int] = []
    for plan, end in zip(plans, flat.real_start[1:], strict=True):
        wanted += range(end - len(plan.drafts) - 1, end)
    assert flat.outputs == [*wanted, *range(flat.real_start[-1], len(flat.token))]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.booleans())
def test_stretches_become_a_tensor(counts: list[int], right: bool) -> None:
    values = torch.arange(2 * sum(counts)).view(-1, 2)
    if not sum(counts):
        assert gather_rows(values, counts, right=right).shape == (len(counts), 0, 2)
        return
    gathered = gather_rows(values, counts, right=right)
    start = 0
    for row, count in enumerate(counts):
        part = gathered[row, max(counts) - count :] if right else gathered[row, :count]
        assert torch.equal(part, values[start : start + count])
        start += count
