"""One decoding step, decided: from the logits of B rows to the tokens they commit.

Shapes: B rows, C = W + 1 columns (the AR token and W drafts), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mars.decoding.accept import is_confident, leading_run
from mars.decoding.options import Confidence
from mars.decoding.request import Progress, Request
from mars.decoding.sampling import MINUS_INFINITY, History, SamplingParams, choose, penalise


@dataclass(slots=True)
class StepParams:
    """The settings of the rows of a step, as tensors; they change only with the set of rows."""

    sampling: SamplingParams
    threshold_B1: torch.Tensor
    rows_of_metric: dict[Confidence, torch.Tensor]  # metric -> int64 row numbers
    has_penalties: bool
    one_by_one: bool
    """Whether a column's logits depend on the choice in the columns before it."""

    @classmethod
    def of(cls, requests: Sequence[Request], vocabulary: int, device: torch.device) -> "StepParams":
        """Gather the settings of the rows' requests."""
        options = [request.options for request in requests]
        metrics: dict[Confidence, list[int]] = {}
        for row, request in enumerate(requests):
            if request.window:
                metrics.setdefault(request.options.confidence, []).append(row)
        has_penalties = any(o.has_penalties for o in options)
        return cls(
            sampling=SamplingParams.of(options, vocabulary, device),
            threshold_B1=torch.tensor([[o.threshold or 0.0] for o in options], device=device),
            rows_of_metric={
                metric: torch.tensor(rows, device=device) for metric, rows in metrics.items()
            },
            has_penalties=has_penalties,
            one_by_one=has_penalties or any(r.logits_hook is not None for r in requests),
        )


def decide(
    logits_BCV: torch.Tensor,
    rows: Sequence[Progress],
    params: StepParams,
    histories: Sequence[History],
    mask_token_id: int | None,
) -> list[list[int]]:
    """Choose every column's token and return, for each row, those to commit (one at least).

    The only place where the host waits for the device.

    Args:
        logits_BCV: as the runner returns them; overwritten at the mask token.
        rows: the rows' state; read only.
        params: the rows' settings.
        histories: what penalties look at, one per row; empty if there are no penalties.
        mask_token_id: never chosen, and no part of any distribution.
    """
    if mask_token_id is not None:
        logits_BCV[..., mask_token_id] = MINUS_INFINITY
    device = logits_BCV.device
    columns = torch.arange(logits_BCV.shape[1], device=device)
    position_BC = torch.tensor([[len(row.tokens)] for row in rows], device=device) + columns
    if params.one_by_one:
        choice_BC, confident_BD = _one_by_one(logits_BCV, position_BC, rows, params, histories)
    else:
        logits_BCV = penalise(logits_BCV, params.sampling)
        choice_BC = choose(logits_BCV, params.sampling, position_BC)
        confident_BD = _confident(logits_BCV[:, 1:], params)
    limit_B = torch.tensor([row.max_drafts for row in rows], device=device)
    committed_B = 1 + leading_run(confident_BD, limit_B)
    plan = torch.cat([committed_B[:, None], choice_BC], dim=1).tolist()
    return [tokens[:committed] for committed, *tokens in plan]


def _one_by_one(
    logits_BCV: torch.Tensor,
    position_BC: torch.Tensor,
    rows: Sequence[Progress],
    params: StepParams,
    histories: Sequence[History],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Go through the columns, each seeing the choices before it as if they were committed."""
    history = History.stack(histories) if histories else None
    choice_BC = position_BC.new_empty(position_BC.shape)
    confident = []
    for column in range(logits_BCV.shape[1]):
        here = slice(column, column + 1)
        logits_B1V = _apply_hooks(logits_BCV[:, here], rows, choice_BC[:, :column])
        logits_B1V = penalise(logits_B1V, params.sampling, history)
        choice_BC[:, here] = choose(logits_B1V, params.sampling, position_BC[:, here])
        if history is not None:
            history.add(choice_BC[:, here])
        if column:
            confident.append(_confident(logits_B1V, params))
    return choice_BC, torch.cat([*confident, choice_BC.new_empty(len(rows), 0).bool()], dim=1)


def _apply_hooks(
    logits_B1V: torch.Tensor, rows: Sequence[Progress], drafts_BD: torch.Tensor
) -> torch.Tensor:
    if all(row.request.logits_hook is None for row in rows):
        return logits_B1V
    logits_B1V = logits_B1V.float()
    for index, row in enumerate(rows):
        if row.request.logits_hook is not None:
            tokens = row.tokens + drafts_BD[index].tolist()
            logits_B1V[index, 0] = row.request.logits_hook(tokens, logits_B1V[index, 0])
    return logits_B1V


def _confident(drafts_BDV: torch.Tensor, params: StepParams) -> torch.Tensor:
    """Compare every draft's distribution with its row's threshold; AR rows are never confident.

    The distribution is that of `penalise`: tau means the same at every temperature and with
    every filter. (`top_k=1` would otherwise make every draft certain.)
    """
    rows, num_drafts = drafts_BDV.shape[:2]
    confident_BD = torch.zeros(rows, num_drafts, dtype=torch.bool, device=drafts_BDV.device)
    for metric, index in params.rows_of_metric.items() if num_drafts else ():
        threshold = params.threshold_B1[index]
        confident_BD[index] = is_confident(drafts_BDV[index], threshold, metric)
    return confident_BD
