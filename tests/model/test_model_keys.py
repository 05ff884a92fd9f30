"""Keys of config.json and GGUF headers are followed, checked or rejected, never dropped."""

from __future__ import annotations

import re
from typing import Any

import gguf
import numpy as np
import pytest

from rope_examples import rope_records
from verbatim.base.errors import ModelError
from verbatim.encoder.encoder_keys import ENCODER_KEYS
from verbatim.encoder.encoder_load import read_encoder_config
from verbatim.formats.tensor import Tensor
from verbatim.model.architecture import read_config, read_header
from verbatim.model.families import CONFIG_KEYS, FAMILIES, GGUF_KEYS, WRAPPERS
from verbatim.model.families.common.gguf_rows import GENERAL_KEYS, is_metadata
from verbatim.model.families.common.parts import MAX_VOCAB
from verbatim.model.families.common.rope_keys import ROPE_KEYS
from verbatim.model.keys import Table, check_keys
from verbatim.model.spec import ModelSpec
from verbatim.sampling import numerics
from verbatim.testing.tiny_models import TINY_CONFIGS


def read(
    family: str, context: int | None = None, **changes: Any
) -> tuple[ModelSpec, tuple[str, ...]]:
    return read_config({**TINY_CONFIGS[family], **changes}, context=context)


def test_every_key_has_a_note_and_only_the_fields_of_its_treatment() -> None:
    tables = [*CONFIG_KEYS.values(), *GGUF_KEYS.values(), GENERAL_KEYS]
    for name, key in ((name, key) for table in tables for name, key in table.items()):
        assert key.note, name
        assert key.treatment == "must equal" or not key.values, name
        assert key.treatment == "followed" or key.default is None, name


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_tiny_configs_load_without_warnings(family: str) -> None:
    assert read(family)[1] == ()


# ----------------------------------------------------------------------------------- unknown keys


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_an_unknown_key_with_an_off_value_is_a_warning(value: Any) -> None:
    (warning,) = read("llama", foo_bar=value)[1]
    assert "foo_bar" in warning


def test_an_unknown_private_key_is_a_warning() -> None:
    (warning,) = read("llama", _foo=3)[1]
    assert "_foo" in warning


@pytest.mark.parametrize("value", [1, 0.5, True, "alibi", [1], {"a": 1}])
def test_an_unknown_key_that_could_change_logits_is_an_error(value: Any) -> None:
    with pytest.raises(ModelError, match=r"foo_bar is .* may change the output; remove") as error:
        read("llama", foo_bar=value)
    assert error.value.file == "config.json"


def test_one_error_names_all_unknown_keys() -> None:
    with pytest.raises(ModelError, match=r"foo.*bar"):
        read("llama", foo=1, bar=2)
    with pytest.raises(ModelError, match=r"\(and 12 more\)"):
        read("llama", **{f"k{i}": 1 for i in range(20)})


def test_keys_of_published_configs_are_known() -> None:
    """Unusual keys of SmolLM2, Llama 3, Qwen2.5 and Phi-3."""
    unusual = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"},
        "unsloth_fixed": True,
    }
    unusual |= {
        "_name_or_path": "x",
        "torch_dtype": "bfloat16",
        "pretraining_tp": 1,
        "auto_map": {"AutoModel": "x"},
    }
    assert read("llama", **unusual)[1] == ()
    assert (
        read(
            "qwen2",
            use_mrope=False,
            use_sliding_window=False,
            max_window_layers=21,
            sliding_window=32768,
        )[1]
        == ()
    )


# ------------------------------------------------------------------------------------------- null


@pytest.mark.parametrize("kind", [*CONFIG_KEYS, *ENCODER_KEYS])
def test_null_never_takes_the_default_of_an_absent_key(kind: str) -> None:
    table = CONFIG_KEYS.get(kind) or ENCODER_KEYS[kind]
    for name, key in table.items():
        if key.default is None:
            continue
        if key.nullable:
            assert check_keys({name: None}, table, what=kind, file="f").values[name] is None
        else:
            with pytest.raises(ModelError, match=rf"(^|\s){re.escape(name)} is null: {kind} needs"):
                check_keys({name: None}, table, what=kind, file="f")


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen35", {"partial_rotary_factor": None}, "partial_rotary_factor is null"),
        ("glm", {"partial_rotary_factor": None}, "partial_rotary_factor is null"),
        ("llama", {"is_causal": None}, "is_causal is null"),
        ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings is null"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": None}},
            "rope_scaling.truncate is null",
        ),
    ],
)
def test_null_is_refused_where_transformers_does_not_use_the_default(
    family: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(named)):
        read(family, **changes)


def test_a_softcap_that_transformers_ignores_in_a_wrapper_is_refused() -> None:
    text = {**TINY_CONFIGS["gemma3"], "final_logit_softcapping": 30.0}
    with pytest.raises(ModelError, match=r"text_config\.final_logit_softcapping is 30\.0"):
        read_config({"model_type": "gemma3", "text_config": text})
    read_config({"model_type": "gemma3", "text_config": {**text, "final_logit_softcapping": None}})


def nullable(table: Table) -> list[str]:
    """Keys of a rope record that may be null: followed with a meaning of null, or without effect"""
    return [n for n, k in table.items() if k.nullable or k.treatment == "no effect"]


def test_null_and_absence_are_the_same_in_optional_keys_of_a_rope_record() -> None:
    """tests/parity/test_config_mutations.py compares the nulls with transformers."""
    for kind, table in ROPE_KEYS.items():
        nulls = dict.fromkeys(nullable(table))
        absent = {k: v for k, v in ROPE_RECORDS[kind].items() if k not in nulls}
        assert read("llama", rope_scaling={**absent, **nulls}) == read("llama", rope_scaling=absent)


ROPE_RECORDS = rope_records(head_dim=8)


@pytest.mark.parametrize(
    "family", ["llama", "glm", "qwen35", "gemma3", "gemma4", "olmo3", "ministral3"]
)
@pytest.mark.parametrize("kind", ROPE_KEYS)
def test_null_is_refused_in_every_other_key_of_a_rope_record(kind: str, family: str) -> None:
    record = ROPE_RECORDS[kind]
    extra = FAMILIES[TINY_CONFIGS[family]["model_type"]].rope.keys
    for name in {**ROPE_KEYS[kind], **extra}:
        if name in nullable({**ROPE_KEYS[kind], **extra}):
            continue
        changed: dict[str, Any] = {**record, name: None}
        if family in ("gemma3", "gemma4", "olmo3"):
            changed = {"full_attention": changed, "sliding_attention": ROPE_RECORDS["default"]}
        with pytest.raises(ModelError, match=rf"rope_parameters\S*\.{name}( is|: .*) (null|None)"):
            read(family, rope_parameters=changed)


@pytest.mark.parametrize("value", ["", None, 0, [], False])
def test_a_rope_type_is_a_name(value: Any) -> None:
    for key in ("rope_type", "type"):
        with pytest.raises(ModelError, match=rf"rope_parameters.{key}"):
            read("llama", rope_parameters={key: value, "rope_theta": 100.0})
    record = {"type": None, "rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    assert read("llama", rope_parameters=record, rope_theta=100)[1] == ()


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "olmo3"])
def test_the_rope_record_of_a_layer_type_is_an_object(family: str) -> None:
    record = ROPE_RECORDS["default"]
    for name in ("full_attention", "sliding_attention"):
        records = {"full_attention": record, "sliding_attention": record, name: None}
        with pytest.raises(ModelError, match=f"rope_parameters.{name} is None: an object"):
            read(family, rope_parameters=records)
    records = {**dict.fromkeys(_LAYER_TYPES, record), "chunked_attention": None}
    warning = read(family, rope_parameters=records)[1][0]
    assert warning.startswith("rope_parameters.chunked_attention is not known")


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("value", [None, "", 0])
def test_the_model_type_of_a_text_config_is_a_name(kind: str, value: Any) -> None:
    with pytest.raises(ModelError, match=r"text_config\.model_type is (None|''|0)"):
        read_config({"model_type": kind, "text_config": {"model_type": value}})


# ------------------------------------------------------------------------------------- must equal


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"is_causal": False}),
        ("gemma3", {"is_causal": False}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("llama", {"use_bidirectional_attention": True}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("qwen3", {"partial_rotary_factor": 0.5}),
        ("llama", {"sliding_window": 12}),
        ("gemma3", {"attn_logit_softcapping": 50.0}),
        ("mistral", {"attention_bias": True}),
        ("mixtral", {"mlp_bias": True}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("llama", {"per_layer_config": {"0": {"rms_norm_eps": 0.1}}}),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}),
        ("qwen2", {"layer_types": ["full_attention"]}),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}),  # and use_sliding_window is false
        ("llama", {"layer_types": ["sliding_attention"] * 3}),
        ("mistral", {"layer_types": ["full_attention"] * 3}),
        ("gemma2", {"sliding_window": None}),
        ("gemma2", {"final_logit_softcapping": 0.0}),
        ("gemma3", {"_sliding_window_pattern": 2}),
        ("gemma3", {"original_max_position_embeddings": 64}),
        ("mixtral", {"num_experts": 7}),
        ("gpt2", {"hidden_size": 48}),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
        ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        ("gemma3", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ],
)
def test_an_unsupported_value_raises_an_error_that_names_the_key(
    family: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=next(iter(changes))):
        read(family, **changes)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gemma4", "num_experts", "many"),
        ("qwen3moe", "sliding_window", "3"),
        ("qwen3moe", "max_window_layers", {"a": 1}),
        ("qwen2", "use_sliding_window", "no"),
    ],
)
def test_a_key_that_is_not_read_still_needs_a_value_of_its_type(
    family: str, key: str, value: Any
) -> None:
    with pytest.raises(ModelError, match=f"{key} is .*is needed"):
        read_config({**TINY_CONFIGS[family], key: value}, file="config.json")


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder-decoder model"),
        ({"model_type": "mamba", "state_size": 16}, "it has state-space (Mamba) layers"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "it has state-space (Mamba) layers"),
        ({"model_type": "rwkv"}, "it has state-space (Mamba) layers"),
        (
            {"model_type": "llava", "vision_config": {}, "text_config": {"model_type": "llama"}},
            "a language model (llama) with an encoder of images or sound",
        ),
        ({"model_type": "llava", "vision_config": {}}, "a language model with an encoder of"),
        (
            {
                "model_type": "qwen2_5_omni",
                "thinker_config": {"text_config": {"model_type": "qwen2_5_omni_text"}},
            },
            "a language model (qwen2_5_omni_text) with an encoder of images or sound",
        ),
        ({"model_type": "qwen3_omni_moe"}, "a language model with an encoder of images or sound"),
        ({"model_type": "qwen2_vl"}, "a language model with an encoder of images or sound"),
        ({"model_type": "qwen3moe"}, "the nearest name is qwen3_moe"),
        ({"model_type": "Llama"}, "the nearest name is llama"),
        ({"model_type": "gemma-3"}, "the nearest name is gemma3"),
        ({"model_type": "deepseek_v3"}, ""),
    ],
)
def test_an_unknown_family_is_described(config: dict[str, Any], what: str) -> None:
    name = config["model_type"]
    told = f": {what}" if what else "; "
    with pytest.raises(ModelError, match=re.escape(f"model_type {name!r} is unknown{told}")) as e:
        read_config(config)
    text = str(e.value)
    assert all(f" {kind}," in text for kind in ("arcee", "gemma3", "mistral3", "qwen3_5"))
    assert text.endswith("; see docs/models.md")
    assert all(w not in text for w in (": an encoder", "nearest")) or what


@pytest.mark.parametrize(
    ("architecture", "key", "what"),
    [
        ("t5", "t5.decoder_block_count", "an encoder-decoder model"),
        ("mamba2", "mamba2.ssm.state_size", "it has state-space (Mamba) layers"),
        ("clip", "clip.has_vision_encoder", "a language model with an encoder of images or sound"),
        ("qwen3-moe", "qwen3-moe.block_count", "the nearest name is qwen3moe"),
    ],
)
def test_an_unknown_architecture_is_described(architecture: str, key: str, what: str) -> None:
    start = f"architecture {architecture!r} is unknown: {what}; known: "
    with pytest.raises(ModelError, match=re.escape(start)):
        read_header({"general.architecture": architecture, key: 1}, EMBED, file="a.gguf")


@pytest.mark.parametrize(
    ("family", "types", "rule"),
    [
        ("granitehybrid", ["mamba", "mamba", "attention"], "2 Mamba layers, which are not"),
        ("granitehybrid", ["linear_attention"] * 3, "3 Mamba layers, which are not"),
        ("granitehybrid", ["attention"] * 2, "2 entries for 3 layers"),
        ("qwen2", ["full_attention"] * 4, "4 entries for 3 layers"),
        ("qwen2", ["full_attention", "chunked", 7], "'chunked' is not supported; full_attention"),
        (
            "lfm2",
            ["conv", "full_attention", "mamba"],
            "'mamba' is not supported; full_attention or",
        ),
        ("lfm2", ["conv"], "1 entries for 3 layers"),
    ],
)
def test_wrong_layer_types_are_counted_or_named(family: str, types: list[Any], rule: str) -> None:
    config = {**TINY_CONFIGS[family], "num_hidden_layers": 3}
    with pytest.raises(ModelError, match=f"layer_types is .*: {re.escape(rule)}"):
        read_config({**config, "layer_types": types})


@pytest.mark.parametrize("key", ["5", "05", "0005"])
def test_a_layer_number_may_have_leading_zeros(key: str) -> None:
    """transformers 5.22 pads the keys of per_layer_config to one width, and reads them by int()."""
    config = {**TINY_CONFIGS["gemma4"], "num_hidden_layers": 12, "layer_types": None}
    plain = read_config(config)[0]
    own = {"head_dim": config["global_head_dim"]}
    assert read_config({**config, "per_layer_config": {key: own, "11": own}})[0] == plain


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("99", "'99' names none of the 12 layers"),
        ("12", "'12' names none of the 12 layers"),
        ("-1", "'-1' names none"),
        ("x", "'x' names none"),
        ("", "'' names none"),
        ("٥", "names none"),
        ("9" * 5000, "names none"),
        ("05", "layer 5 has two entries"),
    ],
)
def test_an_entry_of_no_layer_is_refused_by_name(key: str, rule: str) -> None:
    config = {**TINY_CONFIGS["gemma4"], "num_hidden_layers": 12, "layer_types": None}
    own = {"head_dim": config["global_head_dim"]}
    entries = {"5": own, "11": own, key: own}
    with pytest.raises(ModelError, match=f"per_layer_config is .*{rule}") as error:
        read_config({**config, "per_layer_config": entries})
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("family", "key"),
    [("qwen3moe", "mlp_only_layers"), ("qwen3next", "mlp_only_layers"), ("lfm2", "full_attn_idxs")],
)
def test_lists_of_layer_numbers_are_checked(family: str, key: str) -> None:
    """transformers ignores the number of a layer that is not there, and compares by ==."""
    config: dict[str, Any] = {**TINY_CONFIGS[family], "layer_types": None}
    known, _ = read_config({**config, key: [1]})
    spec, (warning,) = read_config({**config, key: [1, 99]})
    assert spec == known
    assert warning.startswith(f"{key}: 99 names none of the {len(spec.layers)} layers")
    for wrong in ("1", 1.5, True, None):
        with pytest.raises(ModelError, match=f"{key} is .*a list of layer numbers"):
            read_config({**config, key: [1, wrong]})


def test_a_key_that_must_be_true_rejects_1() -> None:
    with pytest.raises(ModelError, match="is_causal"):
        read("llama", is_causal=1)


# --------------------------------------------------------------------------------------- followed


def test_aliases_are_followed() -> None:
    config = {k: v for k, v in TINY_CONFIGS["gpt2"].items() if k != "n_embd"}
    assert read_config({**config, "hidden_size": 64})[0].hidden == 64


@pytest.mark.parametrize(
    ("family", "key", "alias", "value"),
    [
        ("gpt_oss", "num_local_experts", "num_experts", 4.0),
        ("gpt2", "n_embd", "hidden_size", 63),
        ("lfm2", "intermediate_size", "block_ff_dim", "many"),
    ],
)
def test_an_error_names_the_alias_that_the_file_has(
    family: str, key: str, alias: str, value: Any
) -> None:
    config = {k: v for k, v in TINY_CONFIGS[family].items() if k != key}
    with pytest.raises(ModelError, match=f"^config.json: {alias} is {value!r}:"):
        read_config({**config, alias: value}, file="config.json")
    with pytest.raises(ModelError, match=f"^config.json: {key} is {value!r}:"):
        read_config({**config, key: value}, file="config.json")


@pytest.mark.parametrize(
    ("family", "key", "alias"),
    [("gpt_oss", "num_local_experts", "num_experts"), ("gpt2", "n_embd", "hidden_size")],
)
@pytest.mark.parametrize("swap", [False, True])
def test_two_names_of_a_key_are_both_checked(family: str, key: str, alias: str, swap: bool) -> None:
    """As transformers, which refuses `num_local_experts: 4.0` whatever its alias says."""
    right = TINY_CONFIGS[family][key]
    config = {k: v for k, v in TINY_CONFIGS[family].items() if k != key}
    names = (alias, key) if swap else (key, alias)
    assert read_config({**config, **dict.fromkeys(names, right)}, file="config.json")
    for wrong in names:
        both = {name: float(right) if name == wrong else right for name in names}
        with pytest.raises(ModelError, match=rf"^config.json: {wrong} is {right}\.0: .*whole"):
            read_config({**config, **both}, file="config.json")
        both[wrong] = right + 1
        with pytest.raises(ModelError, match=f"{alias} is .* and {key} is .*two names"):
            read_config({**config, **both}, file="config.json")


def test_a_number_may_be_written_as_5_and_as_5_point_0_under_two_names() -> None:
    config = {"model_type": "nomic_bert", "rope_theta": 5.0, "rotary_emb_base": 5}
    assert read_encoder_config(config, "config.json")[0].rope_theta == 5.0


def test_an_error_names_the_alias_of_an_encoder() -> None:
    with pytest.raises(ModelError, match=r"^config.json: n_head is 2\.5:"):
        read_encoder_config({"model_type": "nomic_bert", "n_head": 2.5}, "config.json")


def test_an_absent_key_has_the_default_of_transformers_and_null_is_kept() -> None:
    config = {
        k: v
        for k, v in TINY_CONFIGS["mistral"].items()
        if k not in ("sliding_window", "max_position_embeddings")
    }
    assert read_config(config)[0].layers[0].window == 4096
    assert read("mistral", sliding_window=None)[0].layers[0].window is None
    config = {k: v for k, v in TINY_CONFIGS["gemma2"].items() if k != "head_dim"}
    spec = read_config(config)[0]
    assert (spec.head_dim, spec.attention_softcap, spec.logit_softcap) == (256, 50.0, 30.0)
    assert read("gemma2", attn_logit_softcapping=None)[0].attention_softcap == 0.0


def test_gemma_ignores_hidden_act_as_transformers_does() -> None:
    assert read("gemma3", hidden_act="silu")[0].activation == "gelu_tanh"
    assert read("gemma3", hidden_act="silu", hidden_activation="gelu")[0].activation == "gelu"


def test_rope_scaling_takes_precedence_over_rope_parameters() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    both, warnings = read("llama", rope_parameters=plain, rope_scaling=yarn)
    assert both.layers == read("llama", rope_scaling=yarn)[0].layers
    assert both.layers != read("llama", rope_parameters=plain)[0].layers
    assert any("rope_scaling" in w and "rope_parameters" in w for w in warnings)


_THETA_KEYS = {"gpt_neox": "rotary_emb_base"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


_WITH_THETA = [f for f in TINY_CONFIGS if f != "gpt2" and not f.startswith("gemma4")]


@pytest.mark.parametrize("family", _WITH_THETA)
def test_a_null_theta_takes_the_theta_of_the_rope_record(family: str) -> None:
    """As in transformers, which reads the config's own theta only where the record has none."""
    key = _THETA_KEYS.get(family, "rope_theta")
    given = TINY_CONFIGS[family].get("rope_parameters", {"rope_type": "default"})
    record = {**given, "rope_theta": 777.0}
    bare = {name: value for name, value in given.items() if name != "rope_theta"}
    changes: list[dict[str, Any]] = [{"rope_parameters": r} for r in (record, bare)]
    if family in ("gemma3", "olmo3"):
        changes = [{"rope_parameters": dict.fromkeys(_LAYER_TYPES, r)} for r in (record, bare)]
    null = read(family, **changes[0], **{key: None})[0]
    assert null.layers == read(family, **changes[0])[0].layers
    assert null.layers != read(family, **changes[1])[0].layers
    with pytest.raises(ModelError, match=f"rope_theta is None: .* here or in {key}$"):
        read(family, **changes[1], **{key: None})


@pytest.mark.parametrize("family", _WITH_THETA)
def test_two_thetas_are_a_warning_that_names_both(family: str) -> None:
    """As in transformers the record's is used; a config that says the same twice is no warning."""
    key = _THETA_KEYS.get(family, "rope_theta")
    record = {**TINY_CONFIGS[family].get("rope_parameters", {}), "rope_theta": 777.0}
    changes: dict[str, Any] = {"rope_parameters": record}
    if family in ("gemma3", "olmo3"):
        changes = {"rope_parameters": dict.fromkeys(_LAYER_TYPES, record)}
    spec, warnings = read(family, **changes, **{key: 778.0})
    assert spec.layers == read(family, **changes, **{key: 777})[0].layers
    (warning,) = set(warnings) - set(read(family, **changes, **{key: 777})[1])
    assert f"{key} is 778.0 and rope_parameters" in warning
    assert "rope_theta is 777.0" in warning


def test_a_theta_of_rope_scaling_differs_from_the_configs() -> None:
    record = {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}
    (warning,) = read("llama", rope_scaling=record, rope_theta=778.0)[1]
    assert warning == (
        "rope_theta is 778.0 and rope_scaling.rope_theta is 777.0: the record's is used, as in "
        "transformers"
    )
    record = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    (warning,) = read("glm", rope_scaling=record, partial_rotary_factor=1.0)[1]
    assert "partial_rotary_factor is 1.0 and rope_scaling.partial_rotary_factor is 0.5" in warning


def test_proportional_rope_takes_the_fraction_of_the_config() -> None:
    record = {"rope_type": "proportional", "rope_theta": 777.0}
    for family, key in (("gpt_neox", "rotary_pct"), ("glm", "partial_rotary_factor")):
        (rope,) = {a.rope for a in read(family, rope_parameters=record, **{key: 0.5})[0].layers}
        assert rope is not None
        stopped = [f == 0 for f in rope.inv_freq]
        half = len(stopped) // 2
        assert stopped == [False] * half + [True] * (len(stopped) - half)


def test_a_null_theta_leaves_the_default_of_olmo3s_sliding_layers() -> None:
    records = {"full_attention": {"rope_type": "default", "rope_theta": 777.0}}
    null = read("olmo3", rope_theta=None, rope_parameters=records)[0]
    assert null.layers == read("olmo3", rope_parameters=records)[0].layers


def test_a_rope_key_of_another_rope_type_is_a_warning() -> None:
    record = {"rope_type": "linear", "factor": 2.0, "beta_fast": 16.0}
    (warning,) = read("llama", rope_parameters=record)[1]
    assert "rope_parameters.beta_fast" in warning


def test_longrope_warns_that_the_context_chooses_the_factors() -> None:
    record = {"rope_type": "longrope", "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
    changes = {"rope_scaling": record, "original_max_position_embeddings": 128}
    spec, (warning,) = read("phi3", **changes)
    assert spec.layers[0].rope is not None
    assert spec.layers[0].rope.inv_freq[0] == 0.5
    assert "long_factor" in warning
    assert "context=128" in warning
    spec, warnings = read("phi3", context=128, **changes)
    assert spec.layers[0].rope is not None
    assert spec.layers[0].rope.inv_freq[0] == 1.0
    assert warnings == ()


def test_dynamic_rope_warns_that_the_context_chooses_the_frequencies() -> None:
    record = {"rope_type": "dynamic", "factor": 4.0}
    assert read("llama", rope_scaling=record)[1] == ()
    (warning,) = read("llama", context=1024, rope_scaling=record)[1]
    assert "dynamic" in warning


# ------------------------------------------------------------------------------------------- GGUF

EMBED = {
    "token_embd.weight": Tensor(
        "token_embd.weight", "f32", (260, 32), np.zeros(260 * 32 * 4, np.uint8)
    )
}


MASKED = ("dream", "llada")


def header(architecture: str, **changes: Any) -> Any:
    keys: dict[str, Any] = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": 1e-5,
    }
    if architecture != "gpt2":
        keys["attention.layer_norm_rms_epsilon"] = 1e-5
    if "expert_count" in GGUF_KEYS[architecture] and architecture not in ("llama", "gemma4"):
        keys |= {"expert_count": 4, "expert_used_count": 2}
    if architecture in ("granite", "command-r", "cohere2"):
        keys["logit_scale"] = 2.0
    if architecture in ("cohere2", "gpt-oss"):
        keys["attention.sliding_window"] = 8
    if architecture == "gemma4":
        keys |= {"attention.key_length": 16, "attention.key_length_swa": 8}
        keys |= {"attention.head_count_kv": 2, "attention.sliding_window": 8}
        keys |= {"attention.shared_kv_layers": 0, "attention.sliding_window_pattern": 2}
    if architecture in ("lfm2", "lfm2moe"):
        keys |= {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3}
    if architecture in ("qwen3next", "qwen35", "qwen35moe"):
        keys |= {"full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.state_size": 8}
        keys |= {"ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 32}
    if architecture in ("qwen2moe", "qwen3next", "qwen35moe"):
        keys["expert_shared_feed_forward_length"] = 48
    if architecture == "ernie4_5-moe":
        keys |= {"expert_feed_forward_length": 48, "leading_dense_block_count": 1}
    plain = {name.replace("__", "."): value for name, value in changes.items()}
    architecture_keys = {
        f"{architecture}.{name}": value
        for name, value in (keys | plain).items()
        if not name.startswith("general.")
    }
    general = {name: value for name, value in plain.items() if name.startswith("general.")}
    if architecture in MASKED:
        general["tokenizer.ggml.mask_token_id"] = 7
    return read_header(
        {"general.architecture": architecture, **general, **architecture_keys}, EMBED, file="a.gguf"
    )


@pytest.mark.parametrize("architecture", GGUF_KEYS)
def test_every_architecture_rejects_the_attention_of_others(architecture: str) -> None:
    """Full attention is that of diffusion models, whose mask token is a key of the tokenizer."""
    masked = architecture in MASKED
    found = header(architecture, attention__causal=not masked)
    diffusion = found.spec.diffusion
    assert found.warnings == ()
    assert masked == (diffusion is not None and diffusion.mask == 7)
    with pytest.raises(ModelError, match=rf"{architecture}\.attention\.causal is {masked}"):
        header(architecture, attention__causal=masked)


@pytest.mark.parametrize("architecture", GGUF_KEYS)
def test_unknown_gguf_keys_are_a_warning_when_off_and_an_error_otherwise(architecture: str) -> None:
    (warning,) = header(architecture, foo=0).warnings
    assert f"{architecture}.foo" in warning
    with pytest.raises(ModelError, match=rf"{architecture}\.foo.* is 2.5"):
        header(architecture, foo=2.5)


def test_unknown_keys_of_other_gguf_namespaces_are_warnings() -> None:
    metadata = {
        "general.architecture": "llama",
        "qwen2.block_count": 3,
        "mystery": 1,
        "general.foo": 1,
        "general.name": "x",
    }
    full = {
        f"llama.{k}": v
        for k, v in {"block_count": 2, "context_length": 512, "embedding_length": 32}.items()
    }
    full |= {
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    warnings = read_header(
        {**metadata, **full, "quantize.imatrix.file": "x"}, EMBED, file="a.gguf"
    ).warnings
    assert [
        name
        for name in ("qwen2.block_count", "mystery", "general.foo")
        if any(name in w for w in warnings)
    ] == [*("qwen2.block_count", "mystery", "general.foo")]
    assert len(warnings) == 3


def test_an_adapter_file_is_rejected() -> None:
    with pytest.raises(ModelError, match=r"general\.type is 'adapter'"):
        header("llama", general__type="adapter")


@pytest.mark.parametrize(
    ("value", "pooling"), [(0, "none"), (1, "mean"), (2, "cls"), (3, "last"), (4, "rank")]
)
def test_pooling_types_are_read(value: int, pooling: str) -> None:
    assert header("qwen3", pooling_type=value).pooling == pooling
    assert header("qwen3").pooling == ""


def test_a_scaling_factor_without_a_type_is_linear() -> None:
    """llama.cpp's default for an absent rope.scaling.type. Type none ignores the factor."""
    plain = header("llama").spec.layers[0].rope
    scaled = header("llama", rope__scaling__factor=4.0).spec.layers[0].rope
    assert scaled.inv_freq == tuple(f / 4 for f in plain.inv_freq)
    assert (
        header("llama", rope__scaling__factor=4.0, rope__scaling__type="none").spec.layers[0].rope
        == plain
    )


def test_attn_factor_multiplies_the_default_attention_factor_of_yarn() -> None:
    yarn = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 128,
    }
    default = header("llama", **yarn).spec.layers[0].rope.attention_factor
    twice = (
        header("llama", **yarn, rope__scaling__attn_factor=2.0).spec.layers[0].rope.attention_factor
    )
    assert default == pytest.approx(1 + 0.1 * np.log(4))
    assert twice == pytest.approx(2 * default)


@pytest.mark.parametrize("kind", [None, "none", "linear"])
def test_an_attn_factor_without_yarn_is_refused(kind: str | None) -> None:
    """llama.cpp multiplies cosines and sines with it for every type of scaling."""
    keys = {"rope__scaling__type": kind, "rope__scaling__factor": 2.0} if kind else {}
    assert header("llama", **keys, rope__scaling__attn_factor=1.0) == header("llama", **keys)
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.attn_factor is 1\.5: only 1 is"):
        header("llama", **keys, rope__scaling__attn_factor=1.5)


def test_a_vocabulary_that_the_sampler_cannot_sum_is_refused() -> None:
    """2^20 masses of at most 2^42 fit 64 bits; docs/numerics.md states the bound."""
    assert MAX_VOCAB == numerics.MAX_VOCAB
    assert read("llama", vocab_size=MAX_VOCAB)[0].vocab == MAX_VOCAB
    with pytest.raises(ModelError, match="vocab_size has 1048577 tokens: at most 1048576"):
        read("llama", vocab_size=MAX_VOCAB + 1)


def test_two_names_of_the_scaling_factor_must_agree() -> None:
    old = header("llama", rope__scale_linear=4.0)
    assert old == header("llama", rope__scale_linear=4.0, rope__scaling__factor=4.0)
    assert old == header("llama", rope__scaling__factor=4.0)
    with pytest.raises(ModelError, match=r"rope\.scale_linear is 4\.0 and .*factor is 2\.0"):
        header("llama", rope__scale_linear=4.0, rope__scaling__factor=2.0)


def test_yarn_without_a_factor_does_not_scale_as_in_llama_cpp() -> None:
    keys = {"rope__scaling__type": "yarn", "rope__scaling__original_context_length": 16}
    assert header("llama", **keys).spec == header("llama").spec


def constants() -> set[str]:
    """All metadata keys in the constants of the gguf package."""
    found: set[str] = set()
    todo: list[Any] = [gguf.constants.Keys]
    while todo:
        for name, value in vars(todo.pop()).items():
            if isinstance(value, type):
                todo.append(value)
            elif isinstance(value, str) and not name.startswith("__"):
                found.add(value)
    return found


@pytest.mark.parametrize("architecture", GGUF_KEYS)
def test_the_gguf_tables_use_the_key_names_of_llama_cpp(architecture: str) -> None:
    names = {key.replace("{arch}.", "") for key in constants() if key.startswith("{arch}.")}
    assert (
        sorted(n for n, k in GGUF_KEYS[architecture].items() if not k.private and n not in names)
        == []
    )


def test_every_namespace_of_llama_cpp_has_a_treatment() -> None:
    """All keys outside ARCH.* are metadata, or belong to files that are not models."""
    rest = {key for key in constants() if not key.startswith("{arch}.")} - set(GENERAL_KEYS)
    other = {"adapter", "clip", "diffusion", "xielu"}
    assert (
        sorted(
            k
            for k in rest
            if k.split(".")[0] not in other and not is_metadata(k.replace("{id}", "0"))
        )
        == []
    )
