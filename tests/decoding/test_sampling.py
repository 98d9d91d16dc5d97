import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mars.decoding.options import DecodingOptions
from mars.decoding.sampling import History, SamplingParams, choose, filter_logits, penalise

V = 50

sampled_options = st.builds(
    DecodingOptions,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 49, 50, 99]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    seed=st.integers(0, 9),
)
any_options = st.one_of(
    sampled_options,
    st.builds(
        DecodingOptions,
        top_k=st.sampled_from([0, 3]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        logit_bias=st.sampled_from([{}, {3: 5.0}]),
    ),
)


def random_logits(seed: int, rows: int = 1, columns: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, V, generator=torch.Generator().manual_seed(seed)) * 3


def process(
    logits: torch.Tensor, params: SamplingParams, history: History | None = None
) -> torch.Tensor:
    """What a token is drawn from."""
    return filter_logits(penalise(logits, params, history), params)


def history_of(prompt: list[int], answer: list[int]) -> History:
    history = History.of(prompt, V, "cpu")
    history.add(torch.tensor([answer], dtype=torch.long))
    return history


@given(sampled_options, st.integers(0, 1000), st.lists(st.integers(0, V - 1), min_size=1))
def test_processing_equals_transformers(o: DecodingOptions, seed: int, ids: list[int]) -> None:
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(float(o.repetition_penalty))]
    )
    processors.append(TemperatureLogitsWarper(o.temperature))
    if o.top_k:
        processors.append(TopKLogitsWarper(o.top_k))
    if o.top_p < 1:
        processors.append(TopPLogitsWarper(o.top_p))
    processors.append(MinPLogitsWarper(o.min_p))
    logits = random_logits(seed)
    expected = processors(torch.tensor([ids]), logits[0].clone())
    half = len(ids) // 2
    history = history_of(ids[:half] or ids[:1], ids[half:])
    actual = process(logits, SamplingParams.of([o], V), history)[0]
    torch.testing.assert_close(actual, expected)
    assert torch.equal(actual == -torch.inf, expected == -torch.inf)


def test_penalties_and_bias_by_hand() -> None:
    options = DecodingOptions(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={4: 3.0},
    )
    logits = torch.zeros(1, 1, V)
    logits[0, 0, :6] = torch.tensor([4.0, -4.0, 4.0, 4.0, 1.0, 4.0])
    history = history_of(prompt=[0, 1], answer=[2, 2, 4])
    processed = process(logits, SamplingParams.of([options], V), history)[0, 0]
    # Halved if seen; 0.5 and 0.25 per occurrence off if generated; bias before all.
    assert processed[:6].tolist() == [2.0, -8.0, 2.0 - 0.5 - 0.5, 4.0, 2.0 - 0.5 - 0.25, 4.0]


@given(st.lists(any_options, min_size=1, max_size=4), st.integers(0, 99), st.data())
def test_a_row_does_not_see_the_others(
    options: list[DecodingOptions], seed: int, data: st.DataObject
) -> None:
    logits = random_logits(seed, len(options), 3)
    position = torch.tensor([[5, 6, 7]]).expand(len(options), 3)
    histories = [
        history_of([1, 2], data.draw(st.lists(st.integers(0, V - 1), max_size=5))) for _ in options
    ]
    params = SamplingParams.of(options, V)
    together = process(logits, params, History.stack(histories))
    chosen = choose(penalise(logits, params, History.stack(histories)), params, position)
    for row, option in enumerate(options):
        alone_params = SamplingParams.of([option], V)
        alone = penalise(logits[row : row + 1], alone_params, histories[row])
        filtered = process(logits[row : row + 1], alone_params, histories[row])
        torch.testing.assert_close(filtered[0], together[row])
        assert choose(alone, alone_params, position[:1])[0].tolist() == chosen[row].tolist()


def test_greedy_takes_no_filter_and_copies_nothing() -> None:
    params = SamplingParams.of([DecodingOptions(top_k=2, top_p=0.1, min_p=0.9)], V)
    logits = random_logits(0)
    assert penalise(logits, params) is logits
    assert choose(logits, params, torch.tensor([[9]])).item() == logits.argmax()


@pytest.mark.parametrize("off", [{"top_p": 1.0}, {"min_p": 0.0}, {"top_k": 0}], ids=str)
def test_a_row_without_filter_keeps_impossible_looking_tokens(off: dict[str, Any]) -> None:
    on = DecodingOptions(temperature=1.0, top_p=0.5, min_p=0.5, top_k=2)
    params = SamplingParams.of([on, DecodingOptions(temperature=1.0), on], V)
    logits = torch.zeros(3, 1, V)
    logits[..., 7] = -500.0  # probability 0 in float32
    assert process(logits, params)[1].isfinite().all()
    one_off = SamplingParams.of([dataclasses.replace(on, **off), on], V)
    assert process(logits[:2], one_off)[0].isneginf().any()  # the other two still work


def test_a_penalty_of_nothing_is_no_tensor() -> None:
    params = SamplingParams.of([DecodingOptions(seed=4)], V)
    unused = {f.name for f in dataclasses.fields(params)} - {"seed", "largest_top_k"}
    assert all(getattr(params, name) is None for name in unused)


def test_samples_follow_the_distribution() -> None:
    options = DecodingOptions(temperature=0.5, top_k=4, seed=3)
    params = SamplingParams.of([options], V)
    logits = random_logits(1).expand(1, 20_000, V)
    processed = process(logits, params)
    chosen = choose(logits, params, torch.arange(20_000)[None])
    share = chosen[0].bincount(minlength=V) / 20_000
    assert torch.allclose(share, processed[0, 0].softmax(-1), atol=0.012)


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"position": 8}], ids=["another seed", "another position"]
)
def test_noise_belongs_to_seed_and_position(change: dict[str, Any]) -> None:
    def draw(seed: int = 1, position: int = 7) -> list[int]:
        params = SamplingParams.of([DecodingOptions(temperature=1.0, seed=seed)], V)
        positions = torch.arange(position, position + 100)[None]
        return choose(torch.zeros(1, 100, V), params, positions)[0].tolist()

    assert draw() == draw()
    assert draw() != draw(**change)
