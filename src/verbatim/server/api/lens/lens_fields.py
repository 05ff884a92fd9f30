"""The request fields of the Lens's routes (see common/field_rules.py)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.field_rules import RequestBody, honoured
from verbatim.server.api.common.schemas import Alternatives, PromptIds, TokenId


class LensStep(RequestBody):
    prompt: PromptIds = honoured("the prompt as token ids", required=True)
    output: list[TokenId] | None = honoured("the output before the step, as token ids")
    params: JsonObject | None = honoured(
        "sampling parameters by name, as in a receipt; max_tokens has no effect on a step"
    )
    choice: Annotated[int, Field(strict=True, ge=0, le=1023)] | None = honoured(
        "index of the choice, for its noise (default 0)"
    )
    rest: bool | None = honoured(
        "also return every logit after bias, masks and penalties (base64, row_type f4 or f8); at "
        "most 4 such requests at once"
    )


class LensReplay(RequestBody):
    receipt: JsonObject = honoured("a receipt of this server", required=True)
    explain: Alternatives | None = honoured("also explain each token with this many candidates")
