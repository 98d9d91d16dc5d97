"""How much of a mode's answers is what another mode says."""

from collections.abc import Sequence


def agreement(answers: Sequence[list[int]], references: Sequence[list[int]]) -> tuple[float, float]:
    """Return (share of tokens before the first difference, share of equal answers)."""
    leading = total = 0
    for answer, reference in zip(answers, references, strict=True):
        pairs = zip(answer, reference, strict=False)
        differs = (i for i, (a, r) in enumerate(pairs) if a != r)
        leading += next(differs, min(len(answer), len(reference)))
        total += max(len(answer), len(reference))
    equal = sum(a == r for a, r in zip(answers, references, strict=True))
    return leading / total, equal / len(references)
