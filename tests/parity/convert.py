"""Convert a Hugging Face checkpoint to GGUF, independently of the code under test.

Shares no code with the reader, so that it can find the reader's errors in: names, interleaving of
llama's rotated rows, gemma's norms with 1 added, gpt2's transposed matrices, stacked experts.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from gemma4_convert import GEMMA4_NAMES, gemma4_metadata
from recurrent_convert import delta_metadata, delta_state, lfm2_metadata

from verbatim.files.gguf_write import write_gguf
from verbatim.formats.conversion import quantise
from verbatim.formats.tensor import Tensor

_NAMES = {
    r"model\.embed_tokens\.(\w+)": r"token_embd.\1",
    r"model\.norm\.(\w+)": r"output_norm.\1",
    r"lm_head\.(\w+)": r"output.\1",
    r"model\.layers\.(\d+)\.input_layernorm\.(\w+)": r"blk.\1.attn_norm.\2",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(\w+)": r"blk.\1.attn_\2.\3",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.(\w+)": r"blk.\1.attn_output.\2",
    r"model\.layers\.(\d+)\.self_attn\.qkv_proj\.(\w+)": r"blk.\1.attn_qkv.\2",
    r"model\.layers\.(\d+)\.self_attn\.([qk])_norm\.(\w+)": r"blk.\1.attn_\2_norm.\3",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.(\w+)": r"blk.\1.ffn_norm.\2",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(\w+)": r"blk.\1.ffn_\2.\3",
    r"model\.layers\.(\d+)\.mlp\.gate_up_proj\.(\w+)": r"blk.\1.ffn_up.\2",
    r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.gate\.(\w+)": r"blk.\1.ffn_gate_inp.\2",
    r"transformer\.wte\.weight": "token_embd.weight",
    r"transformer\.wpe\.weight": "position_embd.weight",
    r"transformer\.ln_f\.(\w+)": r"output_norm.\1",
    r"transformer\.h\.(\d+)\.ln_1\.(\w+)": r"blk.\1.attn_norm.\2",
    r"transformer\.h\.(\d+)\.ln_2\.(\w+)": r"blk.\1.ffn_norm.\2",
    r"transformer\.h\.(\d+)\.attn\.c_attn\.(\w+)": r"blk.\1.attn_qkv.\2",
    r"transformer\.h\.(\d+)\.attn\.c_proj\.(\w+)": r"blk.\1.attn_output.\2",
    r"transformer\.h\.(\d+)\.mlp\.c_fc\.(\w+)": r"blk.\1.ffn_up.\2",
    r"transformer\.h\.(\d+)\.mlp\.c_proj\.(\w+)": r"blk.\1.ffn_down.\2",
}
_GEMMA_NAMES = {
    r"model\.layers\.(\d+)\.post_attention_layernorm\.(\w+)": r"blk.\1.post_attention_norm.\2",
    r"model\.layers\.(\d+)\.pre_feedforward_layernorm\.(\w+)": r"blk.\1.ffn_norm.\2",
    r"model\.layers\.(\d+)\.post_feedforward_layernorm\.(\w+)": r"blk.\1.post_ffw_norm.\2",
}
# Families whose norms have other meanings, or whose tensors have other names.
_L = r"model\.layers\.(\d+)\."
_POST_NORMS = {
    _L + r"post_attention_layernorm\.(\w+)": r"blk.\1.post_attention_norm.\2",
    _L + r"post_feedforward_layernorm\.(\w+)": r"blk.\1.post_ffw_norm.\2",
}
_MLP_NORM = {_L + r"post_attention_layernorm\.(\w+)": r"blk.\1.post_attention_norm.\2"}
_G, _F = r"gpt_neox\.layers\.(\d+)\.", r"transformer\.h\.(\d+)\."
_OTHER_NAMES = {
    "olmo2": _POST_NORMS,
    "exaone4": _POST_NORMS,
    "seed_oss": _MLP_NORM,
    "glm4moe": {
        **_MLP_NORM,
        _L + r"mlp\.gate\.e_score_correction_bias": r"blk.\1.exp_probs_b.bias",
        _L + r"mlp\.shared_experts\.(\w+)_proj\.weight": r"blk.\1.ffn_\2_shexp.weight",
    },
    "gpt-oss": {
        **_MLP_NORM,
        _L + r"self_attn\.sinks": r"blk.\1.attn_sinks.weight",
        _L + r"mlp\.router\.(\w+)": r"blk.\1.ffn_gate_inp.\2",
        _L + r"mlp\.experts\.(gate|up|down)_proj": r"blk.\1.ffn_\2_exps.weight",
        _L + r"mlp\.experts\.(gate|up|down)_proj_bias": r"blk.\1.ffn_\2_exps.bias",
    },
    "hunyuan-dense": {
        _L + r"self_attn\.query_layernorm\.(\w+)": r"blk.\1.attn_q_norm.\2",
        _L + r"self_attn\.key_layernorm\.(\w+)": r"blk.\1.attn_k_norm.\2",
    },
    "glm4": {
        _L + r"post_self_attn_layernorm\.(\w+)": r"blk.\1.post_attention_norm.\2",
        _L + r"post_mlp_layernorm\.(\w+)": r"blk.\1.post_ffw_norm.\2",
    },
    "starcoder2": {
        _L + r"mlp\.c_fc\.(\w+)": r"blk.\1.ffn_up.\2",
        _L + r"mlp\.c_proj\.(\w+)": r"blk.\1.ffn_down.\2",
    },
    "gptneox": {
        r"gpt_neox\.embed_in\.weight": "token_embd.weight",
        r"gpt_neox\.final_layer_norm\.(\w+)": r"output_norm.\1",
        r"embed_out\.weight": "output.weight",
        _G + r"input_layernorm\.(\w+)": r"blk.\1.attn_norm.\2",
        _G + r"post_attention_layernorm\.(\w+)": r"blk.\1.ffn_norm.\2",
        _G + r"attention\.query_key_value\.(\w+)": r"blk.\1.attn_qkv.\2",
        _G + r"attention\.dense\.(\w+)": r"blk.\1.attn_output.\2",
        _G + r"mlp\.dense_h_to_4h\.(\w+)": r"blk.\1.ffn_up.\2",
        _G + r"mlp\.dense_4h_to_h\.(\w+)": r"blk.\1.ffn_down.\2",
    },
    "falcon": {
        r"transformer\.word_embeddings\.weight": "token_embd.weight",
        r"transformer\.ln_f\.(\w+)": r"output_norm.\1",
        _F + r"input_layernorm\.(\w+)": r"blk.\1.attn_norm.\2",
        _F + r"ln_mlp\.(\w+)": r"blk.\1.attn_norm.\2",
        _F + r"ln_attn\.(\w+)": r"blk.\1.attn_norm_2.\2",
        _F + r"self_attention\.query_key_value\.weight": r"blk.\1.attn_qkv.weight",
        _F + r"self_attention\.dense\.weight": r"blk.\1.attn_output.weight",
        _F + r"mlp\.dense_h_to_4h\.weight": r"blk.\1.ffn_up.weight",
        _F + r"mlp\.dense_4h_to_h\.weight": r"blk.\1.ffn_down.weight",
    },
}
_DELTA_NAMES = {
    **_MLP_NORM,
    _L + r"linear_attn\.in_proj_qkv\.weight": r"blk.\1.attn_qkv.weight",
    _L + r"linear_attn\.in_proj_z\.weight": r"blk.\1.attn_gate.weight",
    _L + r"linear_attn\.in_proj_b\.weight": r"blk.\1.ssm_beta.weight",
    _L + r"linear_attn\.in_proj_a\.weight": r"blk.\1.ssm_alpha.weight",
    _L + r"linear_attn\.in_proj_ba\.weight": r"blk.\1.ssm_ba.weight",
    _L + r"linear_attn\.conv1d\.weight": r"blk.\1.ssm_conv1d.weight",
    _L + r"linear_attn\.A_log": r"blk.\1.ssm_a",
    _L + r"linear_attn\.dt_bias": r"blk.\1.ssm_dt.bias",
    _L + r"linear_attn\.norm\.weight": r"blk.\1.ssm_norm.weight",
    _L + r"linear_attn\.out_proj\.weight": r"blk.\1.ssm_out.weight",
    _L + r"mlp\.shared_expert\.(\w+)_proj\.weight": r"blk.\1.ffn_\2_shexp.weight",
    _L + r"mlp\.shared_expert_gate\.weight": r"blk.\1.ffn_gate_inp_shexp.weight",
}
_OTHER_NAMES |= {"qwen3next": _DELTA_NAMES, "qwen35": _DELTA_NAMES, "qwen35moe": _DELTA_NAMES}
_OTHER_NAMES["lfm2"] = _OTHER_NAMES["lfm2moe"] = {
    r"model\.embedding_norm\.weight": "token_embd_norm.weight",
    _L + r"operator_norm\.weight": r"blk.\1.attn_norm.weight",
    _L + r"self_attn\.out_proj\.weight": r"blk.\1.attn_output.weight",
    _L + r"self_attn\.([qk])_layernorm\.weight": r"blk.\1.attn_\2_norm.weight",
    _L + r"conv\.(in|out)_proj\.weight": r"blk.\1.shortconv.\2_proj.weight",
    _L + r"conv\.conv\.weight": r"blk.\1.shortconv.conv.weight",
    _L + r"feed_forward\.w1\.weight": r"blk.\1.ffn_gate.weight",
    _L + r"feed_forward\.w2\.weight": r"blk.\1.ffn_down.weight",
    _L + r"feed_forward\.w3\.weight": r"blk.\1.ffn_up.weight",
    _L + r"ffn_norm\.weight": r"blk.\1.ffn_norm.weight",
    _L + r"feed_forward\.gate\.weight": r"blk.\1.ffn_gate_inp.weight",
    _L + r"feed_forward\.expert_bias": r"blk.\1.exp_probs_b.bias",
    _L + r"conv\.(in|out)_proj\.bias": r"blk.\1.shortconv.\2_proj.bias",
    _L + r"conv\.conv\.bias": r"blk.\1.shortconv.conv.bias",
}
_DELTA = ("qwen3next", "qwen35", "qwen35moe")
# Architectures whose rotated rows llama.cpp's converter interleaves.
_INTERLEAVED = ("llama", "smollm3", "granite", "mistral3", "arcee")
_EXPERT = re.compile(
    r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe|feed_forward)\.experts\.(\d+)\.(\w+)\.weight"
)
_EXPERT_PARTS = {
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}


def to_gguf(
    directory: Path,
    target: Path,
    architecture: str,
    type: str = "f32",
    extra: dict[str, Any] | None = None,
) -> None:
    """Convert the checkpoint in `directory`. `type`: of matrices with rows of a multiple of 32."""
    from safetensors.numpy import load_file

    config = json.loads((directory / "config.json").read_text())
    arrays = _arrays(load_file(directory / "model.safetensors"), config, architecture)
    metadata, tables = _metadata(config, architecture)
    tensors = []
    for name, values in (arrays | tables).items():
        big = (
            values.ndim >= 2
            and values.shape[-1] % 32 == 0
            and "gate_inp" not in name
            and "position" not in name
        )
        stored = type if big else "f32"
        tensors.append(
            Tensor(
                name,
                stored,
                values.shape,
                quantise(stored, np.ascontiguousarray(values, np.float32)),
            )
        )
    write_gguf(target, {"general.architecture": architecture, **metadata, **(extra or {})}, tensors)


def _arrays(
    state: dict[str, np.ndarray], config: dict[str, Any], architecture: str
) -> dict[str, np.ndarray]:
    own = _GEMMA_NAMES if architecture.startswith("gemma") else _OTHER_NAMES.get(architecture, {})
    if architecture == "gemma4":
        own = {**own, **GEMMA4_NAMES}
    rules = {**own, **{k: v for k, v in _NAMES.items() if k not in own}}  # the first match counts
    if architecture == "gpt-oss":
        state = _split_gpt_oss(state)
    if config["model_type"] == "granitemoehybrid":
        state = _split_granite(state)
    if architecture in _DELTA:
        state = delta_state(state, config, architecture)
    if architecture.startswith("lfm2"):
        state = {n: v.squeeze(1) if n.endswith("conv.conv.weight") else v for n, v in state.items()}
    result: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in state.items():
        if found := _EXPERT.fullmatch(name):
            layer, expert, part = found.groups()
            experts.setdefault(f"blk.{layer}.ffn_{_EXPERT_PARTS[part]}_exps.weight", {})[
                int(expert)
            ] = values
            continue
        pattern = next(p for p in rules if re.fullmatch(p, name))
        result[re.fullmatch(pattern, name).expand(rules[pattern])] = _converted(
            name, values, config, architecture
        )  # type: ignore[union-attr]
    return result | {name: np.stack([by[e] for e in sorted(by)]) for name, by in experts.items()}


def _converted(
    name: str, values: np.ndarray, config: dict[str, Any], architecture: str
) -> np.ndarray:
    if architecture in _INTERLEAVED and ".q_proj." in name:
        return _interleaved(values, config["num_attention_heads"])
    if architecture in _INTERLEAVED and ".k_proj." in name:
        return _interleaved(values, config["num_key_value_heads"])
    if "query_key_value" in name:
        heads = config["num_attention_heads"]
        kv = config["num_kv_heads"] if architecture == "falcon" else heads
        if architecture == "falcon" and not config["new_decoder_architecture"]:
            kv = 1
        return _ungrouped(values, heads, kv)
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return values + np.float32(1)
    if architecture == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight$", name):
        return values.T
    return values


def _split_gpt_oss(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts as [experts, out, in], with gate and up apart."""
    result: dict[str, np.ndarray] = {}
    for name, values in state.items():
        if "experts" in name and not name.endswith("_bias"):
            values = values.swapaxes(1, 2)
        if "gate_up_proj" in name:
            result[name.replace("gate_up", "gate")] = values[:, ::2]
            result[name.replace("gate_up", "up")] = values[:, 1::2]
        else:
            result[name] = values
    return result


def _split_granite(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The fused MLP of granitemoehybrid, under llama's names."""
    result: dict[str, np.ndarray] = {}
    for name, values in state.items():
        if "shared_mlp.input_linear" in name:
            for part, rows in zip(("gate", "up"), np.split(values, 2), strict=True):
                result[name.replace("shared_mlp.input_linear", f"mlp.{part}_proj")] = rows
        else:
            result[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = values
    return result


def _ungrouped(values: np.ndarray, heads: int, kv: int) -> np.ndarray:
    """Groups of query rows, key rows and value rows -> all query rows, key rows, value rows."""
    share = heads // kv
    dim = values.shape[0] // (heads + 2 * kv)
    groups = values.reshape(kv, share + 2, dim, *values.shape[1:])
    parts = (groups[:, :share], groups[:, share], groups[:, share + 1])
    return np.concatenate([p.reshape(-1, *values.shape[1:]) for p in parts])


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Put rows j and j + d/2 of each head side by side."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _metadata(config: dict[str, Any], a: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if a == "gpt2":
        return {
            f"{a}.block_count": config["n_layer"],
            f"{a}.context_length": config["n_positions"],
            f"{a}.embedding_length": config["n_embd"],
            f"{a}.feed_forward_length": 4 * config["n_embd"],
            f"{a}.attention.head_count": config["n_head"],
            f"{a}.attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        }, {}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv = config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    if a == "falcon" and not config["new_decoder_architecture"]:
        kv = 1
    eps = next(
        config[key]
        for key in (
            *("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"),
        )
        if key in config
    )
    rms = "rms_norm_eps" in config or "norm_eps" in config
    kind = "layer_norm_rms_epsilon" if rms else "layer_norm_epsilon"
    drafts = config.get("num_mtp_layers", 0)
    metadata = {
        f"{a}.block_count": config["num_hidden_layers"] + drafts,
        f"{a}.context_length": config["max_position_embeddings"],
        f"{a}.embedding_length": config["hidden_size"],
        f"{a}.feed_forward_length": config.get("intermediate_size")
        or config.get("ffn_hidden_size", 0),
        f"{a}.attention.head_count": heads,
        f"{a}.attention.head_count_kv": kv,
        f"{a}.attention.{kind}": eps,
        f"{a}.attention.key_length": head_dim,
        f"{a}.attention.value_length": head_dim,
        f"{a}.vocab_size": config["vocab_size"],
    }
    if a == "granite":
        del metadata[f"{a}.attention.key_length"], metadata[f"{a}.attention.value_length"]
    types = config.get("layer_types")
    recurrent = ("lfm2", "lfm2moe", *_DELTA)
    if types and len(set(types)) > 1 and a not in ("cohere2", "gpt-oss", "gemma2", *recurrent):
        metadata[f"{a}.attention.sliding_window_pattern"] = [
            t == "sliding_attention" for t in types
        ]
    if a in ("glm4moe", "lfm2moe"):
        metadata[f"{a}.expert_gating_func"] = 2
    optional = {
        "sliding_window": "attention.sliding_window",
        "num_local_experts": "expert_count",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "n_routed_experts": "expert_count",
        "n_shared_experts": "expert_shared_count",
        "num_dense_layers": "leading_dense_block_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
        "logit_scale": "logit_scale",
        "use_parallel_residual": "use_parallel_residual",
    }
    metadata |= {
        f"{a}.{theirs}": config[ours]
        for ours, theirs in optional.items()
        if config.get(ours) is not None
    }
    if a.startswith("lfm2"):
        metadata |= lfm2_metadata(config, a)
    if a in _DELTA:
        metadata |= delta_metadata(config, a)
    if a in ("qwen3moe", "qwen3next", "lfm2moe"):
        del metadata[f"{a}.expert_weights_norm"]
    if a == "gemma4":
        own, divisors = gemma4_metadata(config)
        return metadata | own, divisors
    rope, tables = _rope(config, a, head_dim)
    return metadata | rope, tables


def _rope(
    config: dict[str, Any], a: str, head_dim: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    r = config["rope_parameters"]
    r = r.get("full_attention", r)
    dim = int(head_dim * r.get("partial_rotary_factor", 1.0))
    metadata = {f"{a}.rope.freq_base": float(r["rope_theta"]), f"{a}.rope.dimension_count": dim}
    kind = r["rope_type"]
    if "alpha" in r:
        metadata[f"{a}.rope.freq_base"] *= r["alpha"] ** (dim / (dim - 2))
    if "llama_4_scaling_beta" in r:
        metadata[f"{a}.attention.temperature_scale"] = r["llama_4_scaling_beta"]
        metadata[f"{a}.rope.scaling.yarn_log_multiplier"] = r["mscale_all_dim"]
    if kind in ("linear", "yarn"):
        metadata |= {f"{a}.rope.scaling.type": kind, f"{a}.rope.scaling.factor": float(r["factor"])}
    if kind in ("yarn", "longrope"):
        metadata[f"{a}.rope.scaling.original_context_length"] = r[
            "original_max_position_embeddings"
        ]
    if kind == "longrope":
        ratio = config["max_position_embeddings"] / r["original_max_position_embeddings"]
        metadata[f"{a}.rope.scaling.attn_factor"] = math.sqrt(
            1 + math.log(ratio) / math.log(r["original_max_position_embeddings"])
        )
        return metadata, {
            "rope_factors_long.weight": np.array(r["long_factor"], np.float32),
            "rope_factors_short.weight": np.array(r["short_factor"], np.float32),
        }
    return metadata, {"rope_freqs.weight": _llama3_divisors(r, dim)} if kind == "llama3" else {}


def _llama3_divisors(r: dict[str, Any], dim: int) -> np.ndarray:
    low, high, factor, old = (
        r["low_freq_factor"],
        r["high_freq_factor"],
        r["factor"],
        r["original_max_position_embeddings"],
    )
    divisors = []
    for j in range(0, dim, 2):
        wavelength = 2 * math.pi * r["rope_theta"] ** (j / dim)
        if wavelength < old / high:
            divisors.append(1.0)
        elif wavelength > old / low:
            divisors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)
