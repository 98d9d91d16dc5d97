"""What forwards really take: the times of a table, corrected by those that were measured."""

from collections.abc import Callable
from dataclasses import dataclass

STALL = 1.3  # what takes so many times as long as expected is another process's doing
_FADING = 0.97  # of times measured, per forward
_TRUST_IN_TABLE = 0.01  # seconds of forwards, which the table is thought to have told right


class Clock:
    """What forwards take now.

    The table knows forwards of greedy rows in some quiet hour. Sampling makes columns dearer, as do
    long contexts and other work on the machine.
    """

    def __init__(self, seconds: Callable[..., float]) -> None:
        """Take what the table says, as `planner.Times.seconds` does."""
        self._seconds = seconds
        # Of forwards with drafts alone, and of those with masks.
        self._more = _Correction(), _Correction()
        self._alone = 1.0
        # Whether a forward that fed nothing was measured: the table may be of a busy hour.
        self.is_set = False

    def slope(self, masks: int) -> float:
        """Return how much longer than in the table more columns take, so many masks among them."""
        return self._more[masks > 0].factor

    def alone(self, rows: int) -> float:
        """Return the seconds of a forward of so many rows that feeds nothing."""
        return self._seconds(rows, rows) * self._alone

    def all(self, rows: int, columns: int, masks: int = 0) -> float:
        """Return the seconds of a forward with so many columns in all, and masks among them."""
        more = self._seconds(rows, columns, masks) - self._seconds(rows, rows)
        return self.alone(rows) + self.slope(masks) * more

    def note(self, rows: int, columns: int, masks: int, seconds: float) -> None:
        """Take in how long a forward took."""
        table = self._seconds(rows, rows)
        if columns == rows:
            # Cut as for the account: what is dear on a busy machine is dear for both.
            now = seconds / table
            if self.is_set:
                now = self._alone + 0.25 * (min(now, STALL * self._alone) - self._alone)
            self._alone = now
            self.is_set = True
            return
        more = self._seconds(rows, columns, masks) - table
        self._alone *= 1 + 0.02 * (seconds / self.all(rows, columns, masks) - 1)
        self._more[masks > 0].note(seconds - self.alone(rows), more)


@dataclass(slots=True)
class _Correction:
    """Seconds that something took against those that were expected; both fade."""

    measured: float = _TRUST_IN_TABLE
    expected: float = _TRUST_IN_TABLE

    @property
    def factor(self) -> float:
        return min(4.0, max(0.25, self.measured / self.expected))

    def note(self, measured: float, expected: float) -> None:
        faded = 1 - _FADING
        self.measured += measured + faded * (_TRUST_IN_TABLE - self.measured)
        self.expected += expected + faded * (_TRUST_IN_TABLE - self.expected)
