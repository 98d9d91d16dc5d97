"""The Trainer of the gated adapter: only the step and what is saved differ."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from mars.training.gated import GatedModel, random_anchors
from mars.training.trainer import MarsTrainer


class GatedTrainer(MarsTrainer):
    """Train a `GatedModel`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sums = torch.zeros(4, self.block_size, device=self.args.device)

    def run_model(self, model: nn.Module, inputs: dict[str, Tensor]) -> Any:
        """Return `loss` and `statistics` of the masks of a micro-batch, both as sums."""
        args: Any = self.args
        anchors = random_anchors(
            inputs,
            block_size=self.block_size,
            num_anchors=args.anchors,
            seed=args.seed,
            step=self.state.global_step,
        )
        return model(inputs, anchors, args.draft_objective)

    def describe_sums(self, sums: Tensor) -> dict[str, float]:
        """Name the statistics of the masks since the last log."""
        return describe_drafts(*sums)

    def save_final(self, folder: Path, base: PreTrainedModel) -> None:
        """Write the adapter; the base is as it was."""
        model = self.accelerator.unwrap_model(self.model)
        assert isinstance(model, GatedModel)
        if self.is_world_process_zero():
            model.adapter.save(folder)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        Trainer._save(self, output_dir, state_dict)  # of the trained parameters alone


def describe_drafts(
    divergence: Tensor, correct: Tensor, accepted: Tensor, count: Tensor
) -> dict[str, float]:
    """Name mean KL divergence and accuracy of each offset, and tokens per forward.

    `tokens_per_forward` is 1 + the mean number of drafts that would be accepted, over all places:
    what the full quadratic layout reaches.
    """
    described = {}
    for offset, (d, c, k) in enumerate(
        zip(divergence.tolist(), correct.tolist(), count.tolist(), strict=True), start=1
    ):
        if k > 0:
            described[f"mask{offset}_divergence"] = d / k
            described[f"mask{offset}_accuracy"] = c / k
    if count[0] > 0:
        described["tokens_per_forward"] = 1 + float(accepted.sum()) / float(count[0])
    return described
