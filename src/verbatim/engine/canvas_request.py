"""Parameters of a diffusion model: honoured, or refused by name. A request's SamplingParams and the
model's DiffusionSpec come in; params with every value in force, and the rules of its canvas go out.
"""

from __future__ import annotations

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.base.params import DIFFUSION, FIELDS, STRUCTURE, SamplingParams
from verbatim.model.spec import DiffusionSpec
from verbatim.sampling.remasking import policy
from verbatim.schedule.canvas import CanvasRules

__all__ = ["CanvasRules", "canvas_rules", "whole_blocks"]
ENTROPY = 0.35  # default of entropy_threshold, as in JetEngine
# Parameters that read the tokens before a position in their order.
_LEFT_TO_RIGHT = (*STRUCTURE, "thinking_budget", "dry_multiplier", "no_repeat_ngram")


def canvas_rules(
    params: SamplingParams, spec: DiffusionSpec | None, *, hidden: bool = False
) -> tuple[SamplingParams, CanvasRules | None]:
    """`hidden`: the request wants states of its prompt, for an embedding."""
    asked = [name for name in DIFFUSION if getattr(params, name) is not None]
    if spec is None or (spec.causal and not asked):
        if asked:
            raise UnsupportedError(
                asked[0], "belongs to diffusion models, and this one decodes from left to right"
            )
        return params, None
    if hidden:
        raise UnsupportedError("input", "a diffusion model makes no embeddings here")
    params = _resolved(params, spec)
    _check(params, spec)
    chosen = policy(
        params.remasking or "",
        params.confidence_threshold or spec.confidence,
        params.entropy_threshold or ENTROPY,
    )
    length, steps = params.block_length or spec.block, params.denoising_steps
    return params, CanvasRules(
        *(spec.mask, length, steps or length, chosen, spec.full, spec.shift, spec.causal)
    )


def whole_blocks(context: int, rules: CanvasRules | None, prompt: int) -> int:
    """Positions of a context that a request can use: whole blocks."""
    if rules is None or rules.full:
        return context
    if rules.causal:
        return prompt + max(context - prompt, 0) // rules.length * rules.length
    return context // rules.length * rules.length


def _resolved(params: SamplingParams, spec: DiffusionSpec) -> SamplingParams:
    """The params with the values in force, so that a receipt holds them."""
    remasking = params.remasking or spec.remasking
    length = params.block_length or spec.block or params.max_tokens or 1
    steps = params.denoising_steps
    if remasking == "entropy_bounded" and steps is not None:
        raise ParameterError(
            "denoising_steps", "has no effect with remasking=entropy_bounded; leave it out"
        )
    if steps is not None and steps > length:
        raise ParameterError(
            "denoising_steps",
            f"{steps} is more than the {length} positions of a block; a step decides at least one",
        )
    banned = tuple(sorted({*params.banned_token_ids, spec.mask}))  # the mask is no answer
    values: dict[str, object] = {
        "remasking": remasking,
        "block_length": length,
        "banned_token_ids": banned,
    }
    for name, of, default in (
        ("confidence_threshold", "low_confidence_dynamic", spec.confidence),
        ("entropy_threshold", "entropy_bounded", ENTROPY),
    ):
        given = getattr(params, name)
        if remasking == of:
            values[name] = default if given is None else given
        elif given is not None:
            raise ParameterError(
                name, f"belongs to remasking={of}, and it is {remasking}; leave it out"
            )
    if remasking != "entropy_bounded":
        values["denoising_steps"] = steps or length
    return params.with_origins({}, checked=values)


def _check(params: SamplingParams, spec: DiffusionSpec) -> None:
    if params.num_beams > 1:
        raise UnsupportedError("num_beams", "beam search needs a model that decodes left to right")
    if params.prompt_logprobs is not None:
        raise UnsupportedError(
            "prompt_logprobs", "a row of a diffusion model sees its own token, so nothing is scored"
        )
    if params.max_tokens == 0:
        raise UnsupportedError("max_tokens", "0 is not supported by a diffusion model; give 1")
    if params.max_tokens is None and spec.full:
        raise UnsupportedError(
            "max_tokens",
            "is needed: a model with full attention computes prompt and canvas in every step",
        )
    if params.speculate not in (None, "off", "auto"):
        raise UnsupportedError(
            "speculate", f"{params.speculate!r} drafts tokens from left to right; leave it out"
        )
    one_by_one = params.remasking == "sequential" and params.denoising_steps == params.block_length
    for name in () if one_by_one else _LEFT_TO_RIGHT:
        if getattr(params, name) != FIELDS[name].default:
            raise UnsupportedError(
                name,
                "reads the tokens from left to right: set remasking=sequential, with one denoising "
                "step per position of a block",
            )
