"""Recorder behind `explain`: notes what each stage removes, in the same run that draws the token.

In: the raw row and the RowState that the stages change. Out: one JSON-ready dict per token;
explain/explanation.py documents its keys, prints it, and draws again under other settings.
"""

from __future__ import annotations

import base64
import math

import numpy as np

from verbatim.base.json_io import JsonObject
from verbatim.sampling.numerics import F64, I64, best, log_mass, masses, spreads
from verbatim.sampling.row_state import REMOVED, RowState

# Tokens. With receipt=True and a single choice, the first tokens keep their whole row of logits, so
# that a what-if can draw again from it.
WHOLE_ROWS = 64


class Recorder:
    def __init__(self, raw: F64, state: RowState) -> None:
        self.raw, self.state = raw, state
        self.top: list[int] = [int(i) for i in best(raw, state.params.explain) if raw[i] > REMOVED]
        self.removed_by: dict[int, str] = {}
        self.stages: list[JsonObject] = []
        self.left = int(np.count_nonzero(raw > REMOVED))
        self.scores: F64 | None = None
        self.g: F64 | None = None

    def after(self, stage: str) -> None:
        """Record how many ids the stage removed, and which of the top ids."""
        state = self.state
        # Before the temperature there is no list of live ids: the logits tell.
        alive = set(state.ids.tolist()) if len(state.ids) else None
        left = len(alive) if alive is not None else int(np.count_nonzero(state.logits > REMOVED))
        removed = [
            i
            for i in self.top
            if i not in self.removed_by
            and not (i in alive if alive is not None else state.logits[i] > REMOVED)
        ]
        self.removed_by.update(dict.fromkeys(removed, stage))
        self.stages.append(
            {"name": stage, "removed": self.left - left, "left": left, "removed_top": removed}
        )
        self.left = left

    def noise(self, g: F64, scores: F64) -> None:
        self.g, self.scores = g, scores

    def finish(
        self,
        token: int | None,
        candidates: tuple[tuple[int, float], ...] = (),
        denoising: JsonObject | None = None,
    ) -> JsonObject:
        """`denoising`: step and confidence of a draw of a diffusion block."""
        state, raw = self.state, self.raw
        d = raw - raw.max()
        mass = masses(d)
        total = int(mass.sum())
        norm = log_mass(total)
        out: JsonObject = {
            "position": state.position,
            "vocab": len(raw),
            "key": f"{state.key:016x}",
            "temperature": state.params.temperature,
            "entropy": norm + float(int(spreads(d).sum())) / float(total),
            "best": int(np.argmax(raw)),
            "stages": self.stages,
            "top": [self._candidate(i, float(d[i]) - norm) for i in self.top],
            **self._inputs(),
            **(denoising or {}),
        }
        if token is not None:
            candidate = self._candidate(token, 0.0)
            out |= {
                "token": token,
                **chosen(raw, norm, token),
                "final_prob": candidate["final_prob"],
                **self._lead(token),
            }
        else:
            out |= {
                "token": None,
                "candidates": [{"id": i, **chosen(raw, norm, i)} for i, _ in candidates],
            }
        return out

    def _candidate(self, i: int, logprob: float) -> JsonObject:
        state = self.state
        place = _find(state.ids, i)
        drawn = place is not None and self.scores is not None and self.g is not None
        final = (
            math.exp(float(state.centred[place]) - log_mass(int(state.mass.sum())))
            if place is not None
            else None
        )
        return {
            "id": i,
            "logit": float(self.raw[i]),
            "logprob": logprob,
            "processed": float(state.logits[i]) if state.logits[i] > REMOVED else None,
            "removed_by": self.removed_by.get(i),
            "final_prob": final,
            "noise": float(self.g[place]) if drawn and self.g is not None else None,
            "score": float(self.scores[place]) if drawn and self.scores is not None else None,
        }

    def _lead(self, token: int) -> JsonObject:
        """The winner's score, the runner-up, and the lead between them."""
        state = self.state
        scores = self.scores if self.scores is not None else state.logits
        ids = state.ids if self.scores is not None else np.arange(len(scores))
        first = best(scores, 2)
        assert int(ids[first[0]]) == token
        second = int(first[1]) if len(first) > 1 and scores[first[1]] > REMOVED else None
        return {
            "score": float(scores[first[0]]),
            "runner_up": int(ids[second]) if second is not None else None,
            "lead": float(scores[first[0]] - scores[second]) if second is not None else None,
        }

    def _inputs(self) -> JsonObject:
        """What a what-if needs besides the tokens: the raw logits, the grammar mask, the withheld
        ids."""
        state = self.state
        whole = (
            state.params.receipt
            and state.params.width == 1
            and state.position - state.prompt_len < WHOLE_ROWS
        )
        row = base64.b64encode(self.raw.astype("<f4").tobytes()).decode() if whole else None
        return {
            "row": row,
            "mask": base64.b64encode(state.mask).decode() if state.mask is not None else None,
            "prompt_len": state.prompt_len,
            "withheld": list(state.withheld),
        }


def chosen(raw: F64, norm: float, token: int) -> JsonObject:
    """One id in the model's own distribution. rank 1 is the best id; margin is its logit less the
    best other logit."""
    value = float(raw[token])
    ahead = int(np.count_nonzero(raw > value) + np.count_nonzero(raw[:token] == value))
    first = best(raw, 2)
    other = [int(i) for i in first if i != token][:1]
    return {
        "logit": value,
        "logprob": (value - float(raw.max())) - norm,
        "rank": 1 + ahead,
        "margin": value - float(raw[other[0]]) if other and raw[other[0]] > REMOVED else None,
    }


def _find(ids: I64, i: int) -> int | None:
    place = int(np.searchsorted(ids, i))
    return place if place < len(ids) and int(ids[place]) == i else None
