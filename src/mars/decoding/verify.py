"""Which drafts were right, and which masks have thus predicted what comes next.

Shapes: B rows, C = K + 1 real output columns, K drafts, G groups, W masks per group. Real columns
are right-aligned: the last one of every row stands behind its last draft.
"""

from collections.abc import Sequence

import torch


def align_right(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the rows' tokens as int64 (B, K), right-aligned, -1 in front."""
    width = max(map(len, rows))
    return torch.tensor(
        [[*[-1] * (width - len(row)), *row] for row in rows], dtype=torch.int64
    ).reshape(len(rows), width)


def count_accepted(choice_BC: torch.Tensor, draft_BK: torch.Tensor) -> torch.Tensor:
    """Count the leading drafts that equal the choice at the column before them.

    Args:
        choice_BC: int64, what is said after every real column.
        draft_BK: int64, from `align_right`; draft c was fed in column c + 1.

    Returns:
        int64 (B,).
    """
    is_absent = draft_BK < 0
    is_right = is_absent | (choice_BC[:, :-1] == draft_BK)
    return is_right.long().cumprod(dim=1).sum(dim=1) - is_absent.sum(dim=1)


def find_group(
    accepted_B: torch.Tensor, groups_BG: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the group of every row's accept length.

    Args:
        accepted_B: int64, accepted drafts.
        groups_BG: int64, accept length of each group; -1 where there is none.

    Returns:
        Number of the group, int64 (B,), 0 if there is none, and whether there is one, bool (B,).
    """
    is_it_BG = groups_BG == accepted_B[:, None]
    return is_it_BG.long().argmax(dim=1), is_it_BG.any(dim=1)


def take_group(
    mask_BMV: torch.Tensor, group_B: torch.Tensor, window_B: torch.Tensor, width: int
) -> torch.Tensor:
    """Gather the outputs of one group per row.

    Args:
        mask_BMV: outputs of all mask columns, or anything else of theirs.
        group_B: int64, number of the group.
        window_B: int64, masks per group.
        width: W, the largest window; behind a smaller one stands anything.

    Returns:
        (B, W, V).
    """
    column_BW = (group_B * window_B)[:, None] + torch.arange(width, device=mask_BMV.device)
    row_B1 = torch.arange(len(mask_BMV), device=mask_BMV.device)[:, None]
    return mask_BMV[row_B1, column_BW.clamp(max=mask_BMV.shape[1] - 1)]
