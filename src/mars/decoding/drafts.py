"""Drafts: guesses at the next tokens, and what to do with guesses of two sources.

Drafts come from masks, or from the text itself: what followed the last time it read as it does
now (prompt lookup decoding). Nothing here changes what is said, only how fast. Knows no torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Matches of n tokens, from SHORTEST to LONGEST, are looked for; one of n proposes 2n tokens.
SHORTEST_MATCH = 2
LONGEST_MATCH = 8
MOST_NGRAM_DRAFTS = 2 * LONGEST_MATCH
# How often the token after a match of n is what comes next, measured on answers of the default
# model (docs/log.md). A draft that turns out right makes the match one longer.
_MATCH_CONFIDENCE = {2: 0.54, 3: 0.65, 4: 0.70, 5: 0.75, 6: 0.79, 7: 0.82, 8: 0.93}


class Draft(NamedTuple):
    """A guess at a token."""

    token: int
    confidence: float
    """Probability that it is right if those before it are."""


class NgramIndex:
    """Remember where every short run of tokens occurred last. O(1) work per token, at `draft`."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._num_known = 0  # tokens of which `_follows` knows what they follow
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> place of the token after it

    def push(self, token: int) -> None:
        """Append a token."""
        self._tokens.append(token)

    def _catch_up(self) -> None:
        """Note that every new token follows the n-grams that end before it."""
        for end in range(self._num_known, len(self._tokens)):
            for n in range(SHORTEST_MATCH, min(LONGEST_MATCH, end) + 1):
                self._follows[tuple(self._tokens[end - n : end])] = end
        self._num_known = len(self._tokens)

    def draft(self, limit: int) -> tuple[Draft, ...]:
        """Continue as after the latest occurrence of the longest ending of the text.

        A continuation that reaches the end of the text goes on with itself: it repeats.
        """
        self._catch_up()
        end = len(self._tokens)
        for n in range(min(LONGEST_MATCH, end), SHORTEST_MATCH - 1, -1):
            start = self._follows.get(tuple(self._tokens[-n:]))
            if start is not None:
                return tuple(
                    Draft(
                        self._tokens[start + i % (end - start)],
                        _MATCH_CONFIDENCE[min(LONGEST_MATCH, n + i)],
                    )
                    for i in range(min(limit, 2 * n))
                )
        return ()


def merge_drafts(masks: Sequence[Draft], ngram: Sequence[Draft]) -> tuple[Draft, ...]:
    """Take what both sources say, then the rest of the one that is surer of its next token.

    So an n-gram extends mask drafts that it agrees with, and fills in where there are none.
    """
    common = 0
    while common < min(len(masks), len(ngram)) and masks[common].token == ngram[common].token:
        common += 1
    agreed = [
        Draft(mask.token, max(mask.confidence, other.confidence))
        for mask, other in zip(masks[:common], ngram[:common], strict=True)
    ]
    rests = [rest for rest in (masks[common:], ngram[common:]) if rest]
    surest = max(rests, key=lambda rest: rest[0].confidence, default=())
    return (*agreed, *surest)


def cut_drafts(drafts: Sequence[Draft], bound: float, limit: int) -> tuple[Draft, ...]:
    """Keep at most `limit` drafts, as long as all up to it are right with probability >= `bound`.

    Whether a draft stays depends on itself and on those before it, never on later ones.
    """
    kept, survival = 0, 1.0
    for draft in drafts[: max(0, limit)]:
        survival *= draft.confidence
        if survival < bound:
            break
        kept += 1
    return tuple(drafts[:kept])


def accept_probabilities(drafts: Sequence[Draft]) -> list[float]:
    """Return, for i = 0 .. k, the probability that exactly the first i of k drafts are right."""
    probabilities, survival = [], 1.0
    for draft in drafts:
        probabilities.append(survival * (1 - draft.confidence))
        survival *= draft.confidence
    return [*probabilities, survival]
