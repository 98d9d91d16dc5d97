"""The decisions of a step: by a kernel where all rows are plain, else by `step.decide`."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from mars.decoding.decision import Decision
from mars.decoding.drafts import Draft
from mars.decoding.plan import RowPlan
from mars.decoding.request import Progress
from mars.decoding.sampling import History
from mars.decoding.step import StepParams, decide
from mars.engine.kernels.decide import RowOutputs, decide_greedily
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
    if isinstance(outputs, FlatOutputs):
        if params.is_plain and (decisions := _decide_plain(outputs, model, plans, mask_token_id)):
            return decisions
        outputs = outputs.padded(model)
    real_BCV, mask_BMV, found = outputs
    return decide(real_BCV, mask_BMV, rows, plans, params, histories, mask_token_id, found)


def _decide_plain(
    outputs: FlatOutputs,
    model: PreTrainedModel,
    plans: Sequence[RowPlan],
    mask_token_id: int | None,
) -> list[Decision] | None:
    rows = decide_greedily(
        outputs.logits_OV,
        outputs.hidden_OD,
        [RowOutputs(plan.drafts, plan.groups, plan.window) for plan in plans],
        correction=correction(model, outputs.hidden_OD),
        forbidden=mask_token_id,
    )
    if rows is None:
        return None
    return [
        Decision(
            tokens=row.tokens,
            num_accepted=len(row.tokens) - 1,
            drafts=[*map(Draft, row.drafts, row.probabilities)],
            logprobs=[],
        )
        for row in rows
    ]
