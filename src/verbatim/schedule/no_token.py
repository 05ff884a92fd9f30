"""Why a sequence ends without a token. In: Drawn.token below 0. Out: a Finish."""

from __future__ import annotations

from verbatim.base.errors import NOT_FINITE
from verbatim.base.records import BROKEN, Finish

NOTHING_LEFT = "no token is left to draw: bans, grammar and min_tokens together exclude every id"


def finish_without_token(token: int, position: int, adapter: str) -> Finish:
    """`position`: of the token that could not be drawn. `adapter`: name of the LoRA adapter."""
    return not_finite(position, adapter) if token == BROKEN else Finish("error", NOTHING_LEFT)


def not_finite(position: int, adapter: str) -> Finish:
    at = f"{NOT_FINITE} (NaN or infinity) at position {position}"
    if adapter:
        remedy = (
            f"the adapter {adapter} or the model file is broken, or a value exceeds its type; send "
            "the request without the adapter, or check the files with verbatim doctor"
        )
    else:
        remedy = (
            "the model file is broken, or a value exceeds its type; check the file with verbatim "
            "doctor, or use another file of this model"
        )
    return Finish("error", f"{at}: {remedy}")
