"""Which drafts to commit: confidence of a distribution, and the run of confident drafts.

Shapes: B rows, D drafts, V vocabulary.
"""

import torch

from mars.decoding.options import Confidence


def confidence(logits: torch.Tensor, metric: Confidence) -> torch.Tensor:
    """Measure how sure the distribution of the logits is of its next token.

    The metrics of the paper (MARS, appendix D), always in float32: in bfloat16 a probability
    above 0.998 rounds to 1 and would pass any threshold.

    Args:
        logits: (..., V), any float dtype; -inf marks excluded tokens.
        metric: "probability" (top-1), "entropy" (nats) or "margin" (top-1 minus top-2).

    Returns:
        float32, (...).
    """
    logits = logits.float()
    if metric == "entropy":
        return torch.special.entr(logits.softmax(-1)).sum(-1)
    log_total = logits.logsumexp(-1)
    if metric == "margin":
        top = (logits.topk(2, dim=-1).values - log_total[..., None]).exp()
        return top[..., 0] - top[..., 1]
    return (logits.amax(-1) - log_total).exp()


def is_confident(logits: torch.Tensor, threshold: torch.Tensor, metric: Confidence) -> torch.Tensor:
    """Tell where `confidence` passes the threshold: entropy from above, the others from below.

    Args:
        logits: (..., V).
        threshold: float32, broadcasts to (...).
        metric: see `confidence`.

    Returns:
        bool, (...).
    """
    measured = confidence(logits, metric)
    return measured <= threshold if metric == "entropy" else measured >= threshold


def leading_run(confident_BD: torch.Tensor, limit_B: torch.Tensor) -> torch.Tensor:
    """Count the drafts to commit: from the left up to the first doubtful one, at most `limit_B`.

    Args:
        confident_BD: bool.
        limit_B: int64, drafts a row may commit at most.

    Returns:
        int64, (B,).
    """
    run_B = confident_BD.long().cumprod(dim=1).sum(dim=1)
    return torch.minimum(run_B, limit_B)
