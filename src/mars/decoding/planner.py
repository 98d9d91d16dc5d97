"""Which drafts and masks pay: expected tokens against the time a forward takes (layout `auto`).

A column is worth feeding if it brings more tokens than the time it costs would bring otherwise.
With R tokens per second, reached so far, and dT seconds for one more column, that price is R dT
tokens. Then

    a draft brings a token now, with the probability that it and those before it are right;
    a mask brings one in the next forward, if its group is the one that is going to be read and its
    draft turns out right, and it costs a column there, too.

What is chosen changes the speed only: the text is that of `ar`, whatever is fed.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from mars.decoding.clock import STALL, Clock
from mars.decoding.drafts import Draft, accept_probabilities, cut_drafts
from mars.decoding.forecast import Forecast, survivals
from mars.decoding.plan import MOST_COLUMNS, NO_PLAN, RowPlan

_FIRST_MASKS = 2  # most per group, and groups, before a draft of the row was right
_PROBE_EVERY = 64  # forwards without masks after which a row gets some, to see whether they pay ...
_LOOKING = 0.002  # ... or more, that this and asking rows in vain take no larger share of the time
_LEAST_RETURN = 1.1  # forecasts err: so much more than it costs must bring what is fed
# What drafts have saved, less what they have cost, is an account in forwards that feed nothing. It
# may be overdrawn by so many at one row, and by less where the luck of several evens out. What is
# put aside of every forward, and where all rows are new (less of them, too), pays for another try,
# once it is enough. More than the most is forgotten.
_CREDIT, _MOST = 1.5, 30.0
_TRY, _ALLOWANCE, _NEW = 0.5, 0.006, 0.5
# Rows that had nothing to feed are asked again after 1, 2, 4, at most so many forwards; every time
# where drafts have saved as many forwards as the other number.
_LONGEST_WAIT, _AT_EASE = 32, 1.0
_CHECK_EVERY = 16  # forwards till one feeds nothing, where the account is not full


class Times(Protocol):
    """Tells how long forwards take."""

    def seconds(self, rows: int, columns: int, masks: int = 0) -> float:
        """Return the seconds of a forward of `rows` rows.

        It has `columns` columns in all, `masks` of them are masks.
        """


class Candidate(NamedTuple):
    """What a row could feed."""

    drafts: tuple[Draft, ...]
    window: int
    """Most masks per group."""
    budget: int
    """Tokens that may still be committed."""
    forecast: Forecast


NOTHING = Candidate((), 0, 1, Forecast())
"""Stands for a row that is not asked."""


class Choice(NamedTuple):
    """A plan, and the tokens that its drafts and masks are expected to bring."""

    plan: RowPlan
    gain: float


NO_CHOICE = Choice(NO_PLAN, 0.0)


def choose(row: Candidate, price: float) -> Choice:
    """Choose what to feed of a row, with masks, if a column costs `price` tokens."""
    forecast = row.forecast
    most = min(row.budget - 1, MOST_COLUMNS - 1)
    kept = cut_drafts(row.drafts, price / forecast.trust, most) if row.drafts else ()
    plain = _feed(row, kept)
    # A mask that is read costs twice, here and in the next forward; behind the first offset that
    # does not bring as much, no other does.
    worth: list[float] = []
    most = row.window if forecast.is_proven else min(row.window, _FIRST_MASKS)
    while len(worth) < most and (value := forecast.worth(len(worth))) > 2 * price:
        worth.append(value - price)
    if not worth:
        return plain
    room = (MOST_COLUMNS - 1 - len(kept)) // len(worth)
    room = room if forecast.is_proven else min(room, _FIRST_MASKS)
    by_length = enumerate(accept_probabilities(kept))
    groups = [(sum(worth) * chance, i) for i, chance in by_length if row.budget - i - 2 > 0]
    groups = [(value, i) for value, i in groups if value > len(worth) * price]
    groups = sorted(groups, reverse=True)[:room]
    if not groups:
        return plain
    lengths = tuple(sorted(i for _, i in groups))
    window = min(len(worth), row.budget - lengths[0] - 2)
    gain = plain.gain + sum(value for value, _ in groups)
    return Choice(RowPlan(plain.plan.drafts, lengths, window), gain)


def _feed(row: Candidate, drafts: Sequence[Draft]) -> Choice:
    if not drafts:
        return NO_CHOICE
    tokens = tuple(draft.token for draft in drafts)
    return Choice(RowPlan(tokens), row.forecast.trust * sum(survivals(drafts)))


class _Cost:
    """What more columns of a forward cost, in tokens."""

    def __init__(
        self,
        clock: Clock,
        rate: float,
        fixed: Sequence[RowPlan],
        rows: int,
        *,
        has_padding: bool,
    ) -> None:
        """Of a forward of `rows` rows with these plans among them, at `rate` tokens per second."""
        self._clock, self._rate, self._rows, self._has_padding = clock, rate, rows, has_padding
        self._masks = sum(plan.num_masks for plan in fixed)
        self._longest = max((_length(plan) for plan in fixed), default=0)
        self._base = rows + sum(map(_length, fixed))
        self._before = self._seconds(0, 0, 0)

    def of(self, columns: int, masks: int, longest: int) -> float:
        """Return the price of so many columns, at most `longest` of them in a row."""
        return self._rate * (self._seconds(columns, masks, longest) - self._before)

    def profit(self, choices: Sequence[Choice]) -> float:
        """Return what choices bring beyond what they must bring."""
        lengths = [_length(choice.plan) for choice in choices]
        masks = sum(choice.plan.num_masks for choice in choices)
        cost = self.of(sum(lengths), masks, max(lengths))
        return sum(choice.gain for choice in choices) - _LEAST_RETURN * cost

    def _seconds(self, columns: int, masks: int, longest: int) -> float:
        longest = max(longest, self._longest)
        all_columns = self._base + columns
        if self._has_padding:
            all_columns = _padded(self._rows, longest)
        return self._clock.all(self._rows, all_columns, self._masks + masks)


def _padded(rows: int, longest: int) -> int:
    """Return the columns of rows that are all as long as the longest."""
    return rows * (1 + longest)


def _length(plan: RowPlan) -> int:
    return len(plan.drafts) + plan.num_masks


def _choose_drafts(rows: Sequence[Candidate], cost: _Cost) -> list[Choice]:
    """Choose how many drafts of each row to feed, without masks, by what so many really cost.

    The likeliest come first. A row's drafts are ever less likely to be right, so these are the best
    choice for their number.
    """
    offers = [
        (row.forecast.trust * value, index)
        for index, row in enumerate(rows)
        for value in survivals(row.drafts[: min(row.budget, MOST_COLUMNS) - 1])
    ]
    if not offers:
        return [NO_CHOICE] * len(rows)
    offers.sort(key=lambda offer: -offer[0])
    counts, longest, gain = [0] * len(rows), 0, 0.0
    all_gain = sum(value for value, _ in offers)
    most, best = 0.0, 0
    for number, (value, index) in enumerate(offers, start=1):
        counts[index] += 1
        longest, gain = max(longest, counts[index]), gain + value
        spent = _LEAST_RETURN * cost.of(number, 0, longest)
        if gain - spent > most:
            most, best = gain - spent, number
        if all_gain - spent <= most:
            break  # no more columns cost less
    counts = [0] * len(rows)
    for _, index in offers[:best]:
        counts[index] += 1
    return [_feed(row, row.drafts[:count]) for row, count in zip(rows, counts, strict=True)]


def _luck(rows: int) -> float:
    """Return how much of one row's luck is left where so many share a forward."""
    return rows**-0.4


class Planner:
    """Plans the rows of a forward together: they share its time.

    Attributes:
        is_closing: whether nobody follows when one of the rows ends.
    """

    def __init__(self, times: Times, *, has_padding: bool = False) -> None:
        """Plan with the times of a machine.

        `has_padding` says that a forward computes as many columns for every row as for the longest.
        """
        self._seconds = lru_cache(maxsize=1 << 14)(times.seconds)
        self._has_padding = has_padding
        self._clock = Clock(self._seconds)
        self._speedup = 1.0  # tokens per second against `ar` with as many rows, lately
        self._extra = 8.0  # columns of a row beyond its last token, lately
        self._fed = 0  # forwards in a row that fed something
        self._unprobed = 0  # forwards without masks
        self._account, self._credit = 0.0, _CREDIT
        self._is_resting = False
        self._in_vain = 0  # times in a row that rows were asked and nothing was fed
        self._wait = 0  # forwards till they are asked again
        self._was_asked = False  # for the forward that runs
        self._asking = 0.0  # what it takes to ask rows and plan, in forwards that feed nothing
        self.is_closing = False

    def welcome(self, new: int, rows: int) -> None:
        """Take in that so many of the rows are new: their drafts may be worth more."""
        self._account = min(_MOST, self._account + _NEW * _luck(rows) * new / rows)
        if new:
            self._in_vain = self._wait = 0

    def is_pausing(self) -> bool:
        """Whether the next forward feeds nothing: asking rows takes time, too.

        Where drafts have cost more than they have saved, it rests until enough is put aside for
        another try. Where there was nothing to feed, it asks less and less often.
        """
        if self._wait and self._account < _AT_EASE:
            self._wait -= 1
            return True
        if self._account < -self._credit:
            self._is_resting = True
        elif self._account > _TRY - self._credit:
            self._is_resting = False
        return self._is_resting

    def plan(self, rows: Sequence[Candidate], fixed: Sequence[RowPlan] = ()) -> list[RowPlan]:
        """Plan a forward of `rows`, beside others whose plans are fixed."""
        count, self._was_asked = len(rows) + len(fixed), True
        is_unclear = self._fed >= _CHECK_EVERY and self._account < _MOST / 2
        if not any(map(_length, fixed)) and (is_unclear or not self._clock.is_set):
            return [NO_PLAN] * len(rows)  # to see how long that takes
        rate = self._speedup * count / (self._clock.alone(count) * self._worth(count))
        cost = _Cost(self._clock, rate, fixed, count, has_padding=self._has_padding)
        price = rate * self._slope(count, count + sum(map(_length, fixed)))
        ways = [_choose_drafts(rows, cost)]
        if any(row.window and row.forecast.worth(0) > 2 * price for row in rows):
            ways.append([choose(row, price) for row in rows])  # masks may pay
        profit, best = max(((cost.profit(way), way) for way in ways), key=lambda pair: pair[0])
        plans = [c.plan for c in best] if profit > 0 else [NO_PLAN] * len(rows)
        plans = self._probe(rows, plans)
        self._in_vain = 0 if any(map(_length, plans)) else self._in_vain + 1
        longest = min(_LONGEST_WAIT, int(self._asking / _LOOKING))
        self._wait = max(0, min(longest, 1 << self._in_vain >> 1) - 1)
        return plans

    def _probe(self, rows: Sequence[Candidate], plans: list[RowPlan]) -> list[RowPlan]:
        """Give the row that has had no masks for longest some now and then."""
        if self._unprobed < _PROBE_EVERY or any(plan.num_masks for plan in plans):
            return plans
        count = len(rows)
        columns = _padded(count, _FIRST_MASKS) if self._has_padding else count + _FIRST_MASKS
        cost = self._clock.all(count, columns, _FIRST_MASKS) / self._clock.alone(count) - 1
        if self._unprobed < cost / _LOOKING:
            return plans
        index = max(range(len(rows)), key=lambda i: rows[i].forecast.idle)
        row, drafts = rows[index], plans[index].drafts
        window = min(row.window, _FIRST_MASKS, row.budget - len(drafts) - 2)
        if not row.forecast.idle or window < 1:
            return plans
        plans[index] = RowPlan(drafts, (len(drafts),), window)
        return plans

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
        alone = self._clock.alone(count)
        columns, masks, expected, saved = count, 0, alone, _ALLOWANCE
        if any(map(_length, plans)):
            columns, masks = self._columns(plans), sum(plan.num_masks for plan in plans)
            expected = self._clock.all(count, columns, masks)
        self._credit = _CREDIT * _luck(count)
        self._fed = self._fed + 1 if columns > count else 0
        self._unprobed = 0 if masks else self._unprobed + 1
        if seconds is not None:
            saved -= planning / alone
            if self._was_asked:
                self._asking = planning / alone
            if columns > count:
                saved += (committed / count - 1) * self._worth(count)
                saved -= min(seconds, STALL * expected) / alone - 1
            # What takes much longer than it should is another process's doing.
            self._clock.note(count, columns, masks, min(seconds, 2 * expected))
        self._was_asked = False
        self._account = min(_MOST, self._account + saved)
        self._speedup += 0.1 * (committed / count * alone / expected - self._speedup)
        self._extra += 0.2 * (columns / count - 1 - self._extra)

    def _worth(self, rows: int) -> float:
        """Return what a token that is said earlier saves, against the same share of a forward.

        Where nobody follows, a row that ends early takes only what it adds itself out of the
        forwards to come. The rest of them is saved as far as the slowest row gains: of n alike that
        is about 1 / sqrt(n) of the mean.
        """
        if not self.is_closing or rows == 1:
            return 1.0
        alone = self._seconds(rows, rows)
        own = (alone - self._seconds(1, 1)) / (rows - 1) * rows / alone
        own = min(1.0, max(0.0, own))
        return own + (1 - own) / math.sqrt(rows)

    def _columns(self, plans: Sequence[RowPlan]) -> int:
        lengths = [_length(plan) for plan in plans]
        rows = len(plans)
        return _padded(rows, max(lengths)) if self._has_padding else rows + sum(lengths)

    def _slope(self, rows: int, columns: int) -> float:
        """Return the seconds of one more column, about where the last forwards were."""
        extra = max(4.0, self._extra) * rows
        low, high = columns + int(extra / 2), columns + int(extra * 1.5) + 1
        difference = self._seconds(rows, high) - self._seconds(rows, low)
        return self._clock.slope(masks=1) * difference / (high - low)
