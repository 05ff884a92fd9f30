"""What a step takes. In: the rows and the seconds of each step. Out: the seconds of a step of any size, and the price of one row more."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

PACE, SHAPE = (
    0.3,
    0.05,
)  # how fast the machine's pace, and how slowly the shape of a step's cost, follow what is measured
DRIFT = 0.12  # weight of the newest observation in the mean size of a class of sizes
NEAR = 3  # rows over which the price of one is averaged
LEAST = 0.08  # of a step of one row, what a further row costs: never less, whatever was measured
USUAL = 0.15  # and before anything is known


class Load(NamedTuple):
    """A step of plain rows, one for each sequence that writes in it."""

    running: int
    seconds: float  # 0 while nothing is known
    row: float  # what one more row adds
    least: float  # and never less, whatever was measured

    def price(self, guess_cost: float) -> float:
        """What one more draft costs, in times of a token; 0 while nothing is known."""
        return (self.row + guess_cost) * self.running / self.seconds if self.seconds else 0.0


class StepCost:
    """Seconds of a step against its rows, from what was measured: a line between the sizes nearest by.

    The machine's pace and the shape of the curve are learnt apart. Another program may halve the pace for a second, and steps of one size may not
    be seen for as long: were each size a time of its own, a slow second would make whatever was measured before it look cheap.
    The curve has steps (8 rows may fill a kernel that the 9th starts anew), so small sizes are kept one by one."""

    def __init__(self) -> None:
        self._pace = 0.0  # seconds of a step whose shape is 1
        self._at: dict[
            float, int
        ] = {}  # size class -> its place in the lists, which rise with the size
        self._rows: list[float] = []  # mean rows,
        self._shape: list[float] = []  # what was measured, in times of the pace,
        self._high: list[float] = []  # the most of that up to this size: more rows never take less,
        self._seen: list[int] = []  # and how often

    def learn(self, rows: int, seconds: float) -> None:
        if rows < 1 or seconds <= 0:
            return
        if not self._pace:
            self._pace = seconds / (1 + USUAL * (rows - 1))
        size = (
            rows if rows <= 32 else -rows.bit_length()
        )  # below 0: no class of sizes is taken for one size
        at = self._at.get(size)
        if at is None:
            at = self._begin(size, rows)
        known, seen, pace = self._shape[at], self._seen[at], self._pace
        pace *= min(max(seconds / (pace * known), 0.5), 2.0) ** (PACE * min(seen, 8) / 8)
        found = min(seconds / pace, 2 * known)
        self._shape[at] = known + max(SHAPE, 1 / (seen + 1)) * (found - known)
        self._seen[at], self._pace = seen + 1, pace
        if size < 0:
            self._rows[at] += DRIFT * (rows - self._rows[at])
        self._rise(at)

    def _begin(self, size: int, rows: int) -> int:
        """One time is no evidence against what is usual: a size that was never seen starts with what its neighbours say."""
        first = self._times(rows)
        at = bisect_right(self._rows, rows)
        self._rows.insert(at, float(rows))
        self._shape.insert(at, first)
        self._high.insert(at, first)
        self._seen.insert(at, 1)
        self._at = {other: place + (place >= at) for other, place in self._at.items()}
        self._at[size] = at
        return at

    def _rise(self, at: int) -> None:
        """The shape has changed at this size: as far as it shows, so has the most up to those above."""
        shape, most = self._shape, self._high
        high = most[at - 1] if at else 0.0
        for i in range(at, len(shape)):
            if shape[i] > high:
                high = shape[i]
            if most[i] == high:
                return
            most[i] = high

    def _times(self, rows: float) -> float:
        """Of the pace: on the line between the sizes on both sides; beyond the largest, what is usual."""
        above = bisect_right(self._rows, rows)  # the first size that is larger
        if above == len(self._rows):
            return (
                self._high[-1] + USUAL * (rows - self._rows[-1])
                if above
                else 1 + USUAL * (rows - 1)
            )
        high, where = self._high[above], self._rows[above]
        if not above:
            return max(high - USUAL * (where - rows), high / where)
        below, at = self._high[above - 1], self._rows[above - 1]
        return below + (high - below) * (rows - at) / (where - at)

    @property
    def sizes(self) -> int:
        """Of steps, that were measured."""
        return len(self._rows)

    def seconds(self, rows: float) -> float:
        """Of a step of this many rows; 0 until steps of two sizes were seen."""
        if len(self._rows) < 2:
            return 0.0
        at = self._at.get(rows)
        return (self._times(rows) if at is None else self._high[at]) * self._pace

    def further(self, load: Load, count: int) -> list[float]:
        """What 1, 2, ... `count` rows more add to such a step, where its seconds are known."""
        running, plain, _, least = load
        places, high, pace = self._at, self._high, self._pace
        out = []
        for j in range(
            1, count + 1
        ):  # as seconds() does, without a call for each: this is asked in every step
            at = places.get(running + j)
            more = (self._times(running + j) if at is None else high[at]) * pace - plain
            out.append(more if more > j * least else j * least)
        return out

    def load(self, running: int) -> Load:
        seconds = self.seconds(running)
        least = LEAST * (seconds if running == 1 else self.seconds(1))
        row = (self.seconds(running + NEAR) - seconds) / NEAR
        return Load(running, seconds, row if row > least else least, least)
