"""Random mutations of tiny configs.

A mutation changes one to three keys of a family's tiny config: other values, nulls, absent keys,
rope records of every type, keys of other families, unknown keys. judge.py loads each with
transformers and with verbatim.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import encoder_mutations
import registry_cases
import wrapper_mutations
from parity_case import ABSENT

from verbatim.model.families.common.class_defaults import class_defaults

NULLS = 0.12  # of the values of a mutation: the key is present with null

_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5}
BASE: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_BASE},
    "mistral": {"model_type": "mistral", **_BASE, "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", **_BASE},
    "qwen3": {"model_type": "qwen3", **_BASE, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **_BASE, **_GEMMA},
    "gemma3": {
        "model_type": "gemma3_text",
        **_BASE,
        **_GEMMA,
        "num_hidden_layers": 3,
        "sliding_window_pattern": 3,
    },
    "phi3": {"model_type": "phi3", **_BASE},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mixtral": {"model_type": "mixtral", **_BASE, "num_local_experts": 4},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_BASE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 16,
    },
}
FAMILIES = tuple(BASE)
_DERIVED = registry_cases.derived_bases(_BASE, {base["model_type"] for base in BASE.values()})
BASE |= _DERIVED
NEWER_FAMILIES = tuple(family for family in BASE if family not in FAMILIES)
_TEXTS = registry_cases.derived_bases(_BASE, BASE, wrapped=True)
_WRAPPED = wrapper_mutations.bases(BASE | _TEXTS)
WRAPPERS = tuple(_WRAPPED)
BASE |= _WRAPPED
# prefix of transformers' classes
KIND = {family: class_defaults(base["model_type"]).name for family, base in BASE.items()}
ENCODERS = tuple(encoder_mutations.KIND)
BASE |= encoder_mutations.BASES
KIND |= encoder_mutations.KIND

_FLAG = (True, False, None, ABSENT)
_ACTS = (
    *("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python", "relu"),
    *("quick_gelu", "tanh"),
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_TYPES = (
    *(
        [_FULL, _FULL],
        [_SLIDING, _SLIDING],
        [_FULL, _SLIDING],
        [_SLIDING, _FULL],
        [_FULL, _SLIDING, _FULL],
    ),
    *(
        [_FULL],
        ["chunked_attention", _FULL],
        ["attention", "attention"],
        ["magic", _FULL],
        [_FULL] * 3,
        None,
        [],
    ),
)
_ROTARY: dict[str, tuple[Any, ...]] = {
    "vocab_size": (96, 100),
    "hidden_size": (32, 48, 64),
    "intermediate_size": (40, 64),
    "num_hidden_layers": (1, 2, 3),
    "num_attention_heads": (2, 4, 8),
    "num_key_value_heads": (1, 2, 4, 3, None),
    "head_dim": (8, 16, 12, 7, None, ABSENT),
    "max_position_embeddings": (8, 16, 64, 4096, ABSENT),
    "rms_norm_eps": (1e-6, 1e-3, ABSENT),
    "hidden_act": (*_ACTS, ABSENT),
    "tie_word_embeddings": (True, False, ABSENT),
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "rope_theta": (100.0, 10000, 1e6, ABSENT),
    "partial_rotary_factor": (0.5, 0.75, 1.0, None),
    "original_max_position_embeddings": (6, 32, None),
    "sliding_window": (3, 7, 4096, None, ABSENT),
    "layer_types": _TYPES,
}
# Keys that any config may hold: of the base class, keys that change the mask, unknown keys.
_ANY: dict[str, tuple[Any, ...]] = {
    "is_causal": (True, False),
    "use_bidirectional_attention": (True, False, None),
    "is_decoder": (True, False),
    "is_encoder_decoder": (True, False),
    "add_cross_attention": (False, True),
    "per_layer_config": ({}, {"0": {"rms_norm_eps": 0.1}}, {"1": {"intermediate_size": 64}}),
    "quantization_config": ({"quant_method": "awq"}, None),
    "use_cache": (True, False),
    "initializer_range": (0.5,),
    "attention_dropout": (0.5, 0.0),
    "pad_token_id": (0, 3, None),
    "bos_token_id": (5, None),
    "eos_token_id": (7, [2, 3], None),
    "torch_dtype": ("float32",),
    "dtype": ("float32", None),
    "architectures": (["Anything"], None),
    "chunk_size_feed_forward": (0, 4),
    "temperature": (0.5,),
    "max_length": (20,),
    "num_labels": (3,),
    "pretraining_tp": (2,),
    "tokenizer_class": ("LlamaTokenizer",),
    "transformers_version": ("4.30.0",),
    "tie_last_hidden_states": (True,),
    "foo_bar": (1.5, "x", True, False, None, [], {}),
    "_private": (3,),
    "logit_scale": (0.5,),
    "attention_multiplier": (2.0, None),
    "rope_interleaved": (False, True),
    "unsloth_version": ("2025.1",),
}
_QWEN = {
    "use_sliding_window": (True, True, False, None),
    "max_window_layers": (0, 1, 2, 28, ABSENT),
}
_CAPS = {
    "attn_logit_softcapping": (1.0, 5.0, None, 0.0, ABSENT),
    "final_logit_softcapping": (2.0, 30.0, None, ABSENT),
}
_GEMMA_VALUES = {
    **_CAPS,
    "hidden_activation": (*_ACTS, ABSENT),
    "query_pre_attn_scalar": (8, 64, ABSENT),
    "sliding_window_size": (4,),
}
_EXPERTS = {
    "num_experts_per_tok": (1, 2, 3, ABSENT),
    "router_jitter_noise": (0.1,),
    "output_router_logits": (True,),
}
VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    **{family: {**_ROTARY, **_ANY} for family in ("llama", "mistral", "phi3")},
    **{family: {**_ROTARY, **_ANY, **_QWEN} for family in ("qwen2", "qwen3")},
    "gemma2": {**_ROTARY, **_ANY, **_GEMMA_VALUES},
    "gemma3": {
        **_ROTARY,
        **_ANY,
        **_GEMMA_VALUES,
        "sliding_window_pattern": (1, 2, 3, ABSENT),
        "_sliding_window_pattern": (2, 6),
        "rope_local_base_freq": (500.0, ABSENT),
        "layer_types": tuple(t and [*t, _FULL] for t in _TYPES),
    },
    "mixtral": {
        **_ROTARY,
        **_ANY,
        **_EXPERTS,
        "num_local_experts": (2, 3, ABSENT),
        "num_experts": (4, 3),
    },
    "qwen3_moe": {
        **_ROTARY,
        **_ANY,
        **_QWEN,
        **_EXPERTS,
        "num_experts": (2, 3),
        "num_local_experts": (4, 3),
        "moe_intermediate_size": (16, 40),
        "norm_topk_prob": (True, False, ABSENT),
        "decoder_sparse_step": (1, 2, ABSENT),
        "mlp_only_layers": ([0], [1], [], [5], None),
    },
    "gpt2": {
        **_ANY,
        "n_embd": (32, 64),
        "n_layer": (1, 3),
        "n_head": (2, 8),
        "n_inner": (40, None),
        "n_positions": (16, 64),
        "hidden_size": (32, 64),
        "num_hidden_layers": (2, 3),
        "num_attention_heads": (2, 4),
        "vocab_size": (96, 100),
        "max_position_embeddings": (128, 64),
        "activation_function": (*_ACTS, ABSENT),
        "layer_norm_epsilon": (1e-3, ABSENT),
        "scale_attn_weights": _FLAG,
        "scale_attn_by_inverse_layer_idx": _FLAG,
        "reorder_and_upcast_attn": _FLAG,
        "tie_word_embeddings": (True, False, ABSENT),
        "layer_types": _TYPES,
        "sliding_window": (4, None),
        "summary_type": ("mean",),
        "n_ctx": (64,),
        "embd_pdrop": (0.5,),
        "rope_theta": (100.0,),
    },
}
VALUES |= {name: registry_cases.derived_values(name, _ROTARY, _ANY) for name in _DERIVED}
_TEXT_VALUES = {n: registry_cases.derived_values(n, _ROTARY, _ANY) for n in _TEXTS}
VALUES |= wrapper_mutations.values(VALUES | _TEXT_VALUES, _ANY)
VALUES |= encoder_mutations.values(_ANY, _ACTS)
# Families with one rope record per layer type, and their layers.
NESTED = {"gemma3", "gemma3-wrapper", "olmo3"}


@dataclass(frozen=True)
class Mutation:
    family: str
    number: int
    config: dict[str, Any]
    keys: tuple[str, ...] = field(default=())  # changed keys, including keys of rope records
    # Use weights of the original tiny config, with a separate head, instead of new ones.
    original_weights: bool = False


def mutations(family: str, count: int, seed: int = 17) -> Iterator[Mutation]:
    """`count` mutations; each is a function of seed, family and number alone."""
    for number in range(count):
        source = random.Random(f"{seed} {family} {number}")
        config = json.loads(json.dumps(BASE[family]))
        keys: list[str] = []
        if family not in ("gpt2", *ENCODERS) and source.random() < 0.45:
            keys += _mutate_rope(family, config.get("text_config", config), source)
        names = sorted(VALUES[family])
        for name in source.sample(names, source.randint(0 if keys else 1, 3 - bool(keys))):
            value = None if source.random() < NULLS else source.choice(VALUES[family][name])
            *inner, key = name.split("/")
            place = config[inner[0]] if inner else config
            keys.append(key)
            if value is ABSENT:
                place.pop(key, None)
            else:
                place[key] = value
        original = source.random() < 0.15
        yield Mutation(
            family,
            number,
            config,
            (*keys, "tie_word_embeddings") if original else tuple(keys),
            original,
        )


def _mutate_rope(family: str, config: dict[str, Any], source: random.Random) -> list[str]:
    """Put a rope record under the new key, the old key or both; for gemma3 often per layer type."""
    head = config.get("head_dim", 8)
    names = source.choice(
        [
            ["rope_scaling"],
            ["rope_parameters"],
            ["rope_parameters"],
            ["rope_parameters", "rope_scaling"],
        ]
    )
    keys = list(names)
    for name in names:
        record = _with_nulls(_record(source, head // 2), source)
        if family in NESTED and name == "rope_parameters" and source.random() < 0.8:
            record = {_FULL: record, _SLIDING: _record(source, head // 2)}
            if source.random() < 0.2:
                del record[source.choice([_FULL, _SLIDING])]
        config[name] = record
        for part in (record, *(v for v in record.values() if isinstance(v, dict))):
            keys += part
    if source.random() < 0.3:
        config["original_max_position_embeddings"] = source.choice([6, 32])
        keys.append("original_max_position_embeddings")
    return keys


def _with_nulls(record: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """The record, with null in some keys that it has or that yarn may have."""
    optional = ("truncate", "beta_fast", "mscale") if "yarn" in record.values() else ()
    nulls = [name for name in (*record, *optional) if source.random() < NULLS / 3]
    return {**record, **dict.fromkeys(nulls)}


def _record(source: random.Random, pairs: int) -> dict[str, Any]:
    kind = source.choice(
        [
            *("default", "linear", "dynamic", "llama3", "yarn", "yarn", "longrope", "longrope"),
            *("proportional", "su"),
        ]
    )
    key = "type" if source.random() < 0.15 else "rope_type"
    record: dict[str, Any] = {key: kind}
    if source.random() < 0.7:
        record["rope_theta"] = source.choice([100.0, 10000.0, 5e5])
    if kind not in ("default", "longrope", "su"):
        record["factor"] = source.choice([2.0, 4.0, 8, 1.0])
    if kind in ("llama3", "yarn", "longrope", "su") and source.random() < 0.7:
        record["original_max_position_embeddings"] = source.choice([6, 32])
    if kind == "llama3":
        record |= {
            "low_freq_factor": source.choice([1.0, 2.0]),
            "high_freq_factor": source.choice([4.0, 8.0]),
        }
    if kind == "yarn":
        extras = {
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.3,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
        }
        record |= {k: v for k, v in {**extras, "truncate": False}.items() if source.random() < 0.3}
    if kind in ("longrope", "su"):
        count = pairs if source.random() < 0.9 else pairs + 1
        record |= {
            "long_factor": [1.0 + 0.5 * i for i in range(count)],
            "short_factor": [1.0 + 0.1 * i for i in range(count)],
        }
        record |= {
            k: v
            for k, v in {"factor": 4.0, "attention_factor": 1.2}.items()
            if source.random() < 0.3
        }
    for name, value in (
        ("partial_rotary_factor", 0.5),
        ("foo", 2.0),
        ("low_freq_factor", 1.0),
        ("mrope_section", [2, 2]),
    ):
        if source.random() < 0.04:
            record[name] = value
    return record
