"""Feed committed tokens, drafts and masks to a model; keep track of what its cache holds.

Shapes: B rows of this call, C real output columns, M mask columns, V vocabulary.
"""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from mars.compat import attention_implementation, cached_forward, register_attention
from mars.decoding.plan import RowPlan, lay_out, lay_out_flat
from mars.draft_head import Correction
from mars.engine.attention import SLOTS, additive_mask, grouped_attention
from mars.engine.cache import SlotCache
from mars.engine.decoder import FusedDecoder, gather_rows
from mars.engine.kernels.linear import PackedLinears
from mars.gated import attached_adapter, correction, correction_of, mask_columns

ATTENTION = "mars"
_SLACK_SLOTS = 64
_GROWTH = 1.5

register_attention(ATTENTION, grouped_attention)


class Outputs(NamedTuple):
    """What a forward of B rows says; what pads rows is garbage."""

    real_BCV: torch.Tensor
    """Logits of the real columns, right-aligned: the last token and its drafts."""
    mask_BMV: torch.Tensor
    """Logits of the mask columns, left-aligned, group by group."""
    correction: Correction | None
    """What the model's draft head needs; None without head or masks."""


class FlatOutputs(NamedTuple):
    """The same without padding: O outputs, real ones row by row, then masks row by row."""

    logits_OV: torch.Tensor
    hidden_OD: torch.Tensor
    """Last hidden states."""
    num_real: list[int]
    """Real outputs of each row."""
    num_masks: list[int]

    def padded(self, model: PreTrainedModel) -> Outputs:
        """Turn the rows' stretches into tensors."""
        first = sum(self.num_real)
        real_BCV = gather_rows(self.logits_OV[:first], self.num_real, right=True)
        mask_BMV = gather_rows(self.logits_OV[first:], self.num_masks, right=False)
        if not mask_BMV.shape[1]:
            return Outputs(real_BCV, mask_BMV, None)
        hidden_BMD = gather_rows(self.hidden_OD[first:], self.num_masks, right=False)
        return Outputs(real_BCV, mask_BMV, correction(model, hidden_BMD))


class Runner:
    """A model and the cache of up to `num_rows` sequences, each with its own length.

    Rows are numbered 0 .. n-1 without gaps; the caller adds rows at the end and drops any.

    Attributes:
        cached: for each row, how many of its tokens the cache holds.
        cache: the only KV cache there is.
        places: where in the cache each row is; behind those, the free places.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_rows: int,
        max_positions: int,
        mask_token_id: int | None = None,
        prefill_chunk: int = 512,
    ) -> None:
        """Prepare for sequences of at most `max_positions` tokens.

        `mask_token_id` is None for models without masks, and for those whose adapter replaces the
        embedding at mask columns.
        """
        self.model = model
        self.cached: list[int] = []
        self.cache = SlotCache(num_rows, 0)
        self._max_positions = max_positions
        self._most_slots = 0  # of any row so far
        self._mask = 0 if mask_token_id is None else mask_token_id
        self._chunk = prefill_chunk
        config: Any = model.config.get_text_config()
        heads = config.num_attention_heads
        self._groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
        self._decoder = FusedDecoder.of(model, max_positions)
        self.places = list(range(num_rows))
        adapter = attached_adapter(model)
        adapters = () if adapter is None else (adapter,)
        if self._decoder is not None:
            # Whoever comes next is spared memory that nobody has touched, which costs much more.
            weakref.finalize(self, self._decoder.spare.append, self.cache)
        self._linears = nullcontext() if self._decoder else PackedLinears(model, *adapters)

    @property
    def has_padding(self) -> bool:
        """Whether a forward computes as many columns for every row as for the longest."""
        return self._decoder is None

    def add_row(self, most: int | None = None) -> None:
        """Open an empty row behind the others; it will have at most `most` tokens.

        The cache grows by half at a time, but not beyond what a row may need.
        """
        assert len(self.cached) < self.cache.num_rows
        self.cached.append(0)
        most = self._max_positions if most is None else min(most, self._max_positions)
        self._most_slots = max(self._most_slots, most)

    def drop_row(self, row: int) -> None:
        """Forget a row; the last row takes its number."""
        self.move_row(len(self.cached) - 1, row)
        self.cached.pop()

    def move_row(self, source: int, target: int) -> None:
        """Give a row the number of another one, which is forgotten."""
        if source == target:
            return
        self.cached[target] = self.cached[source]
        if self._decoder is None:  # the stock forward needs rows side by side
            self.cache.move_row(source, target, self.cached[source])
        else:
            places = self.places
            places[source], places[target] = places[target], places[source]

    def forward(
        self, first: int, tokens: Sequence[list[int]], plans: Sequence[RowPlan]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `run` does; return the logits of real columns and masks (`Outputs`)."""
        outputs = self.run(first, tokens, plans)
        outputs = outputs.padded(self.model) if isinstance(outputs, FlatOutputs) else outputs
        return outputs.real_BCV, outputs.mask_BMV

    @torch.no_grad()
    def run(
        self, first: int, tokens: Sequence[list[int]], plans: Sequence[RowPlan]
    ) -> Outputs | FlatOutputs:
        """Run the tokens that are not cached yet, followed by drafts and masks.

        Afterwards the cache holds all the tokens; drafts and masks have left no trace, unless
        `keep` says that drafts were right.

        Args:
            first: number of the first row; the others follow it.
            tokens: each row's committed tokens, at least one of them not cached.
            plans: drafts and masks of each row (`mars.decoding.plan`).

        Returns:
            Outputs of the real columns, the last token and its drafts, and of the masks.
        """
        # 1. Long stretches (prompts) go in chunks whose logits nobody needs.
        while (longest := max(self._pending(first, tokens))) > 1:
            if longest + max(len(plan.drafts) + plan.num_masks for plan in plans) <= self._chunk:
                break
            counts = [min(n - 1, self._chunk) for n in self._pending(first, tokens)]
            ends = [n + start for n, start in zip(counts, self.cached[first:], strict=False)]
            chunks = [row[:end] for row, end in zip(tokens, ends, strict=True)]
            self.read(first, chunks)
        # 2. The rest, drafts and masks.
        return self._feed(first, tokens, plans)

    @torch.no_grad()
    def read(self, first: int, tokens: Sequence[list[int]]) -> None:
        """Run the tokens that are not cached yet, in one forward; nobody needs its outputs.

        Arguments are as for `run`, but a row may have nothing to feed.
        """
        self._feed(first, tokens, [RowPlan()] * len(tokens), has_outputs=False)

    def keep(self, first: int, num_drafts: Sequence[int]) -> None:
        """Keep the first drafts of each row of the last forward: they were committed."""
        for row, count in enumerate(num_drafts, start=first):
            self.cached[row] += count

    def _pending(self, first: int, tokens: Sequence[list[int]]) -> list[int]:
        return [len(row) - cached for row, cached in zip(tokens, self.cached[first:], strict=False)]

    def _feed(
        self,
        first: int,
        tokens: Sequence[list[int]],
        plans: Sequence[RowPlan],
        *,
        has_outputs: bool = True,
    ) -> Outputs | FlatOutputs:
        if self._decoder is not None:
            return self._feed_fused(self._decoder, first, tokens, plans, has_outputs=has_outputs)
        rows = slice(first, first + len(tokens))
        columns = lay_out(
            tokens,
            plans,
            self.cached[rows],
            mask_token_id=self._mask,
            max_positions=self._max_positions,
        ).to(self.model.device)
        is_on_host = self.model.device.type == "cpu"
        if not is_on_host:
            columns = replace(columns, num_slots=-(-columns.num_slots // SLOTS) * SLOTS)
        self._reserve(columns.num_slots)
        self.cache.prepare(rows, columns.slot_BT, columns.num_slots)
        visible = columns.visible()
        if not is_on_host:
            visible = additive_mask(visible, self._groups, self.model.dtype)
        num_masks = columns.token_BT.shape[1] - columns.num_real
        offset_BM = columns.offset_BT[:, columns.num_real :]
        with (
            attention_implementation(self.model, ATTENTION),
            self._linears,
            mask_columns(self.model, columns.num_real, offset_BM),
            correction_of(self.model) as corrections,
        ):
            logits = cached_forward(
                self.model,
                input_ids=columns.token_BT,
                position_ids=columns.position_BT,
                visible=visible,
                cache=self.cache,
                num_logits=columns.num_outputs + num_masks,
            )
        self.cached[rows] = [len(row) for row in tokens]
        return Outputs(
            logits[:, : columns.num_outputs],
            logits[:, columns.num_outputs :],
            corrections[0] if corrections and num_masks else None,
        )

    def _feed_fused(
        self,
        decoder: FusedDecoder,
        first: int,
        tokens: Sequence[list[int]],
        plans: Sequence[RowPlan],
        *,
        has_outputs: bool,
    ) -> FlatOutputs:
        rows = slice(first, first + len(tokens))
        columns = lay_out_flat(
            tokens,
            plans,
            self.cached[rows],
            mask_token_id=self._mask,
            max_positions=self._max_positions,
            has_outputs=has_outputs,
        )
        if not self.cache.keys:
            with suppress(IndexError):  # there is none
                self.cache.adopt(decoder.spare.pop(), max(columns.num_slots, self._most_slots))
        self._reserve(columns.num_slots)
        self.cache.allocate(
            decoder.num_layers,
            decoder.kv_heads,
            decoder.head_width,
            decoder.dtype,
            unit=decoder.cache_unit,
        )
        hidden, logits = decoder.forward(columns, self.places[rows], self.cache)
        self.cached[rows] = [len(row) for row in tokens]
        return FlatOutputs(
            logits,
            hidden,
            [1 + len(plan.drafts) for plan in plans],
            [plan.num_masks for plan in plans],
        )

    def _reserve(self, num_slots: int) -> None:
        if num_slots > self.cache.num_slots:
            wanted = max(num_slots + _SLACK_SLOTS, int(self.cache.num_slots * _GROWTH))
            self.cache.reserve(max(num_slots, min(wanted, self._most_slots)))
