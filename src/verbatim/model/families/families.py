"""config.json -> ModelSpec. Each family is one function; gguf_families.py does the same for GGUF.

In: the parsed config of a safetensors directory. Out: the architecture as data, and warnings to
show at load. Every key is first checked against the family's table (config_keys.py), which also
holds the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verbatim.base.errors import ModelError
from verbatim.model.config_fields import Fields, short
from verbatim.model.families.config_keys import CONFIG_KEYS
from verbatim.model.families.families_dense import DENSE_FAMILIES, olmo3_records
from verbatim.model.families.families_gemma4 import gemma4, gemma4_records
from verbatim.model.families.families_layer_norm import LAYER_NORM_FAMILIES
from verbatim.model.families.families_llama import LLAMA_FAMILIES, gemma3_records
from verbatim.model.families.families_moe import MOE_FAMILIES
from verbatim.model.families.families_recurrent import RECURRENT_FAMILIES
from verbatim.model.families.family_parts import check_spec, unknown_family
from verbatim.model.families.rope_record import Record, family_record
from verbatim.model.keys import check_keys
from verbatim.model.spec import ModelSpec

# model_types that encoder/ loads; a test compares them with its key tables.
ENCODERS = ("bert", "nomic_bert", "roberta", "xlm-roberta")
# Multi-modal wrappers, of which only the language model is used: the model_types that their
# text_config may have, the first where it has none.
WRAPPERS = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "mistral3": ("mistral", "ministral3"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}


def spec_from_config(
    config: Mapping[str, Any], *, context: int | None = None, file: str = "config.json"
) -> ModelSpec:
    """The architecture of a Hugging Face config, for an engine with `context` positions.

    None: the model's own context."""
    return read_config(config, context=context, file=file)[0]


def read_config(
    config: Mapping[str, Any], *, context: int | None = None, file: str = "config.json"
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The architecture, and warnings to show at load."""
    warnings: list[str] = []
    fields = Fields(config, file)
    kind = fields.string("model_type")
    if kind in WRAPPERS:
        outer = _checked(fields, kind, warnings)
        kind, text = _text_config(outer, kind)
        tied = outer.boolean("tie_word_embeddings", True)
        fields = Fields({**text, "tie_word_embeddings": tied}, file)
    if kind in ENCODERS:
        raise ModelError(
            f"model_type {kind!r} is an encoder, which generates no text; "
            "`verbatim embed`, `verbatim rerank` and `verbatim serve` run it",
            file=file,
        )
    if kind not in _FAMILIES:
        more = f" (of {', '.join(WRAPPERS)} the language model alone)"
        raise unknown_family("model_type", kind, {*_FAMILIES, *WRAPPERS}, config, file, more)
    if kind == "gemma3_text":
        _check_pattern(fields)
    spec = _FAMILIES[kind](_checked(fields, kind, warnings), context)
    return check_spec(spec, file), tuple(warnings)


def _text_config(outer: Fields, kind: str) -> tuple[str, dict[str, Any]]:
    """The model_type and the config of a wrapper's language model."""
    text = outer.mapping("text_config")
    inner = text.get("model_type", WRAPPERS[kind][0])
    if inner not in WRAPPERS[kind]:
        needed = " or ".join(WRAPPERS[kind])
        raise ModelError(
            f"text_config.model_type is {inner!r}: {needed} is needed", file=outer.file
        )
    cap = text.get("final_logit_softcapping")
    if kind == "gemma3" and cap is not None:
        raise ModelError(
            f"text_config.final_logit_softcapping is {short(cap)}: only null is supported for "
            "gemma3 with a text_config, where transformers ignores it",
            file=outer.file,
        )
    return inner, text


def _checked(fields: Fields, kind: str, warnings: list[str]) -> Fields:
    checked = check_keys(fields.values, CONFIG_KEYS[kind], what=kind, file=fields.file)
    warnings += checked.warnings
    return Fields(checked.values, fields.file, warnings=warnings, written=checked.written)


def rope_records(config: Mapping[str, Any], file: str) -> tuple[Record, Record]:
    """The rope records of full and of sliding layers that the ModelSpec uses. Not for gpt2."""
    fields = Fields(config, file)
    kind = fields.string("model_type")
    if kind in WRAPPERS:
        kind, text = _text_config(fields, kind)
        fields = Fields(text, file)
    f = _checked(fields, kind, [])
    if kind in _RECORDS:
        return _RECORDS[kind](f)
    record = family_record(f, kind)
    return record, record


def _check_pattern(f: Fields) -> None:
    """Reject a `_sliding_window_pattern` that transformers writes but does not read back."""
    alone = not f.has("layer_types") and not f.has("sliding_window_pattern")
    if alone and f.raw("_sliding_window_pattern", 6) != 6:
        raise f.fail(
            "_sliding_window_pattern", "it is not read; give layer_types or sliding_window_pattern"
        )


_FAMILIES: dict[str, Callable[[Fields, int | None], ModelSpec]] = {
    **LLAMA_FAMILIES,
    **DENSE_FAMILIES,
    **LAYER_NORM_FAMILIES,
    **MOE_FAMILIES,
    **RECURRENT_FAMILIES,
    "gemma4_text": gemma4,
}
_RECORDS: dict[str, Callable[[Fields], tuple[Record, Record]]] = {
    "gemma3_text": gemma3_records,
    "gemma4_text": gemma4_records,
    "olmo3": olmo3_records,
}
