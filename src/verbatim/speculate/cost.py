"""What a step takes. In: the rows and the seconds of each step. Out: the seconds of a step of any size, and the price of one row more."""

from __future__ import annotations

from typing import NamedTuple

PACE, SHAPE = 0.3, 0.05  # how fast the machine's pace, and how slowly the shape of a step's cost, follow what is measured
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
        self._shape: dict[int, tuple[float, float, int]] = {}  # size class, rising -> (mean rows, times the pace, times seen)
        self._known: dict[float, float] = {}  # seconds by rows, until more is learnt

    def learn(self, rows: int, seconds: float) -> None:
        if rows < 1 or seconds <= 0:
            return
        if not self._pace:
            self._pace = seconds / (1 + USUAL * (rows - 1))
        size = rows if rows <= 32 else 32 + rows.bit_length()
        if size not in self._shape:
            # One time is no evidence against what is usual: a size that was never seen starts with what its neighbours say.
            first = (float(rows), self._times(rows), 1)
            self._shape = dict(sorted([*self._shape.items(), (size, first)]))
        mean_rows, known, seen = self._shape[size]
        self._pace *= min(max(seconds / (self._pace * known), 0.5), 2.0) ** (PACE * min(seen, 8) / 8)
        found = min(seconds / self._pace, 2 * known)
        known += max(SHAPE, 1 / (seen + 1)) * (found - known)
        self._shape[size] = (mean_rows + DRIFT * (rows - mean_rows), known, seen + 1)
        self._known.clear()

    def _times(self, rows: float) -> float:
        """Of the pace: on the line between the sizes on both sides, where more rows never take less; beyond the largest, what is usual."""
        at, high = 0.0, 0.0
        for where, value, _ in self._shape.values():
            below, high = high, max(high, value)
            if where > rows:
                if not at:
                    return max(high - USUAL * (where - rows), high / where)
                return below + (high - below) * (rows - at) / (where - at)
            at = where
        return high + USUAL * (rows - at) if at else 1 + USUAL * (rows - 1)

    @property
    def sizes(self) -> int:
        """Of steps, that were measured."""
        return len(self._shape)

    def seconds(self, rows: float) -> float:
        """Of a step of this many rows; 0 until steps of two sizes were seen."""
        if len(self._shape) < 2:
            return 0.0
        found = self._known.get(rows)
        if found is None:
            found = self._known[rows] = self._times(rows) * self._pace
        return found

    def load(self, running: int) -> Load:
        seconds, least = self.seconds(running), LEAST * self.seconds(1)
        return Load(running, seconds, max((self.seconds(running + NEAR) - seconds) / NEAR, least), least)
