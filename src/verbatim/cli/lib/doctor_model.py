"""`verbatim doctor MODEL`: flags come in, findings with evidence and remedy go out."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import RequestError, VerbatimError
from verbatim.cli.lib.options import engine_of
from verbatim.cli.lib.terminal import Progress, note, write_json

if TYPE_CHECKING:
    from verbatim.diagnose.doctor.findings import Finding
    from verbatim.diagnose.doctor.model_files import ModelFiles
    from verbatim.diagnose.doctor.text_checks import Reading
    from verbatim.model.loading.load import Model

MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("BAD", "bold red")}


def examine(flags: dict[str, Any], *, live: bool, seed: int, as_json: bool) -> int:
    from verbatim.diagnose.doctor.file_checks import check_files
    from verbatim.diagnose.doctor.findings import is_sound
    from verbatim.diagnose.doctor.model_files import read_files
    from verbatim.diagnose.doctor.weight_checks import check_weights
    from verbatim.hub.catalog import resolve

    engine_of(flags)  # a wrong flag fails before the model is read
    progress = Progress(quiet=as_json)
    path = resolve(
        flags["model"], revision=flags["revision"], offline=flags["offline"], progress=progress
    )
    progress.clear()
    files = read_files(path)
    found = [*check_files(files), *check_weights(files)]
    if live and files.encoder:
        found += _live_encoder(flags, files, as_json)
    elif live:
        found += _live(flags, files, seed, as_json)
        if is_sound(found):
            found += _kv_types(flags, files, as_json)
    if as_json:
        rows = [asdict(finding) for finding in found]
        faults = sum(finding.state == "bad" for finding in found)
        write_json(
            {
                "model": flags["model"],
                "faults": faults,
                "live": live,
                "seed": seed,
                "findings": rows,
            }
        )
    else:
        _print(flags["model"], files, found, live)
    return 0 if is_sound(found) else 1


def _live(flags: dict[str, Any], files: ModelFiles, seed: int, as_json: bool) -> list[Finding]:
    """The live checks, if the model can be loaded at all and its weights are finite."""
    from verbatim.cli.lib.open_model import open_llm
    from verbatim.diagnose.doctor.findings import bad
    from verbatim.diagnose.doctor.live_checks import CONTEXT, check_live
    from verbatim.diagnose.doctor.text_checks import check_copy, check_language, read_texts
    from verbatim.model.loading.load import Model

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
        return [bad("live", "the model does not run", error.message, remedy)]


def _theta(flags: dict[str, Any], model: Model, stated: Reading, as_json: bool) -> list[Finding]:
    """The file's rope_theta against others. The model is opened once per theta."""
    from verbatim.base.config import EngineConfig
    from verbatim.diagnose.doctor.text_checks import THETAS, check_theta, read_texts, with_theta
    from verbatim.engine.calls.llm import LLM
    from verbatim.engine.loading.load_engine import load_for_engine

    if not any(layer.rope for layer in model.spec.layers):
        return []
    settings, others = engine_of(flags), {}
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


def _live_encoder(flags: dict[str, Any], files: ModelFiles, as_json: bool) -> list[Finding]:
    """The live check of an encoder. A flag without effect on an encoder raises."""
    from verbatim.cli.lib.open_model import open_llm
    from verbatim.diagnose.doctor.findings import bad
    from verbatim.diagnose.doctor.live_checks import check_encoder_live
    from verbatim.encoder.encoder_spec import EncoderModel
    from verbatim.model.embedding import POOLINGS

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
        return [bad("live", "the model does not run", error.message, remedy)]


def _short_context(flags: dict[str, Any], files: ModelFiles, tokens: int) -> dict[str, Any]:
    if flags.get("e_context") is not None or files.model is None:
        return flags
    return {**flags, "e_context": min(tokens, files.model.spec.context)}


def _kv_types(flags: dict[str, Any], files: ModelFiles, as_json: bool) -> list[Finding]:
    """The cost of each 8-bit KV cache against f16. The model is opened once per type."""
    from verbatim.base.config import CHOICES
    from verbatim.cli.lib.open_model import open_llm
    from verbatim.diagnose.doctor.kv_cost import TEXT_TOKENS, cost_findings, kv_cost, score_text
    from verbatim.model.loading.load import Model

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


def _print(name: str, files: ModelFiles, found: list[Finding], live: bool) -> None:
    from rich.text import Text

    from verbatim.cli.lib.tables import console, section

    out = console()
    size = sum(tensor.data.nbytes for tensor in files.tensors.values())
    kind = f"{files.kind}, encoder" if files.encoder else files.kind
    out.print(f"{name}: {kind}, {size / 1e6:,.0f} MB of weights", style="bold")
    out.print()
    rows = []
    for finding in found:
        mark, style = MARKS[finding.state]
        text = Text(finding.text)
        if finding.evidence:
            text.append(f"\n{finding.evidence}", style="dim")
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="cyan")
        rows.append((Text(mark, style=style), Text(finding.check), text))
    section(out, "", rows, wide=2)
    count = {state: sum(f.state == state for f in found) for state in MARKS}
    faults = count["bad"]
    verdict = f"{_many(faults, 'fault') if faults else 'no fault'} found by {len(found)} checks"
    out.print()
    out.print(
        f"{verdict}, {_many(count['note'], 'note')}"
        f"{'' if live else '; the model was not run (--no-live)'}",
        style="bold red" if faults else "bold green",
    )


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
