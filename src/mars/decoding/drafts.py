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
_MOST_PLACES = 64
# How often the token after a match of n is what comes next, measured on answers of the default
# model (docs/log.md). A draft that turns out right makes the match one longer.
_MATCH_CONFIDENCE = {2: 0.54, 3: 0.65, 4: 0.70, 5: 0.75, 6: 0.79, 7: 0.82, 8: 0.93}


class Draft(NamedTuple):
    """A guess at a token."""

    token: int
    confidence: float
    """Probability that it is right if those before it are."""


class NgramIndex:
    """Remember where every pair of tokens occurred. O(1) work per token, at `draft`."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._num_known = SHORTEST_MATCH  # tokens that `_follows` knows, or that follow no pair
        self._follows: dict[tuple[int, int], list[int]] = {}  # pair -> places of tokens after it

    def push(self, token: int) -> None:
        """Append a token."""
        self._tokens.append(token)

    def _catch_up(self) -> None:
        """Note which pair every new token follows."""
        tokens, follows = self._tokens, self._follows
        for place in range(self._num_known, len(tokens)):
            follows.setdefault((tokens[place - 2], tokens[place - 1]), []).append(place)
        self._num_known = max(self._num_known, len(tokens))

    def draft(self, limit: int) -> tuple[Draft, ...]:
        """Continue as after the latest occurrence of the longest ending of the text.

        A continuation that reaches the end of the text goes on with itself: it repeats. Of a pair
        that is all over the text, the latest occurrences are looked at.
        """
        self._catch_up()
        tokens, end = self._tokens, len(self._tokens)
        if end < SHORTEST_MATCH:
            return ()
        places = self._follows.get((tokens[-2], tokens[-1]))
        if places is None:
            return ()
        longest = start = 0
        for place in reversed(places[-_MOST_PLACES:]):
            length = SHORTEST_MATCH
            while length < min(LONGEST_MATCH, place) and (
                tokens[place - length - 1] == tokens[end - length - 1]
            ):
                length += 1
            if length > longest:
                longest, start = length, place
                if length == LONGEST_MATCH:
                    break
        return tuple(
            Draft(
                tokens[start + i % (end - start)],
                _MATCH_CONFIDENCE[min(LONGEST_MATCH, longest + i)],
            )
            for i in range(min(limit, 2 * longest))
        )


def merge_drafts(masks: Sequence[Draft], ngram: Sequence[Draft]) -> tuple[Draft, ...]:
    """Take what both sources say, then the rest of the one that is surer of its next token.

    So an n-gram extends mask drafts that it agrees with, and fills in where there are none.
    """
    if not masks or not ngram:
        return (*masks, *ngram)
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
    if not drafts:
        return ()
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
