"""Ways of decoding a batch of prompts, with the time of every token.

What is measured, for all ways alike: the clock starts when a batch, as lists of token ids, is
handed over, and a request's tokens count as said when the caller learns of them. Reading the
prompts is included. So is turning tokens into text, as they come, for our own ways; the others
return ids.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from llama_client import LlamaProcess
from transformers import StoppingCriteria, StoppingCriteriaList
from ways import cut_at_end

from mars import load
from mars.baselines.block_cache import decode_block_cache, prepare_block_cache
from mars.checkpoint import Checkpoint
from mars.decoding.generate import prepare, run
from mars.decoding.options import DecodingOptions
from mars.decoding.row import Event

OURS: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "exact": {"mode": "exact"},
    "threshold": {"mode": "threshold", "threshold": 0.9},
}
BLOCK_CACHE = "block-cache"  # blocks of the trained size; block-cache-16: of 16 tokens
EARLY_EXIT = "transformers-early-exit"
STOCK: dict[str, dict[str, Any]] = {
    "transformers": {},
    # On a CPU generate does not compile this one, as it does on a GPU (transformers 5.24).
    "transformers-static": {"cache_implementation": "static"},
    "transformers-lookup": {"prompt_lookup_num_tokens": 8},
    # Assisted decoding without a smaller model (none with the default model's tokenizer ships in a
    # package): the first layers draft. The model was not trained for that, and hardly any draft is
    # right, with 1, 2 or 6 layers; few layers cost least.
    EARLY_EXIT: {"assistant_early_exit": 2},
}
LLAMA = "llama.cpp"
ONLY_ALONE = ("transformers-lookup", EARLY_EXIT, LLAMA)  # batch size 1
WAYS = (*OURS, BLOCK_CACHE, *STOCK, LLAMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was said to a prompt, and when, in seconds since its batch was handed over."""

    token_ids: list[int]
    """Up to the end token, included."""
    first_s: float
    """First token, or tokens."""
    last_s: float
    forwards: int | None = None
    """Of this request; None if the way does not tell."""


Run = Callable[[Sequence[list[int]], int], list[Answer]]
"""(prompts of a batch, most new tokens) -> answers."""


class Workbench:
    """The models, loaded when they are first needed, and the ways that use them."""

    def __init__(
        self,
        *,
        model: str | None,
        adapter: str,
        dtype: str,
        gguf: Path | None = None,
        llama_python: str = sys.executable,
        context: int = 0,
    ) -> None:
        """Take names of models; `context` is what llama.cpp makes room for, in tokens."""
        self.context = context
        self._names = {"name": model, "dtype": dtype}
        self._adapter = adapter
        self._gguf, self._llama_python = gguf, llama_python

    @cached_property
    def ours(self) -> Checkpoint:
        """The model with its adapter."""
        return load(adapter=self._adapter, **self._names)

    @cached_property
    def stock(self) -> Checkpoint:
        """The same model as `transformers` loads it: no hooks, no packed weights."""
        return load(adapter=None, **self._names)

    @cached_property
    def llama(self) -> LlamaProcess:
        """The program llama.cpp in its own interpreter; its `context` is the one of now."""
        if self._gguf is None:
            raise SystemExit(f"The way {LLAMA} needs --gguf FILE.")
        return LlamaProcess(
            self._gguf,
            python=self._llama_python,
            threads=torch.get_num_threads(),
            context=self.context,
        )

    def way(self, name: str, **options: Any) -> Run:
        """Return a way by its name; `options` of decoding are for our own."""
        if name in OURS:
            return _ours(self.ours, DecodingOptions(**OURS[name], **options))
        if name in STOCK:
            return _stock(self.stock, **STOCK[name])
        if name == LLAMA:
            return self._run_llama
        size = name.removeprefix(BLOCK_CACHE).removeprefix("-")
        return _block_cache(self.ours, int(size) if size else None)

    def weight_bytes(self, name: str) -> int:
        """Return what the weights of a way take, each tensor once."""
        if name == LLAMA:
            return self._gguf.stat().st_size if self._gguf else 0
        checkpoint = self.stock if name in STOCK else self.ours
        adapter = [] if checkpoint.adapter is None else [*checkpoint.adapter.parameters()]
        tensors = [*checkpoint.model.parameters(), *adapter]
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def _run_llama(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Answer]:
        answers = []
        for prompt in prompts:
            ids, times = self.llama.generate(prompt, max_new_tokens, self.stock.eos_token_ids)
            answers.append(Answer(token_ids=ids, first_s=times[0], last_s=times[-1]))
        return answers


def is_way(name: str) -> bool:
    """Whether `Workbench.way` knows the name."""
    size = name.removeprefix(f"{BLOCK_CACHE}-")
    return name in WAYS or (size != name and size.isdecimal() and int(size) > 0)


def _ours(checkpoint: Checkpoint, options: DecodingOptions) -> Run:
    """`generate`; every request has a seed of its own."""

    def decode(prompts: Sequence[list[int]], max_new_tokens: int) -> list[Answer]:
        started = time.perf_counter()
        requests = [
            prepare(checkpoint, p, replace(options, max_new_tokens=max_new_tokens, seed=seed))
            for seed, p in enumerate(prompts)
        ]
        return _timed(run(checkpoint, requests, batch_size=len(requests)), started)

    return decode


def _block_cache(checkpoint: Checkpoint, block_size: int | None) -> Run:
    """The paper's batches, with the threshold of ours."""
    threshold = OURS["threshold"]["threshold"]
    trained = checkpoint.mars.block_size if checkpoint.mars else 1
    size = trained if block_size is None else block_size

    def decode(prompts: Sequence[list[int]], max_new_tokens: int) -> list[Answer]:
        started = time.perf_counter()
        requests = [
            prepare_block_cache(
                *(checkpoint, prompt),
                threshold=threshold,
                block_size=size,
                max_new_tokens=max_new_tokens,
            )
            for prompt in prompts
        ]
        events = decode_block_cache(
            checkpoint.model,
            requests,
            block_size=size,
            mask_token_id=None if checkpoint.mars is None else checkpoint.mars.mask_token_id,
            batch_size=len(requests),
        )
        return _timed(events, started)

    return decode


def _timed(events: Iterable[Event], started: float) -> list[Answer]:
    """Note when the events come."""
    first: dict[int, float] = {}
    answers: dict[int, Answer] = {}
    for event in events:
        now = time.perf_counter() - started
        first.setdefault(event.index, now)
        if event.result is not None:
            answers[event.index] = Answer(
                token_ids=event.result.token_ids,
                first_s=first[event.index],
                last_s=now,
                forwards=event.result.forwards,
            )
    return [answers[index] for index in sorted(answers)]


class _StepClock(StoppingCriteria):
    """Never stops; notes when the rows had which length."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def time_of(self, length: int) -> float:
        """Return when the rows had at least this length."""
        pairs = zip(self.times, self.lengths, strict=True)
        return next(t for t, reached in pairs if reached >= length)


def _stock(checkpoint: Checkpoint, **options: Any) -> Run:
    """Greedy `generate` of `transformers`, prompts padded on the left."""
    end_ids = checkpoint.eos_token_ids
    pad = checkpoint.tokenizer.pad_token_id
    settings = {
        "do_sample": False,
        "eos_token_id": sorted(end_ids),
        "pad_token_id": min(end_ids) if pad is None else pad,
    } | options

    @torch.no_grad()
    def decode(prompts: Sequence[list[int]], max_new_tokens: int) -> list[Answer]:
        started, clock = time.perf_counter(), _StepClock()
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        output = checkpoint.model.generate(
            torch.tensor([[0] * n + p for n, p in zip(padding, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding]),
            max_new_tokens=max_new_tokens,
            stopping_criteria=StoppingCriteriaList([clock]),
            **settings,
        )
        answers = []
        for row in output[:, longest:].tolist():
            ids = cut_at_end(row, end_ids)
            first, last = (clock.time_of(longest + n) - started for n in (1, len(ids)))
            answers.append(Answer(token_ids=ids, first_s=first, last_s=last))
        return answers

    return decode
