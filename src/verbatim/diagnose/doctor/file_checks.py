"""Checks of a model's files: end of sequence, special tokens, templates, generation settings, rope
and context; of an encoder: special tokens, text length and pooling. In: ModelFiles. Out: Findings,
at least one per check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verbatim.base.defaults import GENERATION_CONFIG
from verbatim.base.errors import ParameterError
from verbatim.base.params import FIELDS, SamplingParams
from verbatim.diagnose.doctor.findings import Finding, bad, checks, good, note
from verbatim.diagnose.doctor.model_files import ModelFiles
from verbatim.encoder.encoder_spec import EncoderModel
from verbatim.hub.catalog import sampling_defaults
from verbatim.model.embedding import POOLINGS

# Warnings of the loader that a check below reports with more detail.
_REPORTED = ("tie_word_embeddings is true", "rope_scaling and rope_parameters are both")
PROBE = "zq7vx"  # an answer that no template contains
LONG = 16384  # positions; rope bases of 10,000 were trained for contexts below this


def check_files(files: ModelFiles) -> list[Finding]:
    run = [_files, _specials, _text_length, _pooling, _loader]
    if not files.encoder:
        run = [_files, _eos, _end_of_turn, _pad, _template, _specials, _generation, _rope_keys]
        run += [_context, _loader]
    return [finding for check in run for finding in check(files)]


@checks("files")
def _files(files: ModelFiles) -> Iterator[Finding]:
    for part, why in files.errors.items():
        yield bad(f"{part} cannot be read", why, "repair or fetch the file again")


# -------------------------------------------------------------------------------- end of sequence


@checks("eos")
def _eos(files: ModelFiles) -> Iterator[Finding]:
    if not files.eos:
        where = "config.json, generation_config.json and tokenizer_config.json"
        yield bad(
            "no end-of-sequence token is declared: an answer would end by length only",
            f"no eos_token_id in {where if files.kind == 'safetensors' else 'the GGUF header'}",
            "declare the token that ends a turn as eos_token_id",
        )
        return
    shown = "; ".join(f"{where}: {_tokens(files, ids)}" for where, ids in files.eos.items())
    words = files.tokenizer
    ordinary = [i for ids in files.eos.values() for i in ids if _is_text(files, i)]
    if ordinary and words is not None:
        yield bad(
            f"the end-of-sequence id {ordinary[0]} is no control token, but ordinary text",
            shown,
            "declare the control token that ends a turn"
            + (f" ({_tokens(files, words.eos_ids)})" if words.eos_ids else ""),
        )
        return
    together = set.intersection(*(set(ids) for ids in files.eos.values()))
    if not together and len(files.eos) > 1:
        yield note(
            "the files declare different end-of-sequence tokens; all of them end an answer here",
            shown,
            "make them agree: other engines read only one of the files",
        )
        return
    yield good("declared, and a control token", shown)


def _is_text(files: ModelFiles, token: int) -> bool:
    """Whether an id of the vocabulary is no control token: an ordinary one, or none at all."""
    words = files.tokenizer
    rows = files.model.spec.vocab if files.model is not None else 0
    if words is None or not 0 <= token < max(rows, words.vocab_size):
        return False  # the check of special tokens reports it
    return not words.is_control(token)


@checks("end of turn")
def _end_of_turn(files: ModelFiles) -> Iterator[Finding]:
    if files.template is None or files.tokenizer is None:
        return
    closing = closing_token(files)
    if closing is None:
        yield note(
            "the chat template puts no control token after an answer",
            "rendered a conversation with one answer",
            "end every assistant message with the end-of-turn token",
        )
        return
    declared = {i for ids in files.eos.values() for i in ids}
    if closing in declared:
        yield good("the template's end of turn is declared", _token(files, closing))
        return
    evidence = (
        f"the template closes an answer with {_token(files, closing)};"
        f" declared: {_tokens(files, sorted(declared))}"
    )
    remedy = f"add {closing} to eos_token_id"
    if closing in files.tokenizer.eos_ids:
        yield bad(
            "the template's end of turn is not declared; this engine knows its name and stops"
            " there, others do not",
            evidence,
            remedy,
        )
    else:
        yield bad("an answer does not end at the end of turn", evidence, remedy)


def closing_token(files: ModelFiles) -> int | None:
    """The control token that the template writes right after an assistant message."""
    assert files.template is not None
    assert files.tokenizer is not None
    text = files.template.render(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PROBE}],
        add_generation_prompt=False,
    )
    for _, control in files.tokenizer.split_control(text.partition(PROBE)[2]):
        if control is not None:
            return control
    return None


@checks("pad")
def _pad(files: ModelFiles) -> Iterator[Finding]:
    if files.pad is None:
        yield good("no padding token is declared; the engine needs none")
    elif any(files.pad in ids for ids in files.eos.values()):
        yield note(
            "the padding token is the end-of-sequence token; no effect here, but training masks"
            " padding, so a model trained like this may never learn to stop",
            _token(files, files.pad),
            "before training, declare another token as pad_token",
        )
    else:
        yield good("differs from the end of sequence", _token(files, files.pad))


# ----------------------------------------------------------------------- templates, special tokens


@checks("template")
def _template(files: ModelFiles) -> Iterator[Finding]:
    if not files.templates:
        yield note(
            "there is no chat template: `chat` and the chat API refuse this model",
            "looked in chat_template.jinja, chat_template.json and tokenizer_config.json"
            if files.kind == "safetensors"
            else "no tokenizer.chat_template in the GGUF header",
            "for a chat model, add the template it was trained with; for a base model, use --raw",
        )
        return
    if len(set(files.templates.values())) > 1:
        (one, a), (two, b) = list(files.templates.items())[:2]
        yield bad(
            f"the chat template differs between {one} and {two}; {one} is used",
            _first_difference(a, b),
            "keep one of them",
        )
        return
    yield good(f"one template, {len(next(iter(files.templates.values())))} characters")


def _first_difference(a: str, b: str) -> str:
    unequal = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    at = next(unequal, min(len(a), len(b)))
    return f"from character {at}: {a[at : at + 30]!r} against {b[at : at + 30]!r}"


@checks("special tokens")
def _specials(files: ModelFiles) -> Iterator[Finding]:
    rows = files.model.spec.vocab if files.model is not None else None
    if rows is None and files.tokenizer is not None:
        rows = files.tokenizer.vocab_size
    stated = {**files.specials, **files.added}
    outside = {where: i for where, i in stated.items() if rows and not 0 <= i < rows}
    for where, token in outside.items():
        yield bad(
            f"{where} is {token}, outside the vocabulary",
            f"the embedding has {rows} rows",
            "correct the id, or resize the embedding",
        )
    for name, text in files.unknown_texts.items():
        yield bad(
            f"{name} of tokenizer_config.json is {text!r}, which is no token",
            "looked it up in tokenizer.json",
            "add the token to tokenizer.json, or name one that is there",
        )
    if not outside and not files.unknown_texts:
        yield good(f"{len(files.specials)} ids, all inside the vocabulary")


# --------------------------------------------------------------------------- settings, positions


@checks("generation")
def _generation(files: ModelFiles) -> Iterator[Finding]:
    suggested = {
        ours: value
        for theirs, ours in GENERATION_CONFIG.items()
        if isinstance(value := files.generation.get(theirs), (int, float))
        and not isinstance(value, bool)
        and value != FIELDS[ours].default
    }
    if files.generation.get("do_sample") is False and suggested.get("temperature"):
        yield note(
            "do_sample is false, so transformers ignores the sampling settings beside it",
            ", ".join(f"{name} {value:g}" for name, value in suggested.items()),
            "decide: do_sample true, or no sampling settings",
        )
        return
    wrong = [name for name, value in suggested.items() if not _in_range(name, value)]
    if wrong:
        yield note(
            "the model states a sampling setting outside its range",
            ", ".join(f"{name} {suggested[name]:g}" for name in wrong),
            "correct it in generation_config.json or in the GGUF header",
        )
        return
    stated = ", ".join(f"{name} {value:g}" for name, value in suggested.items())
    if stated:
        yield good(f"stated by the model: {stated}")
    elif catalog := sampling_defaults("", files.path):
        listed = ", ".join(f"{name} {value:g}" for name, value in catalog.items())
        yield good(f"the file states no sampling settings; the catalog has {listed}")
    else:
        yield good("the model states no sampling settings")


def _in_range(name: str, value: float) -> bool:
    try:
        SamplingParams.from_mapping({name: value})
    except ParameterError:
        return False
    return True


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


@checks("rope keys")
def _rope_keys(files: ModelFiles) -> Iterator[Finding]:
    if files.kind == "gguf":
        names = [k for k in files.config if k.endswith((".rope.scale_linear", ".scaling.factor"))]
        values = {k: files.config[k] for k in names}
        old, new = "rope.scale_linear", "rope.scaling.factor"
    else:
        config = text_config(files.config)
        values = {k: config[k] for k in ("rope_scaling", "rope_parameters") if config.get(k)}
        old, new = "rope_scaling", "rope_parameters"
    if len(values) < 2:
        yield good("one source of rope settings")
    elif len({repr(v) for v in values.values()}) == 1:
        yield note(f"{old} and {new} are both there, and agree", _short(values), f"keep {new}")
    else:
        yield bad(
            f"{old} and {new} are both there and differ; engines choose differently",
            _short(values),
            "keep the one that the model was trained with",
        )


@checks("context")
def _context(files: ModelFiles) -> Iterator[Finding]:
    wrong = list(_rope_lengths(files))
    yield from wrong
    if files.model is None:
        return
    context = files.model.spec.context
    if files.max_length is not None and files.max_length > context:
        wrong.append(
            bad(
                "the tokenizer promises more positions than the model has",
                f"model_max_length {files.max_length}, context {context}",
                "set model_max_length to the context",
            )
        )
        yield wrong[-1]
    limit = files.generation.get("max_length")
    if isinstance(limit, int) and limit > context:
        wrong.append(
            note(
                "generation_config.json asks for more tokens than the model has positions",
                f"max_length {limit}, context {context}",
                "remove max_length",
            )
        )
        yield wrong[-1]
    if not wrong:
        yield good(f"{context:,} positions, and rope settings that agree")


def _rope_lengths(files: ModelFiles) -> Iterator[Finding]:
    if files.kind == "gguf":
        family = files.config.get("general.architecture")
        get = {k.removeprefix(f"{family}."): v for k, v in files.config.items()}
        trained = get.get("rope.scaling.original_context_length")
        factor = get.get("rope.scaling.factor")
        kind, most = get.get("rope.scaling.type", "none"), get.get("context_length")
        theta, window = get.get("rope.freq_base"), get.get("attention.sliding_window")
    else:
        config = text_config(files.config)
        record = config.get("rope_scaling") or config.get("rope_parameters") or {}
        record = record if isinstance(record, Mapping) else {}
        key = "original_max_position_embeddings"
        trained = config.get(key) or record.get(key)
        factor = record.get("factor")
        kind = record.get("rope_type", record.get("type")) or "none"
        most, window = config.get("max_position_embeddings"), config.get("sliding_window")
        theta = config.get("rope_theta") or record.get("rope_theta")
    if isinstance(most, int):
        yield from _trained_length(trained, factor, kind, most)
        yield from _rope_base(theta, kind, most, window)


def _trained_length(trained: object, factor: object, kind: object, most: int) -> Iterator[Finding]:
    if isinstance(trained, int) and trained > most:
        yield bad(
            "the model was trained on more positions than it has",
            f"original length {trained}, context {most}",
            "correct max_position_embeddings",
        )
    elif (
        kind == "yarn"
        and isinstance(trained, int)
        and isinstance(factor, (int, float))
        and abs(trained * factor - most) > 0.01 * most
    ):
        yield bad(
            "the rope scaling does not lead from the trained length to the context",
            f"{trained} × {factor:g} = {trained * factor:,.0f}, context {most:,}",
            "set max_position_embeddings to original length × factor, or correct the factor",
        )


def _rope_base(theta: object, kind: object, most: int, window: object) -> Iterator[Finding]:
    if (
        kind in ("none", "default")
        and most > LONG
        and not window
        and isinstance(theta, (int, float))
        and theta <= 10_000
    ):
        yield bad(
            f"{most:,} positions with a rope base of {theta:g} and no scaling: models trained on"
            f" more than {LONG:,} have a larger base",
            f"rope base {theta:g}, context {most:,}",
            "compare with the published config; pass --context of the trained length",
        )


@checks("text length")
def _text_length(files: ModelFiles) -> Iterator[Finding]:
    """The longest text of an encoder. Its learned positions cannot be extended."""
    model = files.model
    if not isinstance(model, EncoderModel):
        return
    spec = model.spec
    rows = spec.positions - spec.first_position
    if spec.positions and files.max_length is not None and files.max_length > rows:
        yield note(
            "the tokenizer promises more positions than the model has; a longer text is refused, "
            "or cut with --truncate",
            f"model_max_length {files.max_length}, {rows} positions",
            "set model_max_length to the number of positions",
        )
    else:
        yield good(f"texts of up to {spec.context:,} tokens")


@checks("pooling")
def _pooling(files: ModelFiles) -> Iterator[Finding]:
    model = files.model
    if not isinstance(model, EncoderModel):
        return
    stated = model.embedding.pooling
    if model.spec.scores:
        yield good("a cross-encoder, which scores a query and a document; none is used")
    elif stated in POOLINGS:
        yield good(f"the files state {stated}")
    else:
        yield note(
            f"the files state {stated!r}, which is not implemented"
            if stated
            else "the files state no pooling",
            "looked in modules.json and 1_Pooling/config.json"
            if files.kind == "safetensors"
            else "looked in the GGUF header",
            f"pass --pooling ({', '.join(POOLINGS)}) to `verbatim embed` and `verbatim serve`, "
            "as the model's authors say",
        )


@checks("loader")
def _loader(files: ModelFiles) -> Iterator[Finding]:
    if files.model is None:
        return
    rest = [w for w in files.model.warnings if not w.startswith(_REPORTED)]
    for text in rest:
        yield note("the loader warns", text, "correct or remove the key")
    if not rest:
        yield good("every key is followed, checked or known to have no effect")


# ----------------------------------------------------------------------------------------- words


def _token(files: ModelFiles, token: int) -> str:
    words = files.tokenizer
    known = words is not None and 0 <= token < words.vocab_size
    return f"{token} {words.token_text(token)!r}" if known and words is not None else str(token)


def _tokens(files: ModelFiles, ids: Any) -> str:
    return ", ".join(_token(files, i) for i in ids) or "none"


def _short(value: Any) -> str:
    text = ", ".join(f"{k} = {v!r}" for k, v in value.items())
    return text if len(text) <= 300 else text[:297] + "..."
