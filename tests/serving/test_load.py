"""Hundreds and thousands of requests: all are answered, and nothing is left of them."""

import gc
import random
import threading
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest
import torch

from mars import Engine
from mars.checkpoint import Checkpoint
from mars.decoding.generate import generate
from mars.decoding.options import DecodingOptions
from tests.serving.conftest import PATIENCE


def test_500_requests_through_32_rows(llama: Checkpoint) -> None:
    """Poisson arrivals, lengths from 1 to 200 tokens, one in ten cancelled."""
    rng = random.Random(0)
    cases = []
    for number in range(40):
        prompt = [rng.randrange(4, 260) for _ in range(rng.choice([1, 5, 20, 60, 200]))]
        sampler = {"temperature": 1.0, "seed": number} if number % 3 == 0 else {}
        mode = {"mode": "ar"} if number % 2 else {}
        budget = rng.choice([1, 4, 16, 48])
        options = DecodingOptions(max_new_tokens=budget, stop=("zq",), **sampler, **mode)
        cases.append((prompt, options, generate(llama, prompt, options)))
    pause = threading.Event()
    submitted = []
    with Engine(llama, max_rows=32, max_waiting=64, prefill_chunk=64) as engine:
        for _ in range(500):
            pause.wait(rng.expovariate(500.0))  # 2 ms on average
            case = rng.choice(cases)
            handle = engine.submit(case[0], case[1])
            if is_cancelled := rng.random() < 0.1:
                handle.cancel()
            submitted.append((handle, case[2], is_cancelled))
        results = [handle.result(PATIENCE) for handle, _, _ in submitted]
    num_cancelled = 0
    for result, (_, alone, is_cancelled) in zip(results, submitted, strict=True):
        if result.finish_reason == "cancelled":
            assert is_cancelled
            num_cancelled += 1
            assert alone.token_ids[: len(result.token_ids)] == result.token_ids
            assert alone.text.startswith(result.text)
        else:
            assert result.token_ids == alone.token_ids
            assert result.text == alone.text
    assert num_cancelled > 10


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_10_000_requests_leave_nothing_behind(
    tiny_checkpoint: Callable[..., Checkpoint], dtype: torch.dtype
) -> None:
    """Neither Python's objects nor the memory of the process grow, in any kind of decoding."""
    checkpoint = tiny_checkpoint("llama")
    checkpoint.model.to(dtype)
    few = DecodingOptions(max_new_tokens=2, ignore_eos=True)
    kinds = [
        replace(few, temperature=1.0),
        replace(few, mode="ar", logprobs=2, frequency_penalty=0.5),
        replace(few, mode="threshold", threshold=0.5),
        DecodingOptions(max_new_tokens=8, stop=("zq",)),
    ]
    process = psutil.Process()
    counts, slots, resident = [], [], []
    with Engine(checkpoint, max_rows=16) as engine:
        for _ in range(20):
            handles = []
            for number in range(500):
                prompt = [4 + number % 250] * (1 + number % 9)
                handles.append(engine.submit(prompt, kinds[number % 4]))
                if number % 50 == 0:
                    handles[-1].cancel()
            for handle in handles:
                handle.result(PATIENCE)
            del handle, handles
            gc.collect()
            counts.append(len(gc.get_objects()))
            slots.append(engine._scheduler._runner.cache.num_slots)
            resident.append(process.memory_info().rss)
    assert len(set(slots)) == 1
    # The first 2,000 fill caches and pools. Then 8,000 requests may take 250 bytes each.
    assert counts[-1] - counts[3] < 100, counts
    assert resident[-1] - resident[3] < 2_000_000, resident
