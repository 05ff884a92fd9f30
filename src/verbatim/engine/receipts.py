"""The receipt of a completion: everything that `verbatim replay` needs to compute it again."""

from __future__ import annotations

from typing import Any

from verbatim.base.records import Completion
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.request import Request
from verbatim.explain.receipt import make_receipt


def receipt_of(
    loaded: LoadedModel, context: int, request: Request, completion: Completion
) -> dict[str, Any]:
    info = loaded.backend.info
    return make_receipt(
        model=loaded.name,
        digest=loaded.digest,
        backend=info.name,
        detail=info.detail,
        numerics=info.numerics,
        fingerprint=completion.fingerprint,
        adapter=loaded.adapters[request.adapter].digest if request.adapter >= 0 else "",
        context=context,
        prompt_ids=request.prompt_ids,
        params=request.params,
        seed=request.seed,
        choices=completion.choices,
        reasoning=request.reasoning is not None,
    )
