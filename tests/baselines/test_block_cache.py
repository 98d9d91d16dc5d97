"""The block cache says what a decoder without any cache says, and `ar` where it must."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mars.baselines.block_cache import (
    decode_block_cache,
    generate_block_cache,
    prepare_block_cache,
)
from mars.checkpoint import Checkpoint
from mars.decoding.accept import is_confident
from mars.decoding.generate import generate
from mars.errors import UserError
from mars.gated import mask_columns
from tests.decoding.conftest import walks, without_times

MASK = 3
PROMPTS: list[Any] = ["hello there", "x", "what is the capital of France? Tell me.", "naïve €"]

prompt_ids = st.lists(st.integers(4, 259), min_size=1, max_size=40)
# Of random models: some drafts pass, others do not.
thresholds = st.sampled_from([None, 0.0, 0.1, 0.15, 0.2, 0.3, 1.0])


@torch.no_grad()
def block_reference(
    checkpoint: Checkpoint, prompt: list[int], tau: float | None, block_size: int, budget: int
) -> tuple[list[int], int]:
    """Decode one row without cache: prefix, block and masks through the stock model, every step.

    Returns:
        The answer, and the forwards, of which one writes every block but the last.
    """
    mars = checkpoint.mars
    assert mars is not None
    tokens, forwards, end = list(prompt), 0, len(prompt)
    while True:
        if len(tokens) == end:
            forwards += len(tokens) > len(prompt)
            end += block_size
        left = len(prompt) + budget - len(tokens)
        num_masks = min(mars.block_size, end - len(tokens) - 1, left - 1)
        if tau is None or tau >= 1:
            num_masks = 0
        masks = [0 if mars.mask_token_id is None else mars.mask_token_id] * num_masks
        with mask_columns(checkpoint.model, len(tokens), torch.arange(num_masks)[None]):
            ids = torch.tensor([tokens + masks])
            logits = checkpoint.model(ids, use_cache=False).logits[0].float()
        forwards += 1
        if mars.mask_token_id is not None:
            logits[:, mars.mask_token_id] = float("-inf")
        for number, at_place in enumerate(logits[len(tokens) - 1 :]):
            if number and not is_confident(at_place, torch.tensor(tau), "probability"):
                break
            tokens.append(int(at_place.argmax()))
            if tokens[-1] in checkpoint.eos_token_ids or len(tokens) == len(prompt) + budget:
                return tokens[len(prompt) :], forwards


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(prompt_ids, min_size=1, max_size=5),
    thresholds,
    st.integers(1, 9),
    st.integers(1, 24),
    st.integers(1, 4),
)
def test_equals_decoding_without_cache(
    llama: Checkpoint,
    prompts: list[list[int]],
    tau: float | None,
    block_size: int,
    budget: int,
    batch_size: int,
) -> None:
    options = {"threshold": tau, "block_size": block_size, "max_new_tokens": budget}
    results = generate_block_cache(llama, prompts, batch_size=batch_size, **options)
    expected = [block_reference(llama, p, tau, block_size, budget) for p in prompts]
    assert [(r.token_ids, r.forwards) for r in results] == expected


@pytest.mark.parametrize("name", ["drafter", "gated_drafter"])
@pytest.mark.parametrize("block_size", [4, 7])
def test_equals_decoding_without_cache_where_drafts_are_good(
    name: str, block_size: int, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(name)
    prompts = [row.tolist()[: 5 + i] for i, row in enumerate(walks(6, 12, torch.Generator()))]
    options = {"threshold": 0.5, "block_size": block_size, "max_new_tokens": 30}
    results = generate_block_cache(checkpoint, prompts, batch_size=4, **options)
    expected = [block_reference(checkpoint, p, 0.5, block_size, 30) for p in prompts]
    assert [(r.token_ids, r.forwards) for r in results] == expected
    most = max(len(r.acceptance_histogram) - 1 for r in results if r.acceptance_histogram[-1])
    assert most == min(block_size, 5), "no step has taken all its masks"


@pytest.mark.parametrize("tau", [None, 1.0])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_threshold_of_one_is_ar(llama: Checkpoint, tau: float | None, block_size: int) -> None:
    found = generate_block_cache(
        llama, PROMPTS, threshold=tau, block_size=block_size, max_new_tokens=20
    )
    expected = generate(llama, PROMPTS, mode="ar", max_new_tokens=20)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert [r.text for r in found] == [r.text for r in expected]


def test_a_ragged_batch_equals_each_alone(drafter: Checkpoint) -> None:
    options = {"threshold": 0.4, "max_new_tokens": 21}
    alone = [generate_block_cache(drafter, [prompt], **options)[0] for prompt in PROMPTS]
    for batch_size in (2, 3, 4):
        together = generate_block_cache(drafter, PROMPTS, batch_size=batch_size, **options)
        assert [*map(without_times, together)] == [*map(without_times, alone)]


def test_forwards_are_those_counted_by_hand(drafter: Checkpoint) -> None:
    prompt = [40 + i for i in range(9)]
    # One token a step, and a forward for each of two full blocks.
    (slow,) = generate_block_cache(
        drafter, [prompt], threshold=None, block_size=3, max_new_tokens=7
    )
    assert (len(slow.token_ids), slow.forwards, slow.acceptance_histogram[:2]) == (7, 9, [2, 7])
    # A block a step, and a forward between the two.
    (fast,) = generate_block_cache(drafter, [prompt], threshold=0.0, block_size=4, max_new_tokens=8)
    assert (len(fast.token_ids), fast.forwards) == (8, 3)
    assert fast.acceptance_histogram == [1, 0, 0, 0, 2]
    assert fast.tokens_per_forward == 8 / 3


def test_rows_wait_for_the_slowest(drafter: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[40 + i for i in range(9)], [200, 7, 31, 90, 4]]
    options = {"threshold": 0.6, "block_size": 4, "max_new_tokens": 12}
    requests = [prepare_block_cache(drafter, prompt, **options) for prompt in prompts]
    lengths = [[len(prompt)] for prompt in prompts]
    for event in decode_block_cache(drafter.model, requests, block_size=4, mask_token_id=MASK):
        lengths[event.index].append(lengths[event.index][-1] + len(event.token_ids))
        done = [row[-1] - row[0] for row in lengths]
        assert abs(done[0] - done[1]) <= 4, "a row is in another block"
    assert len(lengths[0]) != len(lengths[1]), "the rows had the same pace: nobody has waited"


def test_refuses_what_it_cannot_do(llama: Checkpoint) -> None:
    with pytest.raises(UserError, match="block_size must be an integer"):
        generate_block_cache(llama, ["x"], block_size=0)
    plain = Checkpoint(model=llama.model, tokenizer=llama.tokenizer, name="plain")
    with pytest.raises(UserError, match="block_size"):
        generate_block_cache(plain, ["x"])
    with pytest.raises(UserError, match="plain AR model"):
        generate_block_cache(plain, ["x"], block_size=4)
