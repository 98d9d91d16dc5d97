"""Checkpoints shared by the decoding tests, and a way to compare results."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from mars.checkpoint import Checkpoint
from mars.decoding.generate import prepare
from mars.decoding.options import DecodingOptions
from mars.decoding.reference import reference
from mars.decoding.request import Result

TIMES = ("prefill_seconds", "decode_seconds", "seconds")


@pytest.fixture(scope="session")
def llama(tiny_checkpoint: Callable[..., Checkpoint]) -> Checkpoint:
    return tiny_checkpoint("llama")


def without_times(result: Result) -> dict[str, Any]:
    return {name: value for name, value in asdict(result).items() if name not in TIMES}


def reference_result(
    checkpoint: Checkpoint, prompt: Any, options: DecodingOptions, *, raw: bool = False
) -> dict[str, Any]:
    mask_token_id = checkpoint.mars.mask_token_id if checkpoint.mars else None
    request = prepare(checkpoint, prompt, options, raw=raw)
    return without_times(reference(checkpoint.model, request, mask_token_id=mask_token_id))
