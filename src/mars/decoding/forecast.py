"""What a row's drafts are worth: learned from those that it has had."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mars.decoding.drafts import Draft

_PRIOR_SURVIVAL = (0.65, 0.42, 0.27, 0.17)  # of drafts of masks, by offset (docs/log.md)
# Of what it is for greedy rows, 1 / (1 + T^6) is left at temperature T. Measured: 0.8 at 0.7,
# 0.5 at 1, 0.2 at 1.3, 0.05 at 1.6, 0.01 at 2 (docs/log.md).
_POWER = 6
_DECAY = 0.9  # of what a row has shown, per forward
_PRIOR = 0.4  # drafts that a row is thought to have had, all as expected


def survivals(drafts: Sequence[Draft]) -> list[float]:
    """Return for each draft the probability that it and those before it are right."""
    values, value = [], 1.0
    for draft in drafts:
        value *= draft.confidence
        values.append(value)
    return values


@dataclass(slots=True)
class Forecast:
    """What a row's drafts have been worth so far."""

    survival: list[float] = field(default_factory=list)
    """For every offset of a mask, the probability that its draft and those before it are right."""
    expected: float = _PRIOR
    """Drafts that were to be right by their confidences, and ..."""
    accepted: float = _PRIOR
    """... that were; both fade."""
    text: list[float] = field(default_factory=lambda: [0.0] * 8)
    """The same as `survival` for drafts that the text suggests; 0 where there were none."""
    idle: int = 0
    """Forwards since it had masks."""
    prior: float = 1.0
    """What masks are thought to be worth before the row had any, against those of a greedy row."""

    @classmethod
    def at_temperature(cls, temperature: float) -> "Forecast":
        """Start the forecast of a row that samples so, or that is greedy (0)."""
        return cls(prior=1 / (1 + min(temperature, 9.0) ** _POWER))

    @property
    def is_proven(self) -> bool:
        """Whether a draft was right."""
        return self.accepted > _PRIOR

    @property
    def trust(self) -> float:
        """By what the row's confidences have to be multiplied."""
        return min(1.25, self.accepted / self.expected)

    def at(self, offset: int) -> float:
        """Return the survival at an offset, from 0."""
        if offset < len(self.survival):
            return self.survival[offset]
        last = len(_PRIOR_SURVIVAL) - 1
        return self.prior * _PRIOR_SURVIVAL[min(offset, last)] * 0.6 ** max(0, offset - last)

    def worth(self, offset: int) -> float:
        """Return what a mask's draft is expected to bring beyond those that the text suggests."""
        text = self.text[offset] if offset < len(self.text) else 0.0
        return self.trust * self.at(offset) * (1 - text)

    def see(self, suggested: Sequence[Draft]) -> None:
        """Take in what the text suggests to come next."""
        self.text = [0.9 * value for value in self.text]
        for offset, value in enumerate(survivals(suggested[: len(self.text)])):
            self.text[offset] += 0.1 * value

    def learn(self, fed: Sequence[Draft], accepted: int, found: Sequence[Draft]) -> None:
        """Take in a forward: what was fed, how much of it was right, what its masks say."""
        for value in survivals(fed):
            self.expected += value
        self.accepted = _PRIOR + _DECAY * (self.accepted - _PRIOR + accepted)
        self.expected = _PRIOR + _DECAY * (self.expected - _PRIOR)
        for offset, value in enumerate(survivals(found)):
            blend = value + 0.7 * (self.at(offset) - value)
            self.survival[offset : offset + 1] = [blend]
        self.idle = 0 if found else self.idle + 1
