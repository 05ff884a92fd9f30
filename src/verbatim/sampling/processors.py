"""The stages of the sampler, in order.

Each stage is one small class with its definition, source and a worked example:

    logit_edits.py  bias, grammar mask, allowed and banned ids, min_tokens
    penalties.py    repetition, frequency, presence, DRY, no_repeat_ngram
    filters.py      temperature, top-k, top-p, min-p, typical-p, top-n-sigma, XTC

In: a RowState, that is one row of logits and the request's parameters. A stage changes logits or
removes ids of that row; it never reads another row. pipeline.py runs the stages, and `explain`
records what each one removed in the same run.
"""

from __future__ import annotations

from verbatim.sampling.filters import FILTER_STAGES, Temperature
from verbatim.sampling.logit_edits import Allowed, Banned, Grammar, LogitBias, MinTokens
from verbatim.sampling.penalties import Dry, Frequency, NoRepeatNgram, Presence, Repetition
from verbatim.sampling.row_state import Stage

BEFORE: tuple[Stage, ...] = (
    LogitBias(), Grammar(), Allowed(), Banned(), MinTokens(),
    Repetition(), Frequency(), Presence(), Dry(), NoRepeatNgram(),
)  # fmt: skip
AFTER: tuple[Stage, ...] = (Temperature(), *FILTER_STAGES)
STAGES = (*BEFORE, *AFTER)
