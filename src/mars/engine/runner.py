"""Feed committed tokens and masks to a model; keep track of what its cache holds.

Shapes: B rows of this call, T columns fed, W masks, K slots, V vocabulary.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from mars.compat import attention_implementation, cached_forward, register_attention
from mars.engine.attention import grouped_attention
from mars.engine.cache import SlotCache

ATTENTION = "mars"
_SLACK_SLOTS = 64
_GROWTH = 1.5

register_attention(ATTENTION, grouped_attention)


class Runner:
    """A model and the cache of up to `num_rows` sequences, each with its own length.

    Rows are numbered 0 .. n-1 without gaps; the caller adds rows at the end and drops any.

    Attributes:
        cached: for each row, how many of its tokens the cache holds.
        cache: the only KV cache there is.
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
        """Prepare for sequences of at most `max_positions` tokens, masks included."""
        self.model = model
        self.cached: list[int] = []
        self.cache = SlotCache(num_rows, 0)
        self._max_positions = max_positions
        self._mask = 0 if mask_token_id is None else mask_token_id
        self._chunk = prefill_chunk

    def add_row(self) -> None:
        """Open an empty row behind the others."""
        assert len(self.cached) < self.cache.num_rows
        self.cached.append(0)

    def drop_row(self, row: int) -> None:
        """Forget a row; the last row takes its number."""
        last = len(self.cached) - 1
        if row != last:
            self.cache.move_row(last, row, self.cached[last])
            self.cached[row] = self.cached[last]
        self.cached.pop()

    @torch.no_grad()
    def forward(self, first: int, tokens: Sequence[list[int]], num_masks: int) -> torch.Tensor:
        """Run the tokens that are not cached yet, followed by masks.

        Afterwards the cache holds all the tokens; the masks have left no trace.

        Args:
            first: number of the first row; the others follow it.
            tokens: each row's sequence, with at least one token that is not cached.
            num_masks: W, masks to append to every row.

        Returns:
            (B, W + 1, V): logits of the last token and of the masks. Column j is the
            distribution of the token at position len(tokens) + j.
        """
        # 1. Long stretches (prompts) go in chunks whose logits nobody needs.
        while max(self._pending(first, tokens)) + num_masks > max(self._chunk, num_masks + 1):
            counts = [min(n - 1, self._chunk) for n in self._pending(first, tokens)]
            self._feed(first, tokens, counts, num_masks=0)
        # 2. The rest, and the masks.
        return self._feed(first, tokens, self._pending(first, tokens), num_masks)

    def _pending(self, first: int, tokens: Sequence[list[int]]) -> list[int]:
        return [len(row) - cached for row, cached in zip(tokens, self.cached[first:], strict=False)]

    def _feed(
        self, first: int, tokens: Sequence[list[int]], counts: list[int], num_masks: int
    ) -> torch.Tensor:
        """Feed `counts[b]` tokens of row b, right-aligned, then the masks."""
        rows = slice(first, first + len(tokens))
        columns = max(counts) + num_masks
        starts = self.cached[rows]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        fed = [row[start:end] for row, start, end in zip(tokens, starts, ends, strict=True)]
        masks = [self._mask] * num_masks
        input_ids = [[0] * (columns - num_masks - len(part)) + part + masks for part in fed]

        device = self.model.device
        position = torch.tensor(ends, device=device)[:, None] + num_masks - columns
        position = position + torch.arange(columns, device=device)
        is_padding = position < torch.tensor(starts, device=device)[:, None]
        # Only masks that their row is going to ignore can lie beyond the last position.
        position = position.clamp(max=self._max_positions - 1)
        num_visible = min(max(ends) + num_masks, self._max_positions)
        self._reserve(num_visible)
        self.cache.prepare(rows, position.masked_fill(is_padding, -1), num_visible)
        position = position.masked_fill(is_padding, 0)
        visible = torch.arange(num_visible, device=device) <= position[:, None, :, None]
        with attention_implementation(self.model, ATTENTION):
            logits = cached_forward(
                self.model,
                input_ids=torch.tensor(input_ids, device=device),
                position_ids=position,
                visible=visible,
                cache=self.cache,
                num_logits=num_masks + 1,
            )
        self.cached[rows] = ends
        return logits

    def _reserve(self, num_slots: int) -> None:
        if num_slots > self.cache.num_slots:
            wanted = max(num_slots + _SLACK_SLOTS, int(self.cache.num_slots * _GROWTH))
            self.cache.reserve(min(wanted, self._max_positions))
