"""Stages that set or remove single logits: bias, grammar mask, allowed and banned ids, min_tokens.

They run first, before penalties and temperature. They may remove every id of a row.
"""

from __future__ import annotations

import numpy as np

from verbatim.sampling.row_state import REMOVED, RowState


class LogitBias:
    """logit[id] += bias[id] (OpenAI's logit_bias). A logit of 2.0 with a bias of -1.5 becomes
    0.5."""

    name = "logit_bias"

    def active(self, row: RowState) -> bool:
        return bool(row.params.logit_bias)

    def apply(self, row: RowState) -> None:
        pairs = dict(row.params.logit_bias)
        row.logits[list(pairs.keys())] += np.array(list(pairs.values()), np.float64)


class Grammar:
    """Remove ids that the grammar (json_schema, regex, grammar, choice) does not allow next.
    grammar/matcher.py makes the mask: bit i of byte i // 8, lowest first. Ids past its end are
    removed."""

    name = "structure"

    def active(self, row: RowState) -> bool:
        return row.mask is not None

    def apply(self, row: RowState) -> None:
        assert row.mask is not None
        bits = np.unpackbits(np.frombuffer(row.mask, np.uint8), bitorder="little")[
            : len(row.logits)
        ].astype(bool)
        row.logits[: len(bits)][~bits] = REMOVED
        row.logits[len(bits) :] = REMOVED


class Allowed:
    """Remove all ids except allowed_token_ids."""

    name = "allowed_token_ids"

    def active(self, row: RowState) -> bool:
        return row.params.allowed_token_ids is not None

    def apply(self, row: RowState) -> None:
        allowed = np.array(row.params.allowed_token_ids, np.int64)
        kept = row.logits[allowed]
        row.logits[:] = REMOVED
        row.logits[allowed] = kept


class Banned:
    """Remove banned_token_ids."""

    name = "banned_token_ids"

    def active(self, row: RowState) -> bool:
        return bool(row.params.banned_token_ids)

    def apply(self, row: RowState) -> None:
        row.remove(list(row.params.banned_token_ids))


class MinTokens:
    """Remove the ids that end the output while it has fewer than min_tokens. With a prompt of 10
    tokens and min_tokens=3: at positions 10, 11 and 12."""

    name = "min_tokens"

    def active(self, row: RowState) -> bool:
        return bool(row.withheld) and row.position - row.prompt_len < row.params.min_tokens

    def apply(self, row: RowState) -> None:
        row.remove(row.withheld)
