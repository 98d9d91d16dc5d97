"""What a step means for each row, put together on the host from the tensors of the step."""

from dataclasses import dataclass

import torch

from mars.decoding.drafts import Draft
from mars.decoding.plan import RowPlan
from mars.decoding.request import Request, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one step means for one row."""

    tokens: list[int]
    """To commit, one at least."""
    num_accepted: int
    """Drafts that were fed and turned out right; they are the first of `tokens`."""
    drafts: list[Draft]
    """What masks predict to come after `tokens`."""
    logprobs: list[TokenLogprob]
    """One per token; empty if not asked for."""


def to_host(parts: dict[str, torch.Tensor]) -> dict[str, list[list]]:
    """Transfer (B, n) tensors of several types at once; float64 holds every value of them."""
    packed = torch.cat([part.double() for part in parts.values()], dim=1).cpu()
    split = packed.split([part.shape[1] for part in parts.values()], dim=1)
    return {
        name: (values if part.is_floating_point() else values.long()).tolist()
        for (name, part), values in zip(parts.items(), split, strict=True)
    }


def decision(plan: RowPlan, request: Request, values: dict[str, list]) -> Decision:
    """Put together what the columns of one row mean."""
    (num_accepted,) = values["accepted"]
    first = len(values["choice"]) - 1 - len(plan.drafts)
    said = range(first, first + num_accepted + 1)
    tokens, drafts = [values["choice"][column] for column in said], []
    if "draft" in values:
        (num_masks,), (num_sure,) = values["num_masks"], values["num_sure"]
        drafts = [*map(Draft, values["draft"][:num_masks], values["probability"])]
        # Of the threshold mode, what passes is said, and the rest is nothing to go on with.
        if request.mode == "threshold":
            tokens, drafts = tokens + values["draft"][:num_sure], []
    num_top = request.options.logprobs
    return Decision(
        tokens=tokens,
        num_accepted=num_accepted,
        drafts=drafts,
        logprobs=[] if num_top is None else [_token_logprob(values, c, num_top) for c in said],
    )


def _token_logprob(values: dict[str, list], column: int, num_top: int) -> TokenLogprob:
    stride = len(values["top_id"]) // len(values["choice"])
    top = slice(column * stride, column * stride + min(num_top, stride))
    return TokenLogprob(
        token_id=values["choice"][column],
        logprob=values["logprob"][column],
        top=dict(zip(values["top_id"][top], values["top_logprob"][top], strict=True)),
    )
