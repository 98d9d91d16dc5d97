"""One decoding step, decided: from the logits of B rows to the tokens they commit.

Shapes: B rows; C = K + 1 real columns, right-aligned (the last committed token and K drafts);
M mask columns; W masks of one group; V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mars.decoding.accept import confidence, is_confident, leading_run
from mars.decoding.decision import Decision, decision, to_host
from mars.decoding.options import Confidence
from mars.decoding.plan import RowPlan, pad_groups, send
from mars.decoding.request import Progress, Request
from mars.decoding.sampling import (
    MINUS_INFINITY,
    History,
    SamplingParams,
    choose,
    log_probabilities,
    penalise,
)
from mars.decoding.verify import align_right, count_accepted, find_group, take_group
from mars.draft_head import CANDIDATES, Correction, largest

# (number of the row, column) -> all tokens before the one that the column predicts; None: padding.
_Prefix = Callable[[int, int], list[int] | None]


@dataclass(slots=True)
class StepParams:
    """The settings of the rows of a step, as tensors; they change only with the set of rows."""

    sampling: SamplingParams
    threshold_B1: torch.Tensor
    is_exact_B1: torch.Tensor  # bool
    rows_of_metric: dict[Confidence, torch.Tensor]  # rows of the threshold mode, by their metric
    num_logprobs: int | None
    has_penalties: bool
    one_by_one: bool
    """Whether a column's logits depend on the tokens chosen before it."""
    are_plain: list[bool]
    """Whether each row asks for nothing but tokens, greedy or sampled."""

    @classmethod
    def of(cls, requests: Sequence[Request], vocabulary: int, device: torch.device) -> "StepParams":
        """Gather the settings of the rows' requests."""
        options = [request.options for request in requests]
        metrics: dict[Confidence, list[int]] = {}
        for row, request in enumerate(requests):
            if request.mode == "threshold":
                metrics.setdefault(request.options.confidence, []).append(row)
        has_penalties = any(o.has_penalties for o in options)
        has_hooks = any(request.logits_hook is not None for request in requests)
        asked = [o.logprobs for o in options if o.logprobs is not None]
        return cls(
            sampling=SamplingParams.of(options, vocabulary, device),
            threshold_B1=torch.tensor([[o.threshold or 0.0] for o in options], device=device),
            is_exact_B1=torch.tensor([[r.mode == "exact"] for r in requests], device=device),
            rows_of_metric={
                metric: torch.tensor(rows, device=device) for metric, rows in metrics.items()
            },
            num_logprobs=min(max(asked), vocabulary) if asked else None,
            has_penalties=has_penalties,
            one_by_one=has_penalties or has_hooks,
            are_plain=[request.is_plain for request in requests],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What the functions below share: the rows and, as tensors, what they fed."""

    rows: Sequence[Progress]
    plans: Sequence[RowPlan]
    params: StepParams
    histories: Sequence[History]
    length_B: torch.Tensor  # committed tokens
    num_drafts_B: torch.Tensor
    window_B: torch.Tensor
    group_BG: torch.Tensor
    draft_BK: torch.Tensor

    @classmethod
    def of(
        cls,
        rows: Sequence[Progress],
        plans: Sequence[RowPlan],
        params: StepParams,
        histories: Sequence[History],
        device: torch.device,
    ) -> "_Step":
        """Bring the plans to the device in one transfer."""
        table = [[len(r.tokens), len(p.drafts), p.window] for r, p in zip(rows, plans, strict=True)]
        parts = [torch.tensor(table), pad_groups(plans), align_right([p.drafts for p in plans])]
        sizes = [part.shape[1] for part in parts]
        counts, groups, drafts = send(torch.cat(parts, dim=1), device).split(sizes, dim=1)
        length_B, num_drafts_B, window_B = counts.unbind(1)
        return cls(
            rows=rows,
            plans=plans,
            params=params,
            histories=histories,
            length_B=length_B,
            num_drafts_B=num_drafts_B,
            window_B=window_B,
            group_BG=groups,
            draft_BK=drafts,
        )

    def history(self) -> History | None:
        """Return a fresh copy of what the rows' penalties look at."""
        return History.stack(self.histories) if self.histories else None


@torch.no_grad()
def decide(
    real_BCV: torch.Tensor,
    mask_BMV: torch.Tensor,
    rows: Sequence[Progress],
    plans: Sequence[RowPlan],
    params: StepParams,
    histories: Sequence[History],
    mask_token_id: int | None,
    correction: Correction | None = None,
) -> list[Decision]:
    """Verify the drafts of every row, and read the masks that stand behind the last right one.

    The only place where the host waits for the device.

    Args:
        real_BCV: as the runner returns them; overwritten at the mask token.
        mask_BMV: same.
        rows: the rows' state; read only.
        plans: what they fed.
        params: the rows' settings.
        histories: what penalties look at, one per row; empty if there are no penalties.
        mask_token_id: never chosen, and no part of any distribution.
        correction: the draft head, if there is one; it serves rows in the exact mode.
    """
    if mask_token_id is not None:
        real_BCV[..., mask_token_id] = MINUS_INFINITY
        mask_BMV[..., mask_token_id] = MINUS_INFINITY
    step = _Step.of(rows, plans, params, histories, real_BCV.device)
    # 1. What `ar` would say at every real column.
    choice_BC, penalised_BCV = _choose_real(step, real_BCV)
    # 2. Drafts that equal it are right. One more token is known: the choice after the last of them.
    accepted_B = count_accepted(choice_BC, step.draft_BK)
    parts = {"accepted": accepted_B[:, None], "choice": choice_BC}
    # 3. What the masks say that stood there.
    if mask_BMV.shape[1]:
        parts |= _read_masks(step, mask_BMV, choice_BC, accepted_B, correction)
    if params.num_logprobs is not None:
        chosen, top, ids = log_probabilities(penalised_BCV, choice_BC, params.num_logprobs)
        parts |= {"logprob": chosen, "top_logprob": top.flatten(1), "top_id": ids.flatten(1)}
    # 4. To the host, and row by row.
    on_host = to_host(parts)
    return [
        decision(plan, row.request, {name: values[index] for name, values in on_host.items()})
        for index, (row, plan) in enumerate(zip(rows, plans, strict=True))
    ]


def _choose_real(step: _Step, real_BCV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose at the real columns; every one sees the drafts before it as if they were committed."""
    most_drafts = step.draft_BK.shape[1]
    column_C = torch.arange(-most_drafts, 1, device=real_BCV.device)
    position_BC = (step.length_B + step.num_drafts_B)[:, None] + column_C

    def prefix(index: int, column: int) -> list[int] | None:
        drafts = step.plans[index].drafts
        seen = column - (most_drafts - len(drafts))
        return None if seen < 0 else [*step.rows[index].tokens, *drafts[:seen]]

    # Columns of padding, before the last token, may have positions below 0.
    return _choose_columns(
        step, real_BCV, position_BC.clamp(min=0), step.history(), prefix, step.draft_BK
    )


def _read_masks(
    step: _Step,
    mask_BMV: torch.Tensor,
    choice_BC: torch.Tensor,
    accepted_B: torch.Tensor,
    correction: Correction | None,
) -> dict[str, torch.Tensor]:
    """Choose at the masks of the group of each row's accept length.

    Returns:
        `num_masks` (B, 1), 0 for rows without such a group; `num_sure` (B, 1), how many of them
        pass the threshold; the `draft` tokens (B, W) and their top-1 `probability` (B, W).
    """
    device = mask_BMV.device
    group_B, has_group_B = find_group(accepted_B, step.group_BG)
    num_masks_B = step.window_B * has_group_B
    width = max(plan.window for plan in step.plans)
    mask_BWV = take_group(mask_BMV, group_B, step.window_B, width)
    # By now the right drafts are known, and the token after them.
    end_B1 = (step.draft_BK.shape[1] - step.num_drafts_B + accepted_B)[:, None]
    next_B1 = choice_BC.gather(1, end_B1)
    history = step.history()
    if history is not None:
        is_wrong_BK = torch.arange(step.draft_BK.shape[1], device=device) >= end_B1
        history.add(step.draft_BK.masked_fill(is_wrong_BK, -1))
        history.add(next_B1)
    position_BW = (step.length_B + accepted_B + 1)[:, None] + torch.arange(width, device=device)
    known = torch.cat([num_masks_B[:, None], accepted_B[:, None], next_B1], dim=1)
    prefix = _mask_prefix(step, known) if _has_hooks(step) else None
    modes = [row.request.mode for row in step.rows]
    parts = {"num_masks": num_masks_B[:, None], "num_sure": torch.zeros_like(num_masks_B)[:, None]}
    if correction is None or "threshold" in modes:
        again = None if history is None else history.copy()
        token_BW, penalised_BWV = _choose_columns(step, mask_BWV, position_BW, again, prefix)
        passes_BW = _passes(penalised_BWV, step.params)
        parts["num_sure"] = leading_run(passes_BW, num_masks_B)[:, None]
        parts["draft"] = token_BW
        parts["probability"] = confidence(penalised_BWV, "probability")
    if correction is not None:
        hidden_BWD = take_group(correction.hidden_BMD, group_B, step.window_B, width)
        drafted = _draft_in_turn(
            *(step, correction, hidden_BWD, mask_BWV, next_B1, position_BW, history, prefix)
        )
        for name, values in zip(("draft", "probability"), drafted, strict=True):
            parts[name] = torch.where(step.params.is_exact_B1, values, parts.get(name, values))
    return parts


def _draft_in_turn(
    step: _Step,
    correction: Correction,
    hidden_BWD: torch.Tensor,
    mask_BWV: torch.Tensor,
    next_B1: torch.Tensor,
    position_BW: torch.Tensor,
    history: History | None,
    prefix: _Prefix | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose at the masks one after the other: the draft head sees the token before each.

    Only the likeliest tokens of each mask alone are candidates. `next_B1` is the token before the
    first mask's; the rest is as for `_choose_columns`.

    Returns:
        Tokens (B, W), and their probability among the candidates (B, W).
    """
    params, previous_B1 = step.params, next_B1
    tokens, probabilities = [], []
    count = min(CANDIDATES, mask_BWV.shape[-1])
    best_BWC, ids_BWC = mask_BWV[..., :0], position_BW[..., None]
    if not params.one_by_one:
        best_BWC, ids_BWC = largest(penalise(mask_BWV, params.sampling).float(), count)
    for column in range(mask_BWV.shape[1]):
        here = slice(column, column + 1)
        if params.one_by_one:
            chosen_BD = torch.cat([next_B1[:, :0], *tokens], dim=1)
            logits_B1V = _apply_hooks(step, mask_BWV[:, here], column, prefix, chosen_BD)
            logits_B1V = penalise(logits_B1V, params.sampling, history)
            best_B1C, ids_B1C = largest(logits_B1V.float(), count)
        else:
            best_B1C, ids_B1C = best_BWC[:, here], ids_BWC[:, here]
        # What bias, penalties and hooks have added goes on top of the head's logits.
        raw_B1C = mask_BWV[:, here].gather(-1, ids_B1C).float()
        added_B1C = torch.where(best_B1C.isinf() | raw_B1C.isinf(), best_B1C, best_B1C - raw_B1C)
        logits_BC = correction.logits(hidden_BWD[:, column], ids_B1C[:, 0], previous_B1[:, 0])
        logits_B1C = logits_BC[:, None] + added_B1C
        index_B1 = choose(logits_B1C, params.sampling, position_BW[:, here], ids_B1C)
        previous_B1 = ids_B1C[:, 0].gather(1, index_B1)
        tokens.append(previous_B1)
        probabilities.append(confidence(logits_B1C, "probability"))
        if history is not None:
            history.add(previous_B1)
    return torch.cat(tokens, dim=1), torch.cat(probabilities, dim=1)


def _mask_prefix(step: _Step, known_B3: torch.Tensor) -> _Prefix:
    """Know on the host what was verified: only hooks, which run there, need it so early."""
    known = known_B3.tolist()

    def prefix(index: int, column: int) -> list[int] | None:
        num_masks, accepted, following = known[index]
        if column >= num_masks:
            return None
        return [*step.rows[index].tokens, *step.plans[index].drafts[:accepted], following]

    return prefix


def _choose_columns(
    step: _Step,
    logits_BCV: torch.Tensor,
    position_BC: torch.Tensor,
    history: History | None,
    prefix: _Prefix | None,
    follows_BK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token per column; where that depends on earlier tokens, column by column.

    Args:
        step: the rows.
        logits_BCV: outputs of the model.
        position_BC: of the tokens to choose.
        history: what penalties look at before the first column; is changed.
        prefix: tokens before a column, as far as they were known before.
        follows_BK: tokens between the columns (-1: none); None: what is chosen here.

    Returns:
        The choices (B, C), and the logits after hooks, bias and penalties.
    """
    params = step.params
    if not params.one_by_one:
        penalised_BCV = penalise(logits_BCV, params.sampling)
        return choose(penalised_BCV, params.sampling, position_BC), penalised_BCV
    choice_BC = torch.empty_like(position_BC)
    penalised = [logits_BCV[:, :0]]
    for column in range(logits_BCV.shape[1]):
        here = slice(column, column + 1)
        chosen_BD = choice_BC[:, : column if follows_BK is None else 0]
        logits_B1V = _apply_hooks(step, logits_BCV[:, here], column, prefix, chosen_BD)
        penalised.append(penalise(logits_B1V, params.sampling, history))
        choice_BC[:, here] = choose(penalised[-1], params.sampling, position_BC[:, here])
        if history is not None:
            history.add((choice_BC if follows_BK is None else follows_BK)[:, here])
    return choice_BC, torch.cat(penalised, dim=1)


def _has_hooks(step: _Step) -> bool:
    return any(row.request.logits_hook is not None for row in step.rows)


def _apply_hooks(
    step: _Step,
    logits_B1V: torch.Tensor,
    column: int,
    prefix: _Prefix | None,
    chosen_BD: torch.Tensor,
) -> torch.Tensor:
    if prefix is None or not _has_hooks(step):
        return logits_B1V
    logits_B1V = logits_B1V.float()
    for index, row in enumerate(step.rows):
        hook = row.request.logits_hook
        if hook is not None and (tokens := prefix(index, column)) is not None:
            tokens += chosen_BD[index].tolist()
            logits_B1V[index, 0] = hook(tokens, logits_B1V[index, 0])
    return logits_B1V


def _passes(penalised_BWV: torch.Tensor, params: StepParams) -> torch.Tensor:
    """Compare the masks of rows in the threshold mode with tau; those of others never pass.

    The distribution is that of `penalise`: tau means the same at every temperature and with
    every filter. (`top_k=1` would otherwise make every draft certain.)
    """
    passes_BW = torch.zeros(penalised_BWV.shape[:2], dtype=torch.bool, device=penalised_BWV.device)
    for metric, index in params.rows_of_metric.items():
        threshold = params.threshold_B1[index]
        passes_BW[index] = is_confident(penalised_BWV[index], threshold, metric)
    return passes_BW
