from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from mars.checkpoint import Checkpoint
from mars.decoding.custom_generate import custom_generate
from mars.decoding.generate import generate
from mars.errors import UserError
from tests.conftest import make_model

MASK, PAD, EOS = 3, 0, 2
PROMPTS = [[10, 11, 12], [20, 21, 22, 23, 24, 25], [30]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = make_model("llama")
    model.config.mars = {
        "block_size": 4,
        "mask_token_id": MASK,
        "adapter": "full",
        "format_version": 1,
    }
    return model


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = [[PAD] * (longest - len(p)) + p for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def run(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, **kwargs: Any) -> torch.Tensor:
    defaults = {"max_new_tokens": 24, "do_sample": False, "custom_generate": custom_generate}
    return model.generate(**padded(prompts), **(defaults | kwargs))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
        {"min_new_tokens": 10, "eos_token_id": list(range(100, 200))},
        {"eos_token_id": [EOS, 100, 101, 102, 103, 200, 201, 202, 203]},
        {"eos_token_id": list(range(130, 190)), "max_length": 20, "max_new_tokens": None},
        {"bad_words_ids": [[97], [110]]},
        {"forced_eos_token_id": 77},
    ],
    ids=str,
)
def test_ar_equals_stock_generate(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    suppressed = {"suppress_tokens": [MASK]}
    expected = run(model, custom_generate=None, **suppressed, **settings)
    # With a processor that only `transformers` knows, all of them run as hooks.
    assert torch.equal(run(model, mode="ar", **suppressed, **settings), expected)
    assert torch.equal(run(model, mode="ar", **settings), expected)
    for layout in ("linear", "full"):
        assert torch.equal(run(model, layout=layout, **settings), expected)


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 2}])
def test_threshold_rows_equal_rows_alone(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    options = {"threshold": 0.12, "window": 3, "eos_token_id": list(range(130, 150)), **settings}
    together = run(model, **options)
    longest = max(map(len, PROMPTS))
    for row, prompt in zip(together, PROMPTS, strict=True):
        alone = run(model, [prompt], **options)[0, len(prompt) :].tolist()
        answer = row[longest:].tolist()
        assert answer == alone + [PAD] * (len(answer) - len(alone))


def test_threshold_equals_generate(model: PreTrainedModel, llama: Checkpoint) -> None:
    expected = generate(llama, PROMPTS[1], threshold=0.12, window=3, max_new_tokens=24)
    actual = run(model, [PROMPTS[1]], threshold=0.12, window=3)
    assert expected.tokens_per_forward > 1
    assert actual[0, len(PROMPTS[1]) :].tolist() == expected.token_ids


def test_sampling_equals_generate(model: PreTrainedModel, llama: Checkpoint) -> None:
    options = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.1}
    expected = generate(
        llama, PROMPTS[0], threshold=0.2, seed=6, max_new_tokens=24, min_p=0.02, **options
    )
    sampled = run(
        model,
        [PROMPTS[1], PROMPTS[0]],
        do_sample=True,
        min_p=0.02,
        threshold=0.2,
        seed=5,
        **options,
    )
    answer = sampled[1, len(PROMPTS[1]) :].tolist()
    assert answer[: len(expected.token_ids)] == expected.token_ids  # row 1 takes seed + 1


def test_sampling_through_hooks_equals_sampling_by_options(model: PreTrainedModel) -> None:
    options = {"do_sample": True, "temperature": 0.8, "top_k": 30, "threshold": 0.2, "seed": 1}
    hooked = LogitsProcessorList([_Identity()])
    assert torch.equal(run(model, **options), run(model, logits_processor=hooked, **options))


@pytest.mark.parametrize("settings", [{}, {"no_repeat_ngram_size": 9}], ids=["options", "hooks"])
def test_confidence_is_that_of_the_model_at_temperature_one(
    model: PreTrainedModel, settings: dict[str, Any]
) -> None:
    """A tau that no draft of this model reaches: filters must not lift one over it."""
    options = {"do_sample": True, "temperature": 0.01, "top_k": 1, "seed": 1, **settings}
    expected = run(model, mode="ar", **options)
    assert torch.equal(run(model, threshold=0.98, **options), expected)


def test_sampling_repeats_with_the_global_seed(model: PreTrainedModel) -> None:
    torch.manual_seed(1)
    first, second = run(model, do_sample=True), run(model, do_sample=True)
    torch.manual_seed(1)
    assert torch.equal(run(model, do_sample=True), first)
    assert not torch.equal(first, second)


class _Identity(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class _StopAfter(StoppingCriteria):
    """Stop a row once it holds a token of a set."""

    def __init__(self, tokens: set[int]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([row[-1].item() in self.tokens for row in input_ids])


class _CountsRows(StoppingCriteria):
    """Keep a state for every row of the batch, as some evaluation harnesses do."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        return bool(input_ids[2, -1] == 0)


def test_stopping_criteria_are_asked_after_every_token(model: PreTrainedModel) -> None:
    whole = run(model, [PROMPTS[0]], threshold=0.0)[0, 3:].tolist()
    stop = whole[6]
    criteria = StoppingCriteriaList([_StopAfter({stop})])
    cut = run(model, [PROMPTS[0]], threshold=0.0, stopping_criteria=criteria)[0, 3:].tolist()
    assert cut == whole[: whole.index(stop) + 1]
    expected = run(model, custom_generate=None, suppress_tokens=[MASK], stopping_criteria=criteria)
    assert torch.equal(run(model, mode="ar", stopping_criteria=criteria), expected)


def test_stop_strings_as_a_criterion(model: PreTrainedModel, llama: Checkpoint) -> None:
    """`generate` drops the tokenizer that its own `stop_strings` would need."""
    whole = run(model, [PROMPTS[0]], mode="ar")[0, 3:].tolist()
    letter = next(t for t in whole[3:] if str(llama.tokenizer.decode(t)).isascii())
    stop = str(llama.tokenizer.decode(letter))
    criteria = StoppingCriteriaList([StopStringCriteria(llama.tokenizer, [stop])])
    cut = run(model, [PROMPTS[0]], mode="ar", stopping_criteria=criteria)[0, 3:].tolist()
    assert cut == whole[: whole.index(letter) + 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidance"),
        ({"window": 9}, "window 9"),
        ({"threshold": -1.0}, "threshold"),
        ({"stopping_criteria": StoppingCriteriaList([_CountsRows()])}, "_CountsRows"),
        ({"max_new_tokens": 600}, "context"),
        ({"position_ids": torch.arange(6).expand(3, 6)}, "position_ids"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_honoured_is_refused(
    model: PreTrainedModel, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(model, **settings)


def test_right_padding_is_refused(model: PreTrainedModel) -> None:
    inputs = {name: tensor.flip(1) for name, tensor in padded(PROMPTS).items()}
    with pytest.raises(UserError, match="left"):
        model.generate(**inputs, max_new_tokens=4, custom_generate=custom_generate)


def test_a_model_without_mars_block() -> None:
    plain = make_model("llama")
    with pytest.raises(UserError, match="mars train"):
        run(plain, threshold=0.9)
    expected = run(plain, custom_generate=None)
    assert torch.equal(run(plain, mode="ar"), expected)
    assert torch.equal(run(plain), expected)


def test_the_window_of_sliding_models_is_refused() -> None:
    with pytest.raises(UserError, match="sliding"):
        run(make_model("mistral", sliding_window=8), mode="ar")
