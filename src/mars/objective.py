"""The training objective: L = sum_j w_j * L_masked,j + lambda * L_clean (design, section 4).

Sums over supervised outputs, in float32, computed in chunks, so that logits for all positions
never exist at once. The caller divides by the global number of supervised tokens.

Shapes: N outputs with a target, D width, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mars.errors import UserError
from mars.streams import IGNORE, Streams

Head = Callable[[Tensor], Tensor]
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Which losses count, and how much."""

    masked_loss: Literal["ce", "distill"] = "ce"
    """`ce`: cross-entropy against the data (the paper, eq. 5). `distill`: KL divergence to the
    clean stream's (detached) distribution for the same token."""
    masked_weight: float = 1.0
    """Weight of the masked stream; 0 is plain AR training."""
    clean_weight: float = 1.0
    """Weight of the clean stream's next-token loss (lambda; the paper has 1, its ablation 0)."""
    offset_decay: float | None = None
    """gamma: offset j weighs exp(-(j-1)/gamma); None weighs all offsets alike (the paper)."""

    def __post_init__(self) -> None:
        if self.masked_loss not in ("ce", "distill"):
            raise UserError(f"masked_loss must be 'ce' or 'distill', got {self.masked_loss!r}.")
        for name in ("masked_weight", "clean_weight", "offset_decay"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise UserError(f"{name} must be a finite number, got {value}.")
        if min(self.masked_weight, self.clean_weight) < 0 or (
            self.masked_weight == self.clean_weight == 0
        ):
            raise UserError(
                "masked_weight and clean_weight must not be negative, and not both 0; got "
                f"{self.masked_weight} and {self.clean_weight}."
            )
        if self.offset_decay is not None and self.offset_decay <= 0:
            raise UserError(f"offset_decay must be positive, got {self.offset_decay}.")

    def weight(self, offset: Tensor) -> Tensor:
        """Weight of each output by its offset (0: clean), float32, same shape."""
        masked = torch.full_like(offset, self.masked_weight, dtype=torch.float32)
        if self.offset_decay is not None:
            masked = masked * torch.exp(-(offset - 1) / self.offset_decay)
        return torch.where(offset == 0, self.clean_weight, masked)


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the outputs of a batch; in the vectors, index j is the offset (0: clean)."""

    loss: Tensor
    """Scalar float32, differentiable: the weighted sum of all terms."""
    nll: Tensor
    """[1 + block_size] float32: summed -log p(token)."""
    correct: Tensor
    """[1 + block_size] float32: how often the token had the highest probability."""
    count: Tensor
    """[1 + block_size] float32: number of outputs."""

    @property
    def statistics(self) -> Tensor:
        """The vectors as rows, [3, 1 + block_size], without gradient."""
        return torch.stack([self.nll, self.correct, self.count]).detach()


def stream_loss(
    hidden: Tensor,
    streams: Streams,
    head: Head,
    objective: Objective,
    *,
    block_size: int,
    chunk_tokens: int = CHUNK_TOKENS,
) -> LossSums:
    """Sum the objective over all supervised outputs.

    Args:
        hidden: [B, S, D] last hidden states of the rows in `streams`.
        head: maps [n, D] to logits [n, V]. Outputs whose weight is 0 never reach it.
        block_size: largest offset.
        chunk_tokens: outputs whose logits exist at the same time.
    """
    weight = objective.weight(streams.offset)
    counted = (streams.target != IGNORE) & (weight > 0)
    distilled = counted & (streams.offset > 0) & (objective.masked_loss == "distill")
    loss = hidden[:, :1].float().sum() * 0  # differentiable even when nothing is supervised
    stats = torch.zeros(3, 1 + block_size, device=hidden.device)
    for selected, has_teacher in ((counted & ~distilled, False), (distilled, True)):
        for r, p, is_real in _chunks(selected, chunk_tokens):
            teacher = hidden[r, streams.source[r, p]].detach() if has_teacher else None
            inputs = (hidden[r, p], streams.target[r, p], teacher, head)
            losses, nll, correct = checkpoint(output_losses, *inputs, use_reentrant=False)
            loss = loss + (weight[r, p] * is_real * losses).sum()
            rows = torch.stack([nll, correct, torch.ones_like(nll)]) * is_real
            stats.index_add_(1, streams.offset[r, p], rows)
    return LossSums(loss, *stats)


def _chunks(selected: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the (row, place) of the selected outputs, and 1.0, in chunks of `size`.

    The last chunk is filled up to a quarter of `size` with copies of one output, marked 0.0: a CPU
    process keeps memory for every shape of a product it has ever computed.
    """
    row, place = torch.nonzero(selected, as_tuple=True)
    quarter = max(1, size // 4)
    num_fill = -len(row) % quarter if len(row) else 0
    fill = torch.zeros(num_fill, dtype=torch.long, device=row.device)
    index = torch.cat([torch.arange(len(row), device=row.device), fill])
    is_real = torch.ones(len(index), device=row.device)
    is_real[len(row) :] = 0
    for chunk, real in zip(index.split(size), is_real.split(size), strict=True):
        yield row[chunk], place[chunk], real


def output_losses(
    hidden: Tensor, target: Tensor, teacher: Tensor | None, head: Head
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss of each output, its -log p(target) and whether target is the top token.

    Args:
        hidden: [n, D]; teacher: [n, D] hidden states of the clean stream, or None.
        target: [n] token ids.

    Returns:
        Three float32 tensors [n]: KL(teacher || output), or cross-entropy without a teacher
        (differentiable); the cross-entropy; 1.0 or 0.0.
    """
    log_probs = F.log_softmax(head(hidden).float(), dim=-1)
    nll = F.nll_loss(log_probs, target, reduction="none")
    correct = (log_probs.argmax(-1) == target).float()
    if teacher is None:
        return nll, nll.detach(), correct
    with torch.no_grad():
        teacher_log_probs = F.log_softmax(head(teacher).float(), dim=-1)
    divergence = F.kl_div(log_probs, teacher_log_probs, reduction="none", log_target=True).sum(-1)
    return divergence, nll.detach(), correct
