"""Checkpoints shared by the decoding tests, and a way to compare results."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from mars.checkpoint import Checkpoint, attach
from mars.decoding.generate import prepare
from mars.decoding.options import DecodingOptions
from mars.decoding.reference import reference
from mars.decoding.request import Result
from mars.gated import GatedAdapter, GatedConfig, mask_columns

TIMES = ("prefill_seconds", "decode_seconds", "seconds")


@pytest.fixture(scope="session")
def llama(tiny_checkpoint: Callable[..., Checkpoint]) -> Checkpoint:
    return tiny_checkpoint("llama")


@pytest.fixture(scope="session")
def drafter(tiny_checkpoint: Callable[..., Checkpoint]) -> Checkpoint:
    """A model trained for seconds on `walks`: its masks are right now and then, at every offset."""
    checkpoint = tiny_checkpoint("llama", initializer_range=0.1)
    model, window = checkpoint.model, 4
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(300):
        length = int(torch.randint(4, 24, (), generator=generator))
        tokens = walks(32, length + window + 1, generator)
        input_ids = tokens[:, :-1].clone()
        input_ids[:, length:] = 3
        logits = model(input_ids, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.requires_grad_(False)
    return checkpoint


@pytest.fixture(scope="session")
def gated_drafter(drafter: Checkpoint) -> Checkpoint:
    """The same with a gated adapter, trained for seconds, in place of a mask token."""
    return with_adapter(drafter, head_width=0)


@pytest.fixture(scope="session")
def headed_drafter(drafter: Checkpoint) -> Checkpoint:
    """With a draft head as well: every draft knows the one before."""
    return with_adapter(drafter, head_width=16)


def with_adapter(drafter: Checkpoint, *, head_width: int) -> Checkpoint:
    model, window = deepcopy(drafter.model), 4
    torch.manual_seed(0)
    config = GatedConfig(
        base=None,
        fingerprint="",
        block_size=window,
        rank=8,
        targets=("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"),
        mask_embeddings=window,
        head_width=head_width,
    )
    adapter = GatedAdapter(model, config)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    offset_BM = torch.arange(window).expand(32, window)
    for _ in range(150):
        length = int(torch.randint(4, 24, (), generator=generator))
        tokens = walks(32, length + window + 1, generator)
        with mask_columns(model, length, offset_BM):
            hidden = model.model(tokens[:, :-1], use_cache=False).last_hidden_state[:, length:]
        logits = model.lm_head(hidden)
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, length + 1 :].flatten())
        if adapter.head is not None:
            corrected = adapter.head(hidden, model.model.embed_tokens(tokens[:, length:-1]))
            logits = model.lm_head(corrected)
            loss = loss + cross_entropy(logits.flatten(0, 1), tokens[:, length + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    adapter.requires_grad_(False)
    checkpoint = Checkpoint(model=model, tokenizer=drafter.tokenizer, name="gated")
    attach(checkpoint, adapter)
    return checkpoint


def walks(num_rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Go around a circle of 32 tokens, by 1 mostly, else by 7: some of it can be foreseen."""
    is_short = torch.rand(num_rows, length, generator=generator) < 0.85
    start = torch.randint(0, 32, (num_rows, 1), generator=generator)
    return 40 + (start + torch.where(is_short, 1, 7).cumsum(1)) % 32


def without_times(result: Result) -> dict[str, Any]:
    return {name: value for name, value in asdict(result).items() if name not in TIMES}


def reference_result(
    checkpoint: Checkpoint, prompt: Any, options: DecodingOptions, *, raw: bool = False
) -> dict[str, Any]:
    mask_token_id = checkpoint.mars.mask_token_id if checkpoint.mars else None
    request = prepare(checkpoint, prompt, options, raw=raw)
    return without_times(reference(checkpoint.model, request, mask_token_id=mask_token_id))
