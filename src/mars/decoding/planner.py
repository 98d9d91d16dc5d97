"""Which drafts and masks pay: expected tokens against the time a forward takes (layout `auto`).

A column is worth feeding if it brings more tokens than the time it costs would bring otherwise.
With R tokens per second, reached so far, and dT seconds for one more column, that price is R dT
tokens. Then

    a draft brings a token now, with the probability that it and those before it are right;
    a mask brings one in the next forward, if its group is the one that is going to be read and its
    draft turns out right, and it costs a column there, too.

What is chosen changes the speed only: the text is that of `ar`, whatever is fed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mars.decoding.drafts import Draft, accept_probabilities, cut_drafts
from mars.decoding.plan import MOST_COLUMNS, RowPlan

_PRIOR_SURVIVAL = (0.65, 0.42, 0.27, 0.17)  # of drafts of masks, by offset (docs/log.md)
_DECAY = 0.9  # of what a row has shown, per forward
_PRIOR = 0.4  # drafts that a row is thought to have had, all as expected
_FIRST_MASKS = 2  # most per group, and groups, before a draft of the row was right
# What is fed must bring a quarter more than it costs, and this much of a token per row on top:
# forecasts err, and planning takes time, too.
_LEAST_RETURN, _MARGIN = 1.25, 0.02
_PATIENCE = 4  # forwards that feed nothing, after which the planner looks away, ...
_PAUSES = 16, 256  # ... at first for so many, and twice as many each time, up to this
_TRIES, _ENOUGH = 6, 1.1  # forwards that feed something, after which it looks whether that has paid
_CLEAR, _CHECK_EVERY = 1.5, 16  # where it pays no more, so many forwards till one feeds nothing
_PROBE_EVERY = 64  # forwards after which a row without masks gets some, to see whether they pay


_FADING = 0.97  # of times measured, per forward
_TRUST_IN_TABLE = 0.01  # seconds of forwards, which the table is thought to have told right


class Times(Protocol):
    """Tells how long forwards take."""

    def seconds(self, rows: int, columns: int) -> float:
        """Return the seconds of a forward of `rows` rows with `columns` columns in all."""


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
        return _PRIOR_SURVIVAL[min(offset, last)] * 0.6 ** max(0, offset - last)

    def worth(self, offset: int) -> float:
        """Return what a mask's draft is expected to bring beyond those that the text suggests."""
        text = self.text[offset] if offset < len(self.text) else 0.0
        return self.trust * self.at(offset) * (1 - text)

    def see(self, suggested: Sequence[Draft]) -> None:
        """Take in what the text suggests to come next."""
        values = survivals(suggested)
        for offset, value in enumerate(self.text):
            now = values[offset] if offset < len(values) else 0.0
            self.text[offset] = value + 0.1 * (now - value)

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


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a row could feed."""

    drafts: tuple[Draft, ...]
    window: int
    """Most masks per group."""
    budget: int
    """Tokens that may still be committed."""
    forecast: Forecast


NOTHING = Candidate((), 0, 1, Forecast())
"""Stands for a row that is not asked."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, and the tokens that its drafts and masks are expected to bring."""

    plan: RowPlan
    gain: float


NO_CHOICE = Choice(RowPlan(), 0.0)


def survivals(drafts: Sequence[Draft]) -> list[float]:
    """Return for each draft the probability that it and those before it are right."""
    values, value = [], 1.0
    for draft in drafts:
        value *= draft.confidence
        values.append(value)
    return values


def choose(row: Candidate, price: float) -> tuple[Choice, Choice]:
    """Choose what to feed of a row, if a column costs `price` tokens: with masks, and without."""
    forecast, plain = row.forecast, NO_CHOICE
    kept: tuple[Draft, ...] = ()
    if row.drafts:
        most = min(row.budget - 1, MOST_COLUMNS - 1)
        kept = cut_drafts(row.drafts, price / forecast.trust, most)
    if kept:
        tokens = tuple(draft.token for draft in kept)
        plain = Choice(RowPlan(tokens), forecast.trust * sum(survivals(kept)))
    # A mask that is read costs twice, here and in the next forward; behind the first offset that
    # does not bring as much, no other does.
    worth: list[float] = []
    most = row.window if forecast.is_proven else min(row.window, _FIRST_MASKS)
    while len(worth) < most and (value := forecast.worth(len(worth))) > 2 * price:
        worth.append(value - price)
    if not worth and forecast.idle >= _PROBE_EVERY and price < 0.5:
        worth = [2 * price] * most
    if not worth:
        return plain, plain
    room = (MOST_COLUMNS - 1 - len(kept)) // len(worth)
    room = room if forecast.is_proven else min(room, _FIRST_MASKS)
    by_length = enumerate(accept_probabilities(kept))
    groups = [(sum(worth) * chance, i) for i, chance in by_length if row.budget - i - 2 > 0]
    groups = [(value, i) for value, i in groups if value > len(worth) * price]
    groups = sorted(groups, reverse=True)[:room]
    if not groups:
        return plain, plain
    lengths = tuple(sorted(i for _, i in groups))
    window = min(len(worth), row.budget - lengths[0] - 2)
    gain = plain.gain + sum(value for value, _ in groups)
    return Choice(RowPlan(plain.plan.drafts, lengths, window), gain), plain


class Planner:
    """Plans the rows of a forward together: they share its time."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._clock = _Clock(times)
        self._speedup = 1.0  # tokens per second against `ar` with as many rows, lately
        self._extra = 8.0  # columns of a row beyond its last token, lately
        self._idle = 0  # forwards in a row that fed nothing
        self._pause = 0  # forwards until it looks again
        self._pause_rows = self._rows = 0
        self._next_pause = _PAUSES[0]
        self._fed = 0  # forwards in a row that fed something
        self._tries = 0  # the same since the last rest, and the seconds they saved and cost
        self._won = self._spent = self._paid = 0.0

    def is_pausing(self, rows: int, new: int = 0) -> bool:
        """Whether the next forward, of so many rows, feeds nothing: asking rows takes time, too.

        With a quarter of the rows gone, columns are cheaper, and with a quarter of them new, the
        text is another: the pause is over.
        """
        if rows <= 0.75 * self._pause_rows or new >= rows / 4:
            self._pause = 0
        self._pause = max(0, self._pause - 1)
        return self._pause > 0

    def plan(self, rows: Sequence[Candidate], fixed: Sequence[RowPlan] = ()) -> list[RowPlan]:
        """Plan a forward of `rows`, beside others whose plans are fixed."""
        count = self._rows = len(rows) + len(fixed)
        base = count + sum(len(plan.drafts) + plan.num_masks for plan in fixed)
        is_unclear = self._fed >= _CHECK_EVERY and self._won < _CLEAR * self._spent
        if base == count and (is_unclear or not self._clock.is_set):
            return [RowPlan()] * len(rows)  # to see how long that takes
        rate = self._speedup * count / self._clock.alone(count)
        price = rate * self._slope(count, base)
        chosen = [choose(row, price) for row in rows]
        ways = [[masked for masked, _ in chosen], [plain for _, plain in chosen]]
        alone = self._clock.all(count, base)

        def profit(choices: list[Choice]) -> float:
            columns = base + sum(len(c.plan.drafts) + c.plan.num_masks for c in choices)
            cost = rate * (self._clock.all(count, columns) - alone)
            return sum(c.gain for c in choices) - _LEAST_RETURN * cost - _MARGIN * len(rows)

        best = max(ways, key=profit)
        if profit(best) > 0:
            self._idle = 0
            return [choice.plan for choice in best]
        self._idle += 1
        if self._idle >= _PATIENCE:
            self._rest()
        return [RowPlan()] * len(rows)

    def learn(
        self,
        plans: Sequence[RowPlan],
        committed: int,
        seconds: float | None,
        planning: float = 0.0,
    ) -> None:
        """Take in what a forward of these plans has committed, in all rows, and how long it took.

        `seconds` is None if it did more, such as reading a prompt; planning took time before.
        """
        count = len(plans)
        columns = sum(1 + len(plan.drafts) + plan.num_masks for plan in plans)
        alone = self._clock.alone(count)
        self._fed = self._fed + 1 if columns > count else 0
        if seconds is not None:
            # What takes twice as long as it should is another process's doing.
            seconds = min(seconds, 2 * self._clock.all(count, columns))
            self._clock.note(count, columns, seconds)
            if columns > count:
                self._judge((committed - count) * alone / count, seconds + planning - alone)
        speedup = committed / count * alone / self._clock.all(count, columns)
        self._speedup += 0.1 * (speedup - self._speedup)
        self._extra += 0.2 * (columns / count - 1 - self._extra)

    def _judge(self, won: float, spent: float) -> None:
        """Compare the seconds that drafts have saved of late with those that they have cost.

        A forward saves what the one before has paid for: its masks make the drafts.
        """
        self._tries += 1
        self._won = _DECAY * self._won + won
        self._spent, self._paid = _DECAY * self._spent + self._paid, spent
        # Where it has rested before, for want of success, it looks sooner.
        enough = _TRIES if self._next_pause == _PAUSES[0] else _TRIES // 2
        if self._tries >= enough and self._won < _ENOUGH * self._spent:
            self._rest()
        elif self._tries >= 2 * _TRIES:
            self._next_pause = _PAUSES[0]

    def _rest(self) -> None:
        self._idle = self._tries = 0
        self._won = self._spent = self._paid = 0.0
        self._pause, self._pause_rows = self._next_pause, self._rows
        self._next_pause = min(2 * self._next_pause, _PAUSES[1])

    def _slope(self, rows: int, columns: int) -> float:
        """Return the seconds of one more column, about where the last forwards were."""
        extra = max(4.0, self._extra) * rows
        low, high = columns + int(extra / 2), columns + int(extra * 1.5) + 1
        difference = self._times.seconds(rows, high) - self._times.seconds(rows, low)
        return self._clock.slope * difference / (high - low)


class _Clock:
    """What forwards really take: the table's times, corrected by those that were measured.

    The table knows forwards of greedy rows in some quiet hour. Sampling makes columns dearer, as do
    long contexts and other work on the machine.
    """

    def __init__(self, times: Times) -> None:
        self._times = times
        # Seconds of what more columns took, and what the table says of them; both fade.
        self._measured = self._expected = _TRUST_IN_TABLE
        self._alone = 1.0
        # Whether a forward that fed nothing was measured: the table may be of a busy hour.
        self.is_set = False

    @property
    def slope(self) -> float:
        """How much longer than in the table a column takes."""
        return min(4.0, max(0.25, self._measured / self._expected))

    def alone(self, rows: int) -> float:
        """Return the seconds of a forward of so many rows that feeds nothing."""
        return self._times.seconds(rows, rows) * self._alone

    def all(self, rows: int, columns: int) -> float:
        """Return the seconds of a forward with so many columns in all."""
        more = self._times.seconds(rows, columns) - self._times.seconds(rows, rows)
        return self.alone(rows) + self.slope * more

    def note(self, rows: int, columns: int, seconds: float) -> None:
        """Take in how long a forward took."""
        table = self._times.seconds(rows, rows)
        if columns == rows:
            change = seconds / table - self._alone
            # Something else on the machine makes forwards longer, nothing makes them shorter.
            weight = 1.0 if not self.is_set else 0.5 if change < 0 else 0.1
            self._alone += weight * change
            self.is_set = True
            return
        more = self._times.seconds(rows, columns) - table
        self._alone *= 1 + 0.02 * (seconds / self.all(rows, columns) - 1)
        faded = 1 - _FADING
        self._measured += seconds - self.alone(rows) + faded * (_TRUST_IN_TABLE - self._measured)
        self._expected += more + faded * (_TRUST_IN_TABLE - self._expected)
