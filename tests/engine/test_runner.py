from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from mars.compat import _forward_signature
from mars.decoding.plan import RowPlan
from mars.engine.runner import Runner
from mars.gated import GatedAdapter, GatedConfig, mask_columns
from tests.conftest import FAMILIES, make_model, slots_of

MASK = 3
V = 260
CACHE_ARGUMENT, _ = _forward_signature(LlamaForCausalLM)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


def random_tokens(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, V, (length,), generator=generator).tolist()


def masks_only(runner: Runner, first: int, tokens: list[list[int]], num_masks: int) -> torch.Tensor:
    """Run rows as the threshold mode does: (B, 1 + W, V)."""
    plan = RowPlan(groups=(0,), window=num_masks) if num_masks else RowPlan()
    return torch.cat(runner.forward(first, tokens, [plan] * len(tokens)), dim=1)


@torch.no_grad()
def plain_forward(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_equals_the_plain_forward_for_every_prefix_and_offset(
    family: str, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    model, tokens, num_masks = tiny_model(family), random_tokens(12), 4
    runner = Runner(model, num_rows=1, max_positions=32, mask_token_id=MASK)
    runner.add_row()
    for length in range(1, len(tokens) + 1):
        prefix = tokens[:length]
        logits = masks_only(runner, 0, [prefix], num_masks)
        assert logits.shape == (1, num_masks + 1, V)
        expected = plain_forward(model, prefix + [MASK] * num_masks)[length - 1 :]
        torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def assert_cache_is_fresh(model: PreTrainedModel, runner: Runner, tokens: list[list[int]]) -> None:
    keys, values = (slots_of(runner, of_keys) for of_keys in (True, False))
    for row, cached in enumerate(runner.cached):
        place = runner.places[row]
        fresh = DynamicCache()
        with torch.no_grad():
            model(torch.tensor([tokens[row][:cached]]), **{CACHE_ARGUMENT: fresh})
        for layer, expected in enumerate(fresh.layers):
            for mine, theirs in (
                (keys[layer], expected.keys),
                (values[layer], expected.values),
            ):
                torch.testing.assert_close(mine[place, :, :cached], theirs[0], atol=1e-4, rtol=1e-4)


steps_of_row = st.tuples(st.integers(1, 30), st.lists(st.integers(1, 5), min_size=1, max_size=6))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(steps_of_row, min_size=1, max_size=4), st.integers(0, 4), st.sampled_from([1, 4, 512])
)
def test_after_any_accept_pattern_the_cache_equals_a_fresh_prefill(
    model: PreTrainedModel, rows: list[tuple[int, list[int]]], num_masks: int, chunk: int
) -> None:
    sequences = [random_tokens(64, seed) for seed in range(len(rows))]
    lengths = [prompt for prompt, _ in rows]
    runner = Runner(
        model, num_rows=len(rows), max_positions=70, mask_token_id=MASK, prefill_chunk=chunk
    )
    for _ in rows:
        runner.add_row()
    for step in range(max(len(accepted) for _, accepted in rows)):
        tokens = [sequence[:n] for sequence, n in zip(sequences, lengths, strict=True)]
        logits = masks_only(runner, 0, tokens, num_masks)
        for row, prefix in enumerate(tokens):
            expected = plain_forward(model, prefix + [MASK] * num_masks)[len(prefix) - 1 :]
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)
        # Rows accept different numbers of tokens, whatever the masks said.
        lengths = [
            n + accepted[step % len(accepted)]
            for n, (_, accepted) in zip(lengths, rows, strict=True)
        ]
    assert_cache_is_fresh(model, runner, sequences)


def test_a_dropped_row_is_replaced_by_the_last(model: PreTrainedModel) -> None:
    runner = Runner(model, num_rows=3, max_positions=40, mask_token_id=MASK)
    sequences = [random_tokens(20, seed) for seed in range(3)]
    for _ in sequences:
        runner.add_row()
    masks_only(runner, 0, [s[:10] for s in sequences], 2)
    runner.drop_row(0)
    logits = masks_only(runner, 0, [sequences[2][:13], sequences[1][:11]], 2)
    expected = plain_forward(model, sequences[2][:13] + [MASK] * 2)[12:]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    runner.add_row()  # in the place of the one that moved
    logits = masks_only(runner, 2, [sequences[0][:4]], 1)
    expected = plain_forward(model, [*sequences[0][:4], MASK])[3:]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def test_the_cache_does_not_grow_beyond_what_a_row_may_need(model: PreTrainedModel) -> None:
    runner = Runner(model, num_rows=3, max_positions=1000, mask_token_id=MASK)
    runner.add_row(90)
    for length in range(10, 91, 10):
        masks_only(runner, 0, [random_tokens(length)], 0)
    assert runner.cache.num_slots == 90
    runner.add_row(150)
    masks_only(runner, 1, [random_tokens(100)], 0)
    assert 100 <= runner.cache.num_slots <= 150
    runner.add_row(2000)  # more than any may have
    masks_only(runner, 2, [random_tokens(900)], 0)
    assert runner.cache.num_slots <= 1000


@pytest.mark.usefixtures("stock_forward")
def test_the_only_cache_is_ours_and_no_larger_than_needed(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("transformers made a cache of its own")

    monkeypatch.setattr(DynamicCache, "__init__", refuse)
    runner = Runner(model, num_rows=2, max_positions=300, mask_token_id=MASK)
    runner.add_row()
    runner.add_row()
    lengths = []
    for length in range(10, 299, 5):
        masks_only(runner, 0, [random_tokens(length), random_tokens(5 + length // 2)], 2)
        storages = {tensor.data_ptr() for tensor in runner.cache.keys + runner.cache.values}
        assert len(storages) == 2 * model.config.num_hidden_layers
        lengths.append(runner.cache.num_slots)
    assert lengths[0] < 100
    assert lengths[-1] == 300
    assert len(set(lengths)) < 8  # grows in few strides


def test_prompts_are_read_in_chunks(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths, logits_kept = [], []
    forward = model.forward

    def spy(**kwargs: object) -> object:
        widths.append(kwargs["input_ids"].shape[1])  # type: ignore[attr-defined]
        logits_kept.append(kwargs["logits_to_keep"])
        return forward(**kwargs)

    monkeypatch.setattr(model, "forward", spy)
    runner = Runner(model, num_rows=1, max_positions=99, mask_token_id=MASK, prefill_chunk=16)
    runner.add_row()
    masks_only(runner, 0, [random_tokens(40)], 3)
    assert widths == [16, 16, 8 + 3]
    assert logits_kept == [1, 1, 4]


def assert_outputs_equal_plain_forwards(
    model: PreTrainedModel,
    tokens: list[list[int]],
    plans: list[RowPlan],
    outputs: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Compare every real column, and every group with a forward of its own, without cache."""
    real_BCV, mask_BMV = outputs
    for row, plan, real_CV, mask_MV in zip(tokens, plans, real_BCV, mask_BMV, strict=True):
        count = len(plan.drafts) + 1
        expected = plain_forward(model, [*row, *plan.drafts])[-count:]
        torch.testing.assert_close(real_CV[-count:], expected, atol=1e-4, rtol=1e-4)
        for number, length in enumerate(plan.groups):
            alone = [*row, *plan.drafts[:length], *[MASK] * plan.window]
            expected = plain_forward(model, alone)[-plan.window :]
            group = mask_MV[number * plan.window : (number + 1) * plan.window]
            torch.testing.assert_close(group, expected, atol=1e-4, rtol=1e-4)


ROW_PLANS = [
    RowPlan(),
    RowPlan(groups=(0,), window=3),
    RowPlan(drafts=(50, 51, 52)),
    RowPlan(drafts=(50, 51, 52), groups=(3,), window=4),
    RowPlan(drafts=(60, 61), groups=(0, 1, 2), window=2),
    RowPlan(drafts=(70, 71, 72, 73), groups=(1, 3), window=1),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_equals_plain_forwards_in_one_batch(
    family: str, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    model = tiny_model(family)
    runner = Runner(model, num_rows=len(ROW_PLANS), max_positions=32, mask_token_id=MASK)
    tokens = [random_tokens(3 + 2 * seed, seed) for seed in range(len(ROW_PLANS))]
    for _ in ROW_PLANS:
        runner.add_row()
    for _ in range(2):
        outputs = runner.forward(0, tokens, ROW_PLANS)
        assert_outputs_equal_plain_forwards(model, tokens, ROW_PLANS, outputs)
        tokens = [[*row, 99, 98] for row in tokens]  # nothing accepted


@st.composite
def row_plans(draw: st.DrawFn) -> RowPlan:
    drafts = draw(st.lists(st.integers(4, 259), max_size=5))
    groups = sorted(draw(st.sets(st.integers(0, len(drafts)), max_size=4)))
    return RowPlan(tuple(drafts), tuple(groups), draw(st.integers(1, 4)) if groups else 0)


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(1, 3), st.sampled_from([1, 4, 512]))
def test_after_any_verification_the_cache_equals_a_fresh_prefill(
    model: PreTrainedModel, data: st.DataObject, num_rows: int, chunk: int
) -> None:
    runner = Runner(
        model, num_rows=num_rows, max_positions=80, mask_token_id=MASK, prefill_chunk=chunk
    )
    tokens = [random_tokens(data.draw(st.integers(1, 20)), row) for row in range(num_rows)]
    for _ in tokens:
        runner.add_row()
    for _ in range(data.draw(st.integers(1, 4))):
        plans = [data.draw(row_plans()) for _ in tokens]
        outputs = runner.forward(0, tokens, plans)
        assert_outputs_equal_plain_forwards(model, tokens, plans, outputs)
        accepted = [data.draw(st.integers(0, len(plan.drafts))) for plan in plans]
        runner.keep(0, accepted)
        following = [
            data.draw(st.lists(st.integers(4, 259), min_size=1, max_size=3)) for _ in plans
        ]
        tokens = [
            [*row, *plan.drafts[:count], *more]
            for row, plan, count, more in zip(tokens, plans, accepted, following, strict=True)
        ]
    assert_cache_is_fresh(model, runner, tokens)


@pytest.mark.parametrize("position", [3, 259])
def test_masks_do_not_touch_real_outputs(model: PreTrainedModel, position: int) -> None:
    """Bit by bit: the same forward with another mask token."""
    outputs = []
    for mask in (MASK, position):
        runner = Runner(model, num_rows=1, max_positions=32, mask_token_id=mask)
        runner.add_row()
        outputs.append(runner.forward(0, [random_tokens(9)], [ROW_PLANS[4]]))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1]) == (position == MASK)


@pytest.mark.usefixtures("stock_forward")
def test_the_adapter_learns_which_columns_are_masks(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def spy(_: PreTrainedModel, start: int, offset_BM: torch.Tensor) -> nullcontext[None]:
        calls.append((start, offset_BM.tolist()))
        return nullcontext()

    monkeypatch.setattr("mars.engine.runner.mask_columns", spy)
    runner = Runner(model, num_rows=2, max_positions=32)
    runner.add_row()
    runner.add_row()
    tokens = [random_tokens(4), random_tokens(2)]
    runner.forward(0, tokens, [RowPlan(), RowPlan()])
    runner.forward(0, [[*row, 9] for row in tokens], [ROW_PLANS[4], ROW_PLANS[1]])
    assert calls == [(4, [[], []]), (3, [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 0, 0]])]


def test_groups_of_a_gated_adapter_equal_plain_forwards(
    tiny_model: Callable[..., PreTrainedModel],
) -> None:
    model = tiny_model("llama")
    config = GatedConfig(
        base=None, fingerprint="", block_size=4, rank=4, targets=("q_proj",), mask_embeddings=4
    )
    adapter = GatedAdapter(model, config)
    torch.nn.init.normal_(adapter.mask_embedding)
    for layer in adapter.lora_b:
        torch.nn.init.normal_(layer.weight)
    runner = Runner(model, num_rows=len(ROW_PLANS), max_positions=32)
    tokens = [random_tokens(3 + 2 * seed, seed) for seed in range(len(ROW_PLANS))]
    for _ in ROW_PLANS:
        runner.add_row()
    real_BCV, mask_BMV = runner.forward(0, tokens, ROW_PLANS)
    for row, plan, real_CV, mask_MV in zip(tokens, ROW_PLANS, real_BCV, mask_BMV, strict=True):
        expected = plain_forward(model, [*row, *plan.drafts])[len(row) - 1 :]
        torch.testing.assert_close(real_CV[-len(expected) :], expected, atol=1e-4, rtol=1e-4)
        for number, length in enumerate(plan.groups):
            prefix = [*row, *plan.drafts[:length]]
            with mask_columns(model, len(prefix), torch.arange(plan.window)[None]):
                expected = plain_forward(model, prefix + [0] * plan.window)[len(prefix) :]
            group = mask_MV[number * plan.window : (number + 1) * plan.window]
            torch.testing.assert_close(group, expected, atol=1e-4, rtol=1e-4)
