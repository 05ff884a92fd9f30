"""The checks of `verbatim doctor MODEL` that run the model, one engine per setting they vary."""

from __future__ import annotations

from functools import partial

from verbatim.base.config import CHOICES, EngineConfig
from verbatim.base.errors import RequestError, VerbatimError
from verbatim.cli.lib.open_model import open_llm
from verbatim.cli.lib.options import engine_of
from verbatim.cli.lib.terminal import Progress, note
from verbatim.diagnose.doctor.findings import Finding, bad, is_sound
from verbatim.diagnose.doctor.kv_cost import TEXT_TOKENS, cost_findings, kv_cost, score_text
from verbatim.diagnose.doctor.live_checks import CONTEXT, check_encoder_live, check_live
from verbatim.diagnose.doctor.model_files import ModelFiles
from verbatim.diagnose.doctor.text_checks import (
    THETAS,
    Reading,
    check_copy,
    check_language,
    check_theta,
    read_texts,
    with_theta,
)
from verbatim.encoder.encoder_spec import EncoderModel
from verbatim.engine.calls.llm import LLM
from verbatim.engine.loading.load_engine import load_for_engine
from verbatim.model.embedding import POOLINGS
from verbatim.model.loading.load import Model


def run_checks(
    flags: dict[str, object], files: ModelFiles, found: list[Finding], *, seed: int, as_json: bool
) -> list[Finding]:
    """`found` by the checks of the files, and what the running model shows."""
    if files.encoder:
        return found + _live_encoder(flags, files, as_json)
    found = found + _live(flags, files, seed, as_json)
    return found + _kv_types(flags, files, as_json) if is_sound(found) else found


def _live(flags: dict[str, object], files: ModelFiles, seed: int, as_json: bool) -> list[Finding]:
    """The live checks, if the model can be loaded at all and its weights are finite."""
    if not isinstance(files.model, Model):
        return []  # the error is among the findings already
    if not as_json:
        note("running the model for the live checks, a minute or more; --no-live leaves them out")
    flags = _short_context(flags, files, CONTEXT)
    try:
        with open_llm(flags, quiet=as_json) as llm:
            if not as_json:
                info = llm.loaded.backend.info
                note(f"the checks run on {info.name} {info.detail}, numerics {info.numerics}")
            found, reading = check_live(llm, seed=seed), read_texts(llm)
        if reading is None:
            return found
        language = check_language(reading)
        found += [language, *check_copy(reading, files.model.spec.layers)]
        if language.state != "bad":
            found += _theta(flags, files.model, reading, as_json)
        return found
    except VerbatimError as error:
        remedy = "repair what the other checks found, then run doctor again"
        return [bad("the model does not run", error.message, remedy, check="live")]


def _theta(flags: dict[str, object], model: Model, stated: Reading, as_json: bool) -> list[Finding]:
    """The file's rope_theta against others. The model is opened once per theta."""
    if not any(layer.rope for layer in model.spec.layers):
        return []
    alone = {"tensor_parallel": 1, "pipeline_parallel": 1, "rank_address": None}
    settings, others = {**engine_of(flags), **alone}, {}
    progress = Progress(quiet=as_json)
    for factor in THETAS:
        progress(f"{factor:g} times rope_theta")
        config, change = EngineConfig(**settings), partial(with_theta, factor=factor)
        loaded = load_for_engine(model.path, config, change=change)
        with LLM.from_loaded(loaded, **settings) as llm:
            if (reading := read_texts(llm)) is not None:
                others[factor] = reading
    progress.clear()
    return [check_theta(stated, others)]


def _live_encoder(flags: dict[str, object], files: ModelFiles, as_json: bool) -> list[Finding]:
    """The live check of an encoder. A flag without effect on an encoder raises."""
    if not isinstance(files.model, EncoderModel):
        return []  # the error is among the findings already
    if not files.model.spec.scores and files.model.embedding.pooling not in POOLINGS:
        flags = {**flags, "e_pooling": "mean"}  # any pooling shows whether the states are finite
    try:
        with open_llm(flags, quiet=as_json) as llm:
            return check_encoder_live(llm)
    except RequestError:
        raise
    except VerbatimError as error:
        remedy = "repair what the other checks found, then run doctor again"
        return [bad("the model does not run", error.message, remedy, check="live")]


def _short_context(flags: dict[str, object], files: ModelFiles, tokens: int) -> dict[str, object]:
    if flags.get("e_context") is not None or files.model is None:
        return flags
    return {**flags, "e_context": min(tokens, files.model.spec.context)}


def _kv_types(flags: dict[str, object], files: ModelFiles, as_json: bool) -> list[Finding]:
    """The cost of each 8-bit KV cache against f16. The model is opened once per type."""
    if not isinstance(files.model, Model) or not files.model.spec.attention_layers:
        return []
    flags = _short_context(flags, files, TEXT_TOKENS)
    progress = Progress(quiet=as_json)
    scores = {}
    for kv_type in CHOICES["kv_type"]:
        progress(f"KV cache in {kv_type}")
        # quiet: the live checks have shown the warnings of loading
        with open_llm({**flags, "e_kv_type": kv_type}, quiet=True) as llm:
            scores[kv_type] = score_text(llm)
    progress.clear()
    f16 = scores.pop("f16")
    return cost_findings([kv_cost(f16, other) for other in scores.values()])
