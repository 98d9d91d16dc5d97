from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from mars.compat import _forward_signature
from mars.decoding.plan import RowPlan
from mars.engine.runner import Runner
from tests.conftest import FAMILIES, make_model

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
    for row, cached in enumerate(runner.cached):
        fresh = DynamicCache()
        with torch.no_grad():
            model(torch.tensor([sequences[row][:cached]]), **{CACHE_ARGUMENT: fresh})
        for layer, expected in enumerate(fresh.layers):
            for mine, theirs in (
                (runner.cache.keys[layer], expected.keys),
                (runner.cache.values[layer], expected.values),
            ):
                torch.testing.assert_close(mine[row, :, :cached], theirs[0], atol=1e-4, rtol=1e-4)


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
