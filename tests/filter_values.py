"""Values of each filter for tests, from its declaration in base/params.py."""

from __future__ import annotations

from verbatim.base.params import FIELDS, FILTERS

# each filter alone, at its strongest; all filters, at their weakest
STRONG = {name: {name: FIELDS[name].trials[0]} for name in FILTERS}
WEAK = {name: FIELDS[name].trials[-1] for name in FILTERS}


def random_value(name: str, share: float) -> float:
    """`share` in [0, 1): the lower half chooses one of the trials, the upper half a number of the
    whole range of trials and slider."""
    rule = FIELDS[name]
    assert rule.slider is not None
    if share < 0.5:
        return rule.trials[int(2 * share * len(rule.trials))]
    low, high = min(*rule.trials, rule.slider[0]), max(*rule.trials, rule.slider[1])
    value = low + (2 * share - 1) * (high - low)
    return round(value) if rule.kind == "int" else value
