"""Training of the gated adapter: one clean pass without gradient feeds many mask blocks.

The base is frozen and its clean outputs do not depend on the adapter. So a step runs the clean
rows once, keeps their keys and values, and then runs only masks: blocks that start at random
places (anchors) of the answers, each the decoding step with the tokens before it as prefix.

Shapes: R rows, L clean tokens, N anchors a row, J masks a block, M = N * J.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars.compat import ExternalCache, attention_implementation, hidden_states
from mars.counter import hash64
from mars.draft_head import CANDIDATES
from mars.draft_objective import DraftObjective, DraftSums, draft_loss, head_loss
from mars.engine.runner import ATTENTION
from mars.gated import GatedAdapter
from mars.mask_token import input_embedding, output_head
from mars.streams import span_starts


@dataclass(frozen=True, slots=True)
class Anchors:
    """Where blocks start, for each row."""

    start_RN: Tensor
    """int64: index of the first clean token that the block does not see; mask j (1-based) predicts
    token start + j. 0 where a row has fewer anchors."""
    is_real_RNJ: Tensor
    """bool: whether mask j exists, that is whether its target is in the same supervised span."""


def random_anchors(
    batch: dict[str, Tensor], *, block_size: int, num_anchors: int, seed: int, step: int
) -> Anchors:
    """Draw `num_anchors` places of every row's supervised spans, without replacement.

    Which ones is a hash of (seed, step, example, place): it does not depend on how examples are
    spread over batches and processes, and a resumed run draws the same.
    """
    numbers = hash64(seed, step, batch["example_ids"], batch["position_ids"])
    return choose_anchors(batch, numbers, block_size=block_size, num_anchors=num_anchors)


def choose_anchors(
    batch: dict[str, Tensor], numbers_RL: Tensor, *, block_size: int, num_anchors: int
) -> Anchors:
    """Take the places with the largest numbers (int64)."""
    first, is_supervised = span_starts(batch["labels"], batch["document_ids"])
    length = is_supervised.shape[1]
    follows = torch.zeros(*is_supervised.shape, block_size, dtype=torch.bool, device=first.device)
    for j in range(1, min(block_size, length - 1) + 1):  # token s + j is in the span of token s
        same = is_supervised[:, :-j] & is_supervised[:, j:] & (first[:, :-j] == first[:, j:])
        follows[:, : length - j, j - 1] = same
    eligible = follows[..., 0]
    lowest = torch.iinfo(torch.int64).min
    ranked = numbers_RL.masked_fill(~eligible, lowest)
    start = ranked.topk(min(num_anchors, length), dim=1).indices.sort(dim=1).values
    is_real = follows.gather(1, start[..., None].expand(-1, -1, block_size))
    return Anchors(start, is_real)


class StreamCache(ExternalCache):
    """Keeps the clean stream's keys and values, then lets masks attend to both."""

    def __init__(self) -> None:
        super().__init__()
        self.clean: list[tuple[Tensor, Tensor]] = []
        self.is_complete = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store (clean pass) or put the clean stream in front (masks)."""
        if not self.is_complete:
            self.clean.append((key_states, value_states))
            return key_states, value_states
        keys, values = self.clean[layer_idx]
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)


class GatedModel(nn.Module):
    """What the Trainer trains: the adapter's parameters, with the forward that needs the base.

    The base is no submodule: its weights are neither saved, nor averaged, nor wrapped.
    """

    def __init__(self, adapter: GatedAdapter, base: PreTrainedModel) -> None:
        super().__init__()
        self.adapter = adapter
        self.__dict__["base"] = base

    def forward(
        self, batch: dict[str, Tensor], anchors: Anchors, objective: DraftObjective
    ) -> DraftSums:
        """Run both streams and sum the losses; differentiable in the adapter."""
        base: PreTrainedModel = self.__dict__["base"]
        return run_gated(base, self.adapter, batch, anchors, objective)


def run_gated(
    model: PreTrainedModel,
    adapter: GatedAdapter,
    batch: dict[str, Tensor],
    anchors: Anchors,
    objective: DraftObjective,
) -> DraftSums:
    """Run a collated batch ([R, L] tensors) and the masks of its anchors."""
    cache = StreamCache()
    position_RL, document_RL = batch["position_ids"], batch["document_ids"]
    rows, num_anchors, block_size = anchors.is_real_RNJ.shape
    with attention_implementation(model, ATTENTION):
        with torch.no_grad():
            clean_RLD = hidden_states(
                model,
                input_ids=batch["input_ids"],
                position_ids=position_RL,
                visible=_clean_visible(document_RL),
                cache=cache,
            )
        cache.is_complete = True
        offset_J = torch.arange(block_size, device=position_RL.device)
        position_RNJ = position_RL.gather(1, anchors.start_RN)[..., None] + offset_J
        with adapter.columns(0, offset_J.repeat(num_anchors).expand(rows, -1)):
            hidden_RMD = hidden_states(
                model,
                input_ids=torch.zeros_like(position_RNJ.flatten(1)),
                position_ids=position_RNJ.flatten(1),
                visible=_mask_visible(document_RL, anchors),
                cache=cache,
            )
    # The clean output at index t - 1 predicts token t = start + j (j = 1 .. J).
    length = position_RL.shape[1]
    source_RNJ = (anchors.start_RN[..., None] + offset_J).clamp(max=length - 1)
    source_RNJ = source_RNJ + torch.arange(rows, device=source_RNJ.device)[:, None, None] * length
    hidden_NJD = hidden_RMD.unflatten(1, (num_anchors, block_size)).flatten(0, 1)
    is_real_NJ, source_NJ = anchors.is_real_RNJ.flatten(0, 1), source_RNJ.flatten(0, 1)
    head: Any = output_head(model)
    sums = draft_loss(
        *(hidden_NJD, is_real_NJ, clean_RLD.flatten(0, 1), source_NJ, head.weight.detach()),
        objective,
        num_candidates=CANDIDATES if adapter.head is not None else 1,
    )
    if adapter.head is None:
        return sums
    # Mask j predicts token start + j, so the token before it is the one at start + j - 1.
    previous_NJ = batch["input_ids"].flatten()[source_NJ]
    embedding = input_embedding(model).weight.detach()
    return head_loss(
        *(hidden_NJD, is_real_NJ, previous_NJ, sums, adapter.head, embedding),
        *(head.weight.detach(), objective),
    )


def _clean_visible(document_RL: Tensor) -> Tensor:
    """Causal attention within documents: bool (R, 1, L, L)."""
    length = document_RL.shape[1]
    same = document_RL[:, :, None] == document_RL[:, None, :]
    return (same & same.new_ones(length, length).tril())[:, None]


def _mask_visible(document_RL: Tensor, anchors: Anchors) -> Tensor:
    """The prefix of the block, and its earlier masks: bool (R, 1, M, L + M)."""
    rows, num_anchors, block_size = anchors.is_real_RNJ.shape
    index_L = torch.arange(document_RL.shape[1], device=document_RL.device)
    document_RN = document_RL.gather(1, anchors.start_RN)
    prefix_RNL = (index_L < anchors.start_RN[..., None]) & (
        document_RL[:, None, :] == document_RN[..., None]
    )
    block = torch.ones(block_size, block_size, dtype=torch.bool, device=index_L.device).tril()
    own_MM = torch.block_diag(*[block] * num_anchors).bool()
    prefix_RML = prefix_RNL.repeat_interleave(block_size, dim=1)
    return torch.cat([prefix_RML, own_MM.expand(rows, -1, -1)], dim=2)[:, None]
