"""Step-cost curve. In: rows and seconds of each step. Out: predicted seconds of a step of any
size."""

from __future__ import annotations

from bisect import bisect_right

SPEED_WEIGHT = 0.3  # weight of the newest step in the machine's speed, which changes fast
CURVE_WEIGHT = 0.05  # weight of the newest step in the curve over sizes, which changes slowly
SIZE_WEIGHT = 0.12  # weight of the newest step in the mean rows of a size class
DEFAULT_ROW_COST = 0.15  # as a fraction of a one-row step, until steps are measured
GPU_ROW_COST = 0.02


class StepCost:
    """Seconds of a step as a function of its rows: linear interpolation between measured sizes.

    The machine's speed and the shape of the curve are learnt separately. Another program may halve
    the speed for a second, during which only some sizes are measured; with one absolute time per
    size, all sizes measured before would look cheap. The curve has jumps (8 rows may fill a tile
    that the 9th exceeds), so sizes up to 32 are kept individually.

    `drafts`: the curve of steps with drafts. It is another one where steps overlap: a draft ends
    that, which costs more than its row."""

    def __init__(self, *, overlaps: bool = False, row_cost: float = DEFAULT_ROW_COST) -> None:
        self._row_cost = row_cost
        self.drafts: StepCost = StepCost(row_cost=GPU_ROW_COST) if overlaps else self
        self._unit_seconds = 0.0  # seconds of a step whose relative cost is 1
        self._index: dict[float, int] = {}  # size class -> index into the lists, sorted by rows
        self._rows: list[float] = []  # mean rows
        self._curve: list[float] = []  # measured cost, in units of _unit_seconds
        self._monotone: list[float] = []  # running maximum: more rows never cost less
        self._counts: list[int] = []  # steps measured

    def learn(self, rows: int, seconds: float) -> None:
        if rows < 1 or seconds <= 0:
            return
        if not self._unit_seconds:
            self._unit_seconds = seconds / (1 + self._row_cost * (rows - 1))
        # Larger steps share a class per power of two; negative, to differ from an exact size.
        size = rows if rows <= 32 else -rows.bit_length()
        at = self._index.get(size)
        if at is None:
            at = self._add_size(size, rows)
        known, count, unit = self._curve[at], self._counts[at], self._unit_seconds
        unit *= min(max(seconds / (unit * known), 0.5), 2.0) ** (SPEED_WEIGHT * min(count, 8) / 8)
        found = min(seconds / unit, 2 * known)
        self._curve[at] = known + max(CURVE_WEIGHT, 1 / (count + 1)) * (found - known)
        self._counts[at], self._unit_seconds = count + 1, unit
        if size < 0:
            self._rows[at] += SIZE_WEIGHT * (rows - self._rows[at])
        self._update_monotone(at)

    def _add_size(self, size: int, rows: int) -> int:
        """A new size starts with its neighbours' prediction, because one measurement proves
        little."""
        first = self._relative(rows)
        at = bisect_right(self._rows, rows)
        self._rows.insert(at, float(rows))
        self._curve.insert(at, first)
        self._monotone.insert(at, first)
        self._counts.insert(at, 1)
        self._index = {other: place + (place >= at) for other, place in self._index.items()}
        self._index[size] = at
        return at

    def _update_monotone(self, at: int) -> None:
        """Update the running maximum from this size upwards, as far as it changes."""
        curve, most = self._curve, self._monotone
        high = most[at - 1] if at else 0.0
        for i in range(at, len(curve)):
            if curve[i] > high:
                high = curve[i]
            if most[i] == high:
                return
            most[i] = high

    def _relative(self, rows: float) -> float:
        """Interpolated cost in units of _unit_seconds; beyond the largest size, self._row_cost
        per row."""
        above = bisect_right(self._rows, rows)  # index of the next larger size
        if above == len(self._rows):
            return (
                self._monotone[-1] + self._row_cost * (rows - self._rows[-1])
                if above
                else 1 + self._row_cost * (rows - 1)
            )
        high, where = self._monotone[above], self._rows[above]
        if not above:
            return max(high - self._row_cost * (where - rows), high / where)
        below, at = self._monotone[above - 1], self._rows[above - 1]
        return below + (high - below) * (rows - at) / (where - at)

    def seconds(self, rows: float) -> float:
        """Predicted seconds of a step of this many rows; 0 until a step was measured."""
        if not self._rows:
            return 0.0
        at = self._index.get(rows)
        return (self._relative(rows) if at is None else self._monotone[at]) * self._unit_seconds

    def with_drafts(self, rows: float) -> float:
        """Predicted seconds of a step of this many rows, drafts included."""
        return (self.drafts if self.drafts._rows else self).seconds(rows)

    def price(self, running: int, draft_cost: float = 0.0, further: bool = False) -> float:
        """Cost of one more row in a step of `running` sequences, and of drafting it, in units of
        the time per token; 0 until a step was measured. `further`: of a row after the first."""
        step, first = self.seconds(running), self.with_drafts(running + 1)
        more = (self.with_drafts(running + 4) - first) / 3 if further else first - step
        return max(more + draft_cost, 0.0) * running / step if step else 0.0
