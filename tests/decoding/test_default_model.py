"""The contract of decoding on the real default model."""

import json
from importlib.resources import files

import pytest
import torch

from mars.checkpoint import Checkpoint, load, prepare_for_training
from mars.decoding.generate import generate, stream
from mars.decoding.options import DecodingOptions
from tests.decoding.conftest import reference_result, without_times

pytestmark = pytest.mark.slow
NUM_PROMPTS, NUM_TOKENS = 20, 32


def prompts() -> list[str]:
    """Word problems, explanations, lists and code."""
    lines = files("mars.demo").joinpath("train_prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines[:NUM_PROMPTS]]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    checkpoint = load(adapter=None, dtype="float32")
    prepare_for_training(checkpoint, block_size=4, adapter="full")
    return checkpoint


def greedy_of_transformers(checkpoint: Checkpoint, prompt: str) -> list[int]:
    inputs = checkpoint.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = checkpoint.model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def test_ar_equals_transformers_on_real_prompts(checkpoint):
    expected = [greedy_of_transformers(checkpoint, prompt) for prompt in prompts()]
    ours = generate(checkpoint, prompts(), mode="ar", max_new_tokens=NUM_TOKENS, batch_size=8)
    assert [result.token_ids for result in ours] == expected
    assert all(result.tokens_per_forward == 1.0 for result in ours)


@pytest.fixture(scope="module")
def ar(checkpoint: Checkpoint) -> list[list[int]]:
    few = prompts()[:4]
    results = generate(checkpoint, few, mode="ar", max_new_tokens=NUM_TOKENS, batch_size=4)
    return [result.token_ids for result in results]


@pytest.mark.parametrize(("layout", "batch_size"), [("linear", 4), ("partial", 1), ("full", 3)])
def test_exact_equals_ar_on_real_prompts(checkpoint, ar, layout, batch_size):
    """An untrained model: masks are right now and then, n-grams where it repeats itself."""
    options = {"max_new_tokens": NUM_TOKENS, "batch_size": batch_size}
    exact = generate(checkpoint, prompts()[:4], layout=layout, **options)
    assert [result.token_ids for result in exact] == ar
    assert max(result.tokens_per_forward for result in exact) > 1


@pytest.mark.parametrize(("seed", "temperature"), [(0, 0.6), (1, 1.0)])
def test_exact_equals_ar_sampled(checkpoint, seed, temperature):
    few = prompts()[:4]
    options = {"max_new_tokens": 24, "seed": seed, "temperature": temperature}
    ar = generate(checkpoint, few, mode="ar", **options)
    exact = generate(checkpoint, few, layout="partial", batch_size=3, **options)
    assert [result.token_ids for result in exact] == [result.token_ids for result in ar]


def test_drafts_without_training(checkpoint):
    """Prompt lookup alone, on the model as it is."""
    plain = load(adapter=None, dtype="float32")
    few = [f"Repeat word for word: {prompt}" for prompt in prompts()[:4]]
    ar = generate(plain, few, mode="ar", max_new_tokens=NUM_TOKENS)
    exact = generate(plain, few, max_new_tokens=NUM_TOKENS)
    assert [result.token_ids for result in exact] == [result.token_ids for result in ar]
    assert sum(result.forwards for result in exact) < sum(result.forwards for result in ar)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
def test_every_path_equals_the_reference(checkpoint, settings):
    """An untrained model has no opinion at its masks, so tau is low enough to accept some."""
    options = DecodingOptions(mode="threshold", threshold=0.05, max_new_tokens=20, **settings)
    few = prompts()[:4]
    expected = [reference_result(checkpoint, prompt, options) for prompt in few]
    assert max(result["tokens_per_forward"] for result in expected) > 1
    together = generate(checkpoint, few, options, batch_size=4)
    assert [without_times(result) for result in together] == expected
    pieces = stream(checkpoint, few[0], options)
    assert "".join(pieces) == expected[0]["text"]


@pytest.mark.parametrize("threshold", [None, 1.0])
def test_tau_of_one_is_ar_in_bfloat16(checkpoint, threshold):
    model = load(adapter=None, dtype=torch.bfloat16)
    model.mars = checkpoint.mars
    few = prompts()[:6]
    ar = generate(model, few, mode="ar", max_new_tokens=24, batch_size=3)
    tau = generate(model, few, threshold=threshold, max_new_tokens=24, batch_size=3)
    assert [result.token_ids for result in tau] == [result.token_ids for result in ar]
