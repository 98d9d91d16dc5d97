"""The objective of the gated adapter: drafts that the model itself will accept.

Loss of the mask at offset j of a block: KL(clean stream || mask) at the same target, times a
weight. The base is frozen, so clean outputs are constants and only the masks' hidden states get a
gradient. It is computed along with the loss, chunk by chunk: logits exist once, never all of them.

Shapes: N blocks, J offsets (1..block size), D width, V vocabulary; U clean outputs.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mars.errors import UserError

Weighting = Literal["uniform", "decay", "accept"]
CHUNK_TOKENS = 512
# A floor under acceptance: else an untrained adapter gives all weight to the first offset.
_LEAST_ACCEPTANCE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftObjective:
    """How the offsets of a block are weighted."""

    weighting: Weighting = "accept"
    """`uniform`; `decay`: exp(-(j-1)/gamma); `accept`: how much acceptance at offset j adds to the
    expected number of accepted drafts, as things stand (after D-PACE, arXiv 2605.18810)."""
    gamma: float = 4.0
    """Of `decay`."""

    def __post_init__(self) -> None:
        if self.weighting not in ("uniform", "decay", "accept"):
            raise UserError(f"weighting must be uniform, decay or accept, got {self.weighting!r}.")
        if not (math.isfinite(self.gamma) and self.gamma > 0):
            raise UserError(f"gamma must be a positive number, got {self.gamma}.")

    def weights(self, probability_NJ: Tensor, is_real_NJ: Tensor) -> Tensor:
        """Return the weight of each mask, float32 (N, J), 0 where there is none.

        Args:
            probability_NJ: the mask's probability of the token the clean stream would choose.
            is_real_NJ: bool; blocks at the end of an answer are shorter than J.
        """
        if self.weighting == "uniform":
            return is_real_NJ.float()
        offset_J = torch.arange(probability_NJ.shape[1], device=probability_NJ.device)
        if self.weighting == "decay":
            return torch.exp(-offset_J / self.gamma) * is_real_NJ
        # E[accepted] = sum_k prod_{i<=k} a_i, so a_j dE/da_j = sum_{k>=j} prod_{i<=k} a_i.
        accepted = _LEAST_ACCEPTANCE + (1 - _LEAST_ACCEPTANCE) * probability_NJ
        survival_NJ = (accepted * is_real_NJ).cumprod(dim=1)
        return survival_NJ.flip(1).cumsum(dim=1).flip(1)


@dataclass(frozen=True, slots=True)
class DraftSums:
    """Sums over the masks of a batch; index j of the vectors is offset j + 1."""

    loss: Tensor
    """Scalar float32: weighted KL divergences, differentiable with respect to `hidden_NJD`."""
    divergence: Tensor
    """(J,) float32: summed KL divergence."""
    correct: Tensor
    """(J,) float32: how often the mask's most likely token was the clean stream's."""
    accepted: Tensor
    """(J,) float32: how often that held at this and all earlier offsets of the block."""
    count: Tensor
    """(J,) float32: number of masks."""
    candidates: Tensor
    """(N, J, C) int64: the most likely tokens of each mask, best first."""
    teacher_log: Tensor
    """(N, J, C) float32: what the clean stream gives them, log-probabilities."""
    choice: Tensor
    """(N, J) int64: the clean stream's most likely token."""

    @property
    def statistics(self) -> Tensor:
        """The vectors as rows, (4, J), without gradient."""
        return torch.stack([self.divergence, self.correct, self.accepted, self.count]).detach()


def draft_loss(
    hidden_NJD: Tensor,
    is_real_NJ: Tensor,
    clean_UD: Tensor,
    source_NJ: Tensor,
    head_VD: Tensor,
    objective: DraftObjective,
    *,
    num_candidates: int = 1,
    chunk_tokens: int = CHUNK_TOKENS,
) -> DraftSums:
    """Sum the objective over all masks.

    Args:
        hidden_NJD: last hidden states of the masks.
        is_real_NJ: bool, False where a block is shorter.
        clean_UD: last hidden states of the clean stream, no gradient.
        source_NJ: int64 into `clean_UD`: the output that predicts the same token.
        head_VD: frozen weight of the output layer.
        objective: weights of the offsets.
        num_candidates: C, for `head_loss`.
        chunk_tokens: masks whose logits exist at the same time, about.
    """
    blocks = max(1, chunk_tokens // hidden_NJD.shape[1])

    def chunks(hidden: Tensor) -> Iterator[tuple[Tensor, ...]]:
        parts = (hidden, is_real_NJ, source_NJ)
        for part, real, source in zip(*(x.split(blocks) for x in parts), strict=True):
            used, index = source.unique(return_inverse=True)
            teacher_UV = F.linear(clean_UD[used], head_VD)
            yield _chunk(part, real, teacher_UV, index, head_VD, objective, num_candidates)

    return DraftSums(*_EagerGradient.apply(hidden_NJD, chunks))


def head_loss(
    hidden_NJD: Tensor,
    is_real_NJ: Tensor,
    previous_NJ: Tensor,
    sums: DraftSums,
    draft_head: Callable[[Tensor, Tensor], Tensor],
    embedding_VD: Tensor,
    head_VD: Tensor,
    objective: DraftObjective,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> DraftSums:
    """Add the loss of the sequential head, over each mask's candidates only, as it decodes.

    Args:
        hidden_NJD: last hidden states of the masks.
        is_real_NJ: bool.
        previous_NJ: int64, the token before the one that the mask predicts.
        sums: of `draft_loss`, with candidates.
        draft_head: corrects hidden states with the embeddings of previous tokens.
        embedding_VD: frozen input embeddings.
        head_VD: frozen weight of the output layer.
        objective: weights of the offsets.
        chunk_tokens: masks whose candidates' output weights exist at the same time, about.

    Returns:
        `sums` with the loss added, and `correct` and `accepted` as the head decides.
    """
    blocks = max(1, chunk_tokens // hidden_NJD.shape[1])
    loss, correct, accepted = sums.loss, 0 * sums.correct, 0 * sums.accepted
    parts = (hidden_NJD, is_real_NJ, previous_NJ, sums.candidates, sums.teacher_log, sums.choice)
    for hidden, real, previous, candidates, teacher_log, choice in zip(
        *(part.split(blocks) for part in parts), strict=True
    ):
        corrected = draft_head(hidden, embedding_VD[previous])
        logits = (head_VD[candidates] @ corrected[..., None].to(head_VD.dtype))[..., 0].float()
        student_log = logits.log_softmax(-1)
        teacher_log = teacher_log.log_softmax(-1)
        divergence = F.kl_div(student_log, teacher_log, reduction="none", log_target=True).sum(-1)
        is_choice = candidates == choice[..., None]
        probability = (student_log.detach().exp() * is_choice).sum(-1)
        loss = loss + (objective.weights(probability, real) * divergence).sum()
        hits = is_choice.gather(-1, student_log.argmax(-1, keepdim=True))[..., 0] & real
        correct = correct + hits.float().sum(0)
        accepted = accepted + hits.float().cumprod(1).sum(0)
    return replace(sums, loss=loss, correct=correct, accepted=accepted)


class _EagerGradient(torch.autograd.Function):
    """The loss, with its gradient computed in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NJD: Tensor, chunks: Callable[[Tensor], Iterator[tuple[Tensor, ...]]]
    ) -> tuple[Tensor, ...]:
        losses, statistics, gradients, *details = zip(*chunks(hidden_NJD), strict=True)
        ctx.save_for_backward(torch.cat(gradients))
        constants = [*torch.stack(statistics).sum(0), *(torch.cat(column) for column in details)]
        ctx.mark_non_differentiable(*constants)
        return torch.stack(losses).sum(), *constants

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None


def _chunk(
    hidden_NJD: Tensor,
    is_real_NJ: Tensor,
    teacher_UV: Tensor,
    index_NJ: Tensor,
    head_VD: Tensor,
    objective: DraftObjective,
    num_candidates: int,
) -> tuple[Tensor, ...]:
    """Return loss, statistics (4, J), gradient, candidates, their teacher's values and choices."""
    shape, index = is_real_NJ.shape, index_NJ.reshape(-1)
    teacher_log = teacher_UV.float().log_softmax(-1)
    teacher = teacher_log.exp()
    negative_entropy = torch.linalg.vecdot(teacher, teacher_log)[index]
    choice = teacher_log.argmax(-1)[index]
    # In place from here on: these are the largest tensors of a training step.
    student = F.linear(hidden_NJD.flatten(0, 1), head_VD).float()
    candidates = student.topk(num_candidates, dim=-1).indices
    is_correct = candidates[:, 0] == choice
    candidates_log = teacher_log[index[:, None], candidates]
    student.sub_(student.logsumexp(-1, keepdim=True))
    targets = teacher[index]
    divergence = negative_entropy - torch.linalg.vecdot(targets, student)
    student.exp_()
    probability = student.gather(-1, choice[:, None])[:, 0]
    weight_NJ = objective.weights(probability.view(shape), is_real_NJ)
    logits_gradient = student.sub_(targets).mul_(weight_NJ.view(-1, 1))
    gradient = F.linear(logits_gradient.to(head_VD.dtype), head_VD.T).view_as(hidden_NJD)
    loss = (weight_NJ.view(-1) * divergence).sum()
    real, correct = is_real_NJ.float(), is_correct.view(shape) & is_real_NJ
    stats = (divergence.view(shape) * real, correct.float(), correct.float().cumprod(1), real)
    details = (candidates.view(*shape, -1), candidates_log.view(*shape, -1), choice.view(shape))
    return loss, torch.stack([values.sum(0) for values in stats]), gradient, *details
