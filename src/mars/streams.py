"""Lay out training rows: the clean tokens, then [MASK] blocks that stand for decoding steps.

Row layout [clean ; masked]. A block of B masks that starts at s is the decoding step with prefix
0..s-1: its masks occupy positions s..s+B-1 and mask j (1-based) predicts token s+j. Token s itself
is predicted by the clean stream alone. So the mask that predicts token t always sits at position
t-1, and only the start of its block decides what it sees.

Shapes: B rows, L clean tokens, M masks, S = L + M.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100
PADDING = -1


@dataclass(frozen=True, slots=True)
class Blocks:
    """The masks of all rows, one entry per mask, ordered by row and target (int64, [N])."""

    row: Tensor
    target: Tensor
    """Index of the clean token the mask predicts (s + j)."""
    start: Tensor
    """Index of the first clean token the mask does not see (s)."""

    @property
    def offset(self) -> Tensor:
        """Place of each mask in its block, 1..B (j)."""
        return self.target - self.start


@dataclass(frozen=True, slots=True)
class Streams:
    """Rows [clean ; masked], every field int64 of shape [B, S]."""

    input_ids: Tensor
    position_ids: Tensor
    document: Tensor
    """Document of the token, PADDING where there is none."""
    limit: Tensor
    """The token sees clean tokens with an index below this."""
    block: Tensor
    """The token sees earlier tokens with the same number (unique for clean tokens)."""
    target: Tensor
    """Token id that the output at this place predicts, or IGNORE."""
    offset: Tensor
    """0 for clean tokens, j for the j-th mask of a block, PADDING for padding."""
    source: Tensor
    """Index of the clean output that predicts the same token (itself for clean tokens)."""
    num_clean: int
    """L; places L.. hold the masked stream."""


def tile_blocks(labels: Tensor, document: Tensor, phase: Tensor, block_size: int) -> Blocks:
    """Cover every supervised span with consecutive blocks of `block_size` masks.

    The first block of a span is cut to `block_size - phase` masks, so that over many steps every
    token is predicted at every offset (the paper's blocks have a fixed phase, defect T14). Blocks
    start inside the span, as decoding does: the prompt is always known. The last block ends with
    the span, so nothing is trained beyond the end of an answer.

    Args:
        labels: [B, L] token ids, IGNORE where not supervised; label t belongs to token t.
        document: [B, L] document of each token, PADDING for padding.
        phase: [B, L] values in 0..block_size-1; the one at the span's first token counts.
        block_size: masks per block, at least 1.
    """
    first, is_supervised = span_starts(labels, document)
    row, target = torch.nonzero(is_supervised & (first < _arange_like(first)), as_tuple=True)
    start = first[row, target]
    shift = phase[row, start]
    index = (target - start - 1 + shift) // block_size
    start = torch.maximum(start, start + index * block_size - shift)
    return Blocks(row=row, target=target, start=start)


def span_starts(labels: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each token the index where its supervised span begins, and if it is supervised.

    Both [B, L]. A document's first token counts as not supervised: no output predicts it.
    """
    same_document = torch.zeros_like(document, dtype=torch.bool)
    same_document[:, 1:] = document[:, 1:] == document[:, :-1]
    is_supervised = (labels != IGNORE) & same_document
    continues = torch.zeros_like(is_supervised)
    continues[:, 1:] = is_supervised[:, 1:] & is_supervised[:, :-1]
    begins = torch.where(continues, 0, _arange_like(labels))
    return begins.cummax(dim=1).values, is_supervised


def build_streams(
    input_ids: Tensor,
    labels: Tensor,
    document: Tensor,
    position_ids: Tensor,
    blocks: Blocks,
    mask_token_id: int,
    *,
    multiple: int = 1,
) -> Streams:
    """Append the masks in `blocks` to the clean rows. Pure; no padding id is ever looked at.

    All tensors [B, L] int64 (see `tile_blocks`); `position_ids` restart in each document. M is
    rounded up to a multiple of `multiple`.
    """
    num_rows, num_clean = input_ids.shape
    is_target = span_starts(labels, document)[1]
    next_target = torch.full_like(labels, IGNORE)
    next_target[:, :-1] = torch.where(is_target[:, 1:], labels[:, 1:], IGNORE)
    index = _arange_like(input_ids)
    row, column, width = _columns(blocks.row, num_rows)
    width = -(-width // multiple) * multiple

    def join(clean: Tensor, masks: Tensor, padding: int | Tensor) -> Tensor:
        masked = clean.new_zeros(num_rows, width) + padding
        masked[row, column] = masks
        return torch.cat([clean, masked], dim=1)

    before = blocks.target - 1
    # Padding gets numbers of its own, so that it sees itself and nothing sees it.
    own_number = -(num_clean + 1 + torch.arange(width, device=input_ids.device))
    return Streams(
        input_ids=join(input_ids, torch.full_like(row, mask_token_id), mask_token_id),
        position_ids=join(position_ids, position_ids[row, before], 0),
        document=join(document, document[row, before], PADDING),
        limit=join(index + 1, blocks.start, 0),
        block=join(-(index + 1), blocks.start, own_number),
        target=join(next_target, input_ids[row, blocks.target], IGNORE),
        offset=join(torch.where(document == PADDING, PADDING, 0), blocks.offset, PADDING),
        source=join(index.expand_as(input_ids), before, 0),
        num_clean=num_clean,
    )


def _columns(row: Tensor, num_rows: int) -> tuple[Tensor, Tensor, int]:
    """Number the masks of each row from 0; return rows, columns and the largest count."""
    counts = torch.bincount(row, minlength=num_rows)
    first = counts.cumsum(0) - counts
    column = torch.arange(len(row), device=row.device) - first[row]
    return row, column, int(counts.max())


def _arange_like(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.shape[1], device=tensor.device).expand_as(tensor)
