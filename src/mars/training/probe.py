"""What training does to a fixed set of held-out examples: clean NLL, offset accuracy, TPF."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback

from mars.checkpoint import Checkpoint
from mars.data import Collator, Example
from mars.decoding.generate import generate
from mars.decoding.options import DecodingOptions
from mars.draft_objective import DraftObjective
from mars.objective import Objective
from mars.training.forward import run_streams
from mars.training.gated import random_anchors, run_gated
from mars.training.gated_trainer import describe_drafts
from mars.training.trainer import describe_sums, make_streams

THRESHOLD = 0.9
MAX_NEW_TOKENS = 64
MOST_PHASES = 16


@dataclass(frozen=True, slots=True)
class _FixedExamples:
    """What is measured, and how."""

    checkpoint: Checkpoint
    examples: Sequence[Example]
    collate: Collator
    block_size: int
    autocast: Callable[[], AbstractContextManager]
    """The precision of training: measuring in float32 takes several times as long."""

    def batches(self, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
        """Collate the examples, one a row, and bring them to the model's device."""
        device = self.checkpoint.model.device
        for first in range(0, len(self.examples), batch_size):
            batch = self.collate([[e] for e in self.examples[first : first + batch_size]])
            yield {name: tensor.to(device) for name, tensor in batch.items()}


@dataclass(frozen=True, slots=True)
class Probe(_FixedExamples):
    """Measures a checkpoint on fixed examples; every measurement sees the same blocks."""

    @torch.no_grad()
    def measure(self, *, batch_size: int = 8) -> dict[str, float]:
        """Return `measure_likelihood` and, for a model with masks, TPF at tau 0.9."""
        measured = self.measure_likelihood(batch_size=batch_size)
        if self.block_size:
            measured["tokens_per_forward"] = self._tokens_per_forward(batch_size)
        return measured

    @torch.no_grad()
    def measure_likelihood(self, *, batch_size: int = 8) -> dict[str, float]:
        """Return `clean_nll`, `clean_accuracy`, and the same per mask offset.

        The phases of the blocks are averaged: up to B = 16 all of them, so every token is predicted
        from every offset; for larger B 16 evenly spread ones, so the cost stays bounded.
        """
        num_phases = min(max(1, self.block_size), MOST_PHASES)
        sums = torch.zeros(3, 1 + self.block_size)
        for batch in self.batches(batch_size):
            for i in range(num_phases):
                sums += self._sums(batch, i * self.block_size // num_phases)
        return describe_sums(*sums)

    def _sums(self, batch: dict[str, torch.Tensor], phase: int) -> torch.Tensor:
        streams = make_streams(
            batch,
            torch.full_like(batch["labels"], phase),
            block_size=self.block_size,
            mask_token_id=(self.checkpoint.mask_token_id or 0) if self.block_size else 0,
        )
        model = self.checkpoint.model
        with self.autocast():
            sums = run_streams(model, streams, Objective(), block_size=self.block_size)
        return sums.statistics.cpu()

    def _tokens_per_forward(self, batch_size: int) -> float:
        prompts = [e.input_ids[: e.supervised.index(True)] for e in self.examples]
        options = DecodingOptions(
            mode="threshold", threshold=THRESHOLD, max_new_tokens=MAX_NEW_TOKENS
        )
        with self.autocast():
            results = generate(self.checkpoint, prompts, options, batch_size=batch_size)
        return sum(len(r.token_ids) for r in results) / sum(r.forwards for r in results)


@dataclass(frozen=True, slots=True)
class GatedProbe(_FixedExamples):
    """Measures a gated adapter on fixed examples, at the same places every time."""

    @torch.no_grad()
    def measure(self, *, batch_size: int = 8, num_anchors: int = 64) -> dict[str, float]:
        """Return divergence and accuracy per offset, and tokens per forward (full quadratic)."""
        adapter, model = self.checkpoint.adapter, self.checkpoint.model
        assert adapter is not None
        sums = torch.zeros(4, self.block_size)
        for batch in self.batches(batch_size):
            anchors = random_anchors(
                batch, block_size=self.block_size, num_anchors=num_anchors, seed=0, step=0
            )
            with self.autocast():
                sums += run_gated(model, adapter, batch, anchors, DraftObjective()).statistics.cpu()
        return describe_drafts(*sums)


class ProbeCallback(TrainerCallback):
    """Measure at the start, every `every` steps and at the end; log as `probe_*`."""

    def __init__(
        self, probe: Probe | GatedProbe, log: Callable[[dict[str, float]], None], every: int
    ) -> None:
        self.probe = probe
        self.log = log
        self.every = every

    def _measure(self, state: Any, control: Any) -> None:
        if not state.is_world_process_zero:
            return
        model = self.probe.checkpoint.model
        was_training = model.training
        model.eval()
        measured = self.probe.measure()
        model.train(was_training)
        should_log = control.should_log  # the log of this step is still to come; ours resets it
        self.log({f"probe_{name}": round(value, 5) for name, value in measured.items()})
        control.should_log = should_log
        tqdm.write(describe_probe(state.global_step, measured))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the untrained model."""
        if state.global_step == 0:
            self._measure(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure every so many steps, and after the last."""
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._measure(state, control)


def describe_probe(step: int, measured: dict[str, float]) -> str:
    """Format one measurement as a line for people."""
    offsets = [f"{v:.3f}" for k, v in measured.items() if k.startswith("mask") and "acc" in k]
    parts = []
    if "clean_nll" in measured:
        parts.append(f"clean NLL {measured['clean_nll']:.4f}")
    if offsets:
        parts.append(f"accuracy per offset {' '.join(offsets)}")
    if "tokens_per_forward" in measured:
        parts.append(f"TPF: {measured['tokens_per_forward']:.3f}")
    return f"step {step}: {' | '.join(parts)}"
