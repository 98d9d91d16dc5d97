from typing import Any

import pytest
import torch
from transformers.generation import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mars.decoding.hf_adapters import logits_hook, sampler_settings

TEMPERATURE, TOP_K, TOP_P = TemperatureLogitsWarper(0.5), TopKLogitsWarper(4), TopPLogitsWarper(0.9)


def test_the_usual_list_becomes_options() -> None:
    processors = [RepetitionPenaltyLogitsProcessor(1.2), TEMPERATURE, TOP_K, TOP_P]
    assert sampler_settings(LogitsProcessorList(processors)) == {
        "repetition_penalty": 1.2,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
    }
    assert sampler_settings(LogitsProcessorList()) == {}


@pytest.mark.parametrize(
    "processors",
    [
        [TOP_P, TEMPERATURE],
        [TEMPERATURE, TEMPERATURE],
        [TEMPERATURE, MinNewTokensLengthLogitsProcessor(1, 2, 0)],
        [RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3)],
    ],
    ids=["order", "twice", "unknown", "part of the prompt"],
)
def test_anything_else_is_left_to_hooks(processors: list) -> None:
    assert sampler_settings(LogitsProcessorList(processors)) is None


def test_a_hook_sees_its_row_with_its_padding() -> None:
    penalty: Any = RepetitionPenaltyLogitsProcessor(2.0)
    penalty.prompt_ignore_length = torch.tensor([0, 2])  # as newer releases of `generate` set it
    hook = logits_hook(LogitsProcessorList([penalty]), padding_ids=[1, 1], row=1)
    assert hook([3], torch.full((5,), 4.0)).tolist() == [4, 4, 4, 2, 4]
