"""The decisions of a step: by a kernel for plain rows, by `step.decide` for the others.

Which of the two decides a row depends on its own request only: a sampled token could differ between
them in a near-tie of the last place.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile

import torch
from transformers import PreTrainedModel

from mars.decoding.decision import Decision
from mars.decoding.drafts import Draft
from mars.decoding.options import DecodingOptions
from mars.decoding.plan import RowPlan
from mars.decoding.request import Progress, Request
from mars.decoding.sampling import History
from mars.decoding.step import StepParams, decide
from mars.engine.kernels.decide import RowDecision, RowOutputs, Sampling, decide_rows
from mars.engine.runner import FlatOutputs, Outputs
from mars.gated import correction


def decide_outputs(
    outputs: Outputs | FlatOutputs,
    model: PreTrainedModel,
    rows: Sequence[Progress],
    plans: Sequence[RowPlan],
    params: StepParams,
    histories: Sequence[History],
    mask_token_id: int | None,
) -> list[Decision]:
    """Do what `decide` does with what a forward has left; by a kernel where one serves."""
    plain = None
    if isinstance(outputs, FlatOutputs):
        if any(params.are_plain):
            plain = _decide_plain(outputs, model, rows, plans, mask_token_id)
        if plain is not None and all(params.are_plain):
            return plain
        outputs = outputs.padded(model)
    real_BCV, mask_BMV, found = outputs
    decided = decide(real_BCV, mask_BMV, rows, plans, params, histories, mask_token_id, found)
    if plain is None:
        return decided
    pairs = zip(params.are_plain, plain, decided, strict=True)
    return [quick if is_plain else slow for is_plain, quick, slow in pairs]


def decide_made_up(
    outputs: Outputs | FlatOutputs, model: PreTrainedModel, plans: Sequence[RowPlan]
) -> None:
    """Decide for greedy rows that nobody has asked for: what steps cost (`engine.step_times`)."""
    rows, params = _made_up(len(plans), outputs[0].shape[-1], outputs[0].device)
    decide_outputs(outputs, model, rows, plans, params, [], None)


@lru_cache(maxsize=1)
def _made_up(
    count: int, vocabulary: int, device: torch.device
) -> tuple[list[Progress], StepParams]:
    request = Request(
        prompt="",
        prompt_ids=[0],
        options=DecodingOptions(),
        window=1,
        end_ids=frozenset(),
        decode=lambda token_ids: "",
    )
    rows = [Progress(request) for _ in range(count)]
    return rows, StepParams.of([request] * count, vocabulary, device)


def _decide_plain(
    outputs: FlatOutputs,
    model: PreTrainedModel,
    rows: Sequence[Progress],
    plans: Sequence[RowPlan],
    mask_token_id: int | None,
) -> list[Decision] | None:
    """Decide all rows as if they were plain."""
    fed = [_outputs_of(row, plan) for row, plan in zip(rows, plans, strict=True)]
    has_masks = any(outputs.num_masks)
    decided = decide_rows(
        outputs.logits_OV,
        outputs.hidden_OD,
        fed,
        correction=correction(model, outputs.hidden_OD) if has_masks else None,
        forbidden=mask_token_id,
    )
    if decided is None:
        return None
    return [_decision(row.request, said) for row, said in zip(rows, decided, strict=True)]


def _outputs_of(row: Progress, plan: RowPlan) -> RowOutputs:
    return RowOutputs(
        *(plan.drafts, plan.groups, plan.window, len(row.tokens), _sampling(row)),
        uses_head=row.request.mode == "exact",
    )


def _decision(request: Request, said: RowDecision) -> Decision:
    tokens, drafts = said.tokens, [*map(Draft, said.drafts, said.probabilities)]
    # Of the threshold mode, what passes is said, and the rest is nothing to go on with.
    if request.mode == "threshold":
        threshold = request.options.threshold or 0.0
        sure = takewhile(lambda draft: draft.confidence >= threshold, drafts)
        tokens, drafts = tokens + [draft.token for draft in sure], []
    return Decision(tokens=tokens, num_accepted=len(said.tokens) - 1, drafts=drafts, logprobs=[])


def _sampling(row: Progress) -> Sampling | None:
    o = row.request.options
    return None if o.is_greedy else Sampling(o.temperature, o.top_p, o.min_p, o.top_k, o.seed)
