"""How often drafts are right, offset by offset, and how well their confidence says so."""

from collections.abc import Iterable, Sequence

from mars.decoding.request import DraftOutcome


def acceptance_by_offset(outcomes: Iterable[DraftOutcome]) -> list[float]:
    """Return the share of right drafts at each offset, of those whose predecessors were right."""
    right: list[int] = []
    count: list[int] = []
    for outcome in outcomes:
        while len(count) < outcome.offset:
            right.append(0)
            count.append(0)
        right[outcome.offset - 1] += outcome.is_right
        count[outcome.offset - 1] += 1
    return [r / n if n else 0.0 for r, n in zip(right, count, strict=True)]


def calibration_error(outcomes: Sequence[DraftOutcome], *, num_bins: int = 15) -> float:
    """Return the expected calibration error (Guo et al., 2017) of the confidences.

    Confidences are put into bins of equal width; the error is the mean distance, weighted by the
    number of drafts, of a bin's mean confidence from its share of right drafts. 0 is perfect.
    """
    bins: list[list[DraftOutcome]] = [[] for _ in range(num_bins)]
    for outcome in outcomes:
        bins[min(num_bins - 1, int(outcome.confidence * num_bins))].append(outcome)
    distance = sum(abs(sum(o.confidence - o.is_right for o in members)) for members in bins)
    return distance / len(outcomes) if outcomes else 0.0
