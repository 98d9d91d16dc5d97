"""One forward, planned: which tokens and masks each row feeds, where they stand, what they see.

All modes are rows of one kind, and rows of all kinds can share a forward. With p committed tokens
and k drafts, a row feeds

    committed tokens that are not cached yet | drafts d_1 .. d_k | groups of W masks

The output at the last committed token is about position p, that at d_i about position p + i. The
group of accept length i (0 <= i <= k) stands behind d_i: its mask j = 1 .. W has position
p + i + j - 1, sees the committed tokens, d_1 .. d_i and the masks before it in its group, and
predicts position p + i + j. So if exactly i drafts turn out right, and one more token is known
from the output at d_i, that group has predicted the W tokens after it.

    ar          no drafts, no groups
    threshold   no drafts, group 0
    exact       linear: group k; full: groups 0 .. k; partial: the likeliest of them

The slot of a real token in the cache is its position. Masks of different groups share positions,
so they lie in the slots behind the last draft, where nobody looks for them after this forward.

Shapes: B rows, T = R + M columns (R real, M mask columns), G groups, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from mars.decoding.drafts import Draft, accept_probabilities
from mars.decoding.options import Layout

# The partial layout leaves out accept lengths that are less likely than this.
LEAST_PROBABILITY = 0.02
# A row never feeds more drafts and masks than this; only long drafts in the full layout could. Up
# to this many, products in bfloat16 give a column the same bits as alone (docs/exactness.md).
MOST_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What one row feeds besides its committed tokens."""

    drafts: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    """Accept lengths, ascending, each at most the number of drafts."""
    window: int = 0
    """W, masks per group."""

    @property
    def num_masks(self) -> int:
        """Masks of all groups."""
        return len(self.groups) * self.window


NO_PLAN = RowPlan()
"""The last token alone."""


def plan_threshold(*, window: int, budget: int) -> RowPlan:
    """Plan a step of the threshold mode: no mask whose token the budget has no room for."""
    window = min(window, budget - 1)
    return RowPlan(groups=(0,), window=window) if window > 0 else NO_PLAN


def plan_exact(
    drafts: Sequence[Draft],
    *,
    window: int,
    budget: int,
    layout: Layout,
    max_groups: int,
) -> RowPlan:
    """Plan a step of the exact mode.

    Args:
        drafts: at most budget - 1; one token comes without a draft.
        window: masks per group.
        budget: tokens that may still be committed, at least 1.
        layout: which accept lengths get a group.
        max_groups: most groups of the partial layout.
    """
    tokens = tuple(draft.token for draft in drafts)
    # After i drafts and one more token, budget - i - 1 are left: room for budget - i - 2 drafts.
    lengths = [i for i in range(len(drafts) + 1) if budget - i - 2 > 0]
    groups = choose_groups(lengths, drafts, window=window, layout=layout, max_groups=max_groups)
    if not groups:
        return RowPlan(drafts=tokens)
    return RowPlan(drafts=tokens, groups=groups, window=min(window, budget - groups[0] - 2))


def choose_groups(
    lengths: Sequence[int],
    drafts: Sequence[Draft],
    *,
    window: int,
    layout: Layout,
    max_groups: int,
) -> tuple[int, ...]:
    """Choose the accept lengths to be ready for, out of those (`lengths`) that are any use."""
    if window == 0:
        return ()
    if layout == "linear":
        return tuple(i for i in lengths if i == len(drafts))
    most = max(1, (MOST_COLUMNS - 1 - len(drafts)) // window)
    probabilities = accept_probabilities(drafts)
    likeliest = sorted(lengths, key=lambda i: probabilities[i], reverse=True)
    if layout in ("partial", "auto"):  # `auto` comes here where nothing is known of the machine
        most = min(most, max_groups)
        likeliest = [i for i in likeliest if probabilities[i] >= LEAST_PROBABILITY]
    return tuple(sorted(likeliest[:most]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Every column of one forward: [padding | real, right-aligned | masks, left-aligned | padding].

    The last real token of every row is in the same column, and the masks of all rows are a suffix
    of the columns.
    """

    num_real: int
    """R: the first mask column."""
    num_outputs: int
    """Real columns, from the right, whose outputs are wanted: 1 + the most drafts of a row."""
    num_slots: int
    """S: slots that any column writes or sees, from the first."""
    token_BT: torch.Tensor
    """This and all below: int64."""
    position_BT: torch.Tensor
    slot_BT: torch.Tensor
    """Where keys and values go; -1 for padding."""
    limit_BT: torch.Tensor
    """A column sees the slots below its limit, ..."""
    first_BT: torch.Tensor
    """... and those from `first` to its own."""
    offset_BT: torch.Tensor
    """Place of a mask in its group, from 0; 0 for all others."""

    def to(self, device: torch.device) -> "Columns":
        """Move the tensors in one transfer."""
        names = [field.name for field in fields(self) if field.name.endswith("_BT")]
        moved = send(torch.stack([getattr(self, name) for name in names]), device).unbind()
        changes: dict[str, Any] = dict(zip(names, moved, strict=True))
        return replace(self, **changes)

    def visible(self) -> torch.Tensor:
        """Return bool (B, 1, T, S), True where a column sees a slot; every column sees one."""
        slots_S = torch.arange(self.num_slots, device=self.slot_BT.device)
        visible_BTS = slots_S < self.limit_BT[..., None]
        masks = slice(self.num_real, None)
        own_BMS = (slots_S >= self.first_BT[:, masks, None]) & (
            slots_S <= self.slot_BT[:, masks, None]
        )
        visible_BTS[:, masks] |= own_BMS
        return visible_BTS[:, None]


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to a device. To a GPU it goes in line: nobody waits for it."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def lay_out(
    tokens: Sequence[Sequence[int]],
    plans: Sequence[RowPlan],
    cached: Sequence[int],
    *,
    mask_token_id: int,
    max_positions: int,
) -> Columns:
    """Turn the plans of B rows into the columns of one forward.

    Args:
        tokens: each row's committed tokens.
        plans: what each row feeds besides.
        cached: how many of its tokens need not be fed.
        mask_token_id: fed at the masks.
        max_positions: positions are clamped to lie below; that of a mask whose row is going to
            ignore it may not.
    """
    parts = [
        [*row[start:], *plan.drafts] for row, plan, start in zip(tokens, plans, cached, strict=True)
    ]
    num_real = max(map(len, parts))
    num_masks = max(plan.num_masks for plan in plans)
    token_BT = torch.tensor(
        [[0] * (num_real - len(part)) + part + [mask_token_id] * num_masks for part in parts]
    )
    # 1. Real columns: slot and position are the same.
    table = [
        [start, len(row), len(plan.drafts), plan.window, plan.num_masks]
        for row, plan, start in zip(tokens, plans, cached, strict=True)
    ]
    start_B1, length_B1, drafts_B1, window_B1, masks_B1 = torch.tensor(table).T[..., None]
    end_B1 = length_B1 + drafts_B1
    real_BR = end_B1 - num_real + torch.arange(num_real)
    # 2. Mask columns: the masks of a row are numbered through its groups.
    index_M = torch.arange(num_masks)
    window_B1 = window_B1.clamp(min=1)
    group_BM = index_M // window_B1
    offset_BM = index_M % window_B1
    groups_BG = pad_groups(plans)
    behind_BM = length_B1 + groups_BG.gather(1, group_BM.clamp(max=groups_BG.shape[1] - 1))
    # 3. Both.
    is_padding_BT = torch.cat([real_BR < start_B1, index_M >= masks_B1], dim=1)
    position_BT = torch.cat([real_BR, behind_BM + offset_BM], dim=1).clamp(max=max_positions - 1)
    slot_BT = torch.cat([real_BR, end_B1 + index_M], dim=1)
    limit_BT = torch.cat([real_BR + 1, behind_BM], dim=1)
    first_BT = torch.cat([real_BR, end_B1 + group_BM * window_B1], dim=1)
    offset_BT = torch.cat([torch.zeros_like(real_BR), offset_BM], dim=1)
    return Columns(
        num_real=num_real,
        num_outputs=1 + max(len(plan.drafts) for plan in plans),
        num_slots=int((end_B1 + masks_B1).max()),
        token_BT=token_BT,
        position_BT=position_BT.masked_fill(is_padding_BT, 0),
        slot_BT=slot_BT.masked_fill(is_padding_BT, -1),
        limit_BT=limit_BT.masked_fill(is_padding_BT, 1),
        first_BT=first_BT.masked_fill(is_padding_BT, 0),
        offset_BT=offset_BT.masked_fill(is_padding_BT, 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatColumns:
    """Every column of one forward without padding: real ones row by row, then masks row by row."""

    token: list[int]
    """This, and those up to `first`: one per column, as in `Columns`."""
    position: list[int]
    slot: list[int]
    limit: list[int]
    first: list[int]
    offset: list[int]
    """Place of every mask in its group, from 0."""
    real_start: list[int]
    """B + 1 numbers: the real columns of row b are real_start[b] .. real_start[b + 1] - 1."""
    mask_start: list[int]
    """The same for masks."""
    outputs: list[int]
    """Columns whose outputs are wanted: every row's last token and drafts, then all masks."""
    num_slots: int
    """S: slots that any column writes or sees, from the first."""


def lay_out_flat(
    tokens: Sequence[Sequence[int]],
    plans: Sequence[RowPlan],
    cached: Sequence[int],
    *,
    mask_token_id: int,
    max_positions: int,
    has_outputs: bool = True,
) -> FlatColumns:
    """Do what `lay_out` does, for code that needs no padding.

    Arguments are the same. Without outputs, a row may have nothing to feed.
    """
    ids: list[int] = []
    position: list[int] = []
    real_start, outputs = [0], []
    for row, plan, start in zip(tokens, plans, cached, strict=True):
        ids += row[start:]
        ids += plan.drafts
        position += range(start, len(row) + len(plan.drafts))
        real_start.append(len(ids))
        if has_outputs:
            outputs += range(len(ids) - len(plan.drafts) - 1, len(ids))
    slot, limit, first = position.copy(), [p + 1 for p in position], position.copy()
    mask_start, offset = [len(ids)], []
    for row, plan in zip(tokens, plans, strict=True):
        end = len(row) + len(plan.drafts)
        for accepted in plan.groups:
            behind, window = len(row) + accepted, range(plan.window)
            offset += window
            position += [min(behind + j, max_positions - 1) for j in window]
            slot += range(end, end + plan.window)
            limit += [behind] * plan.window
            first += [end] * plan.window
            end += plan.window
        mask_start.append(len(slot))
    num_masks = len(offset)
    outputs += range(len(ids), len(ids) + num_masks)
    return FlatColumns(
        token=ids + [mask_token_id] * num_masks,
        position=position,
        slot=slot,
        limit=limit,
        first=first,
        offset=offset,
        real_start=real_start,
        mask_start=mask_start,
        outputs=outputs,
        num_slots=max(slot, default=-1) + 1,
    )


def pad_groups(plans: Sequence[RowPlan]) -> torch.Tensor:
    """Return the accept lengths of the rows' groups, int64 (B, G), G >= 1, -1 behind the last."""
    width = max(1, *(len(plan.groups) for plan in plans))
    return torch.tensor([[*plan.groups, *[-1] * (width - len(plan.groups))] for plan in plans])
