from typing import Any

import pytest
import torch
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mars.decoding.hf_adapters import logits_hook, split_off_sampler

TEMPERATURE, TOP_K, TOP_P = TemperatureLogitsWarper(0.5), TopKLogitsWarper(4), TopPLogitsWarper(0.9)
UNKNOWN = MinNewTokensLengthLogitsProcessor(1, 2, 0)


def test_the_usual_list_becomes_options() -> None:
    processors = [RepetitionPenaltyLogitsProcessor(1.2), TEMPERATURE, TOP_K, TOP_P]
    settings = {"repetition_penalty": 1.2, "temperature": 0.5, "top_k": 4, "top_p": 0.9}
    assert split_off_sampler(processors) == ([], settings)
    assert split_off_sampler([]) == ([], {})


@pytest.mark.parametrize(
    ("others", "end"),
    [
        ([TOP_P], [TEMPERATURE]),  # another order
        ([TEMPERATURE], [TEMPERATURE]),
        ([TEMPERATURE, UNKNOWN], []),
        ([UNKNOWN], [TEMPERATURE, TOP_K]),
        ([RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3)], [TEMPERATURE]),
    ],
)
def test_anything_else_is_left_to_hooks(others: list, end: list) -> None:
    assert split_off_sampler(others + end) == (others, split_off_sampler(end)[1])
    assert len(split_off_sampler(end)[1]) == len(end)


def test_a_hook_sees_its_row_with_its_padding() -> None:
    penalty: Any = RepetitionPenaltyLogitsProcessor(2.0)
    penalty.prompt_ignore_length = torch.tensor([0, 2])  # as newer releases of `generate` set it
    hook = logits_hook([penalty], padding_ids=[1, 1], row=1)
    assert hook is not None
    assert hook([3], torch.full((5,), 4.0)).tolist() == [4, 4, 4, 2, 4]
