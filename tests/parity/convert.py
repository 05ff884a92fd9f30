"""Convert a Hugging Face checkpoint to GGUF, independently of the code under test.

Shares no code with the reader, so that it can find the reader's errors in: names (here those of the
gguf package), interleaving of llama's rotated rows, gemma's norms with 1 added, gpt2's transposed
matrices, stacked experts.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemma4_convert import gemma4_metadata
from recurrent_convert import delta_metadata, delta_state, lfm2_metadata

from verbatim.files.gguf_write import write_gguf
from verbatim.formats.conversion import quantise
from verbatim.formats.tensor import Tensor

_DELTA = ("qwen3next", "qwen35", "qwen35moe")
# Architectures whose rotated rows llama.cpp's converter interleaves.
_INTERLEAVED = ("llama", "smollm3", "granite", "mistral3", "arcee", "llada")
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
    if architecture == "gpt-oss":
        state = _split_gpt_oss(state)
    if config["model_type"] == "granitemoehybrid":
        state = _split_granite(state)
    if architecture in _DELTA:
        state = delta_state(state, config, architecture)
    if architecture.startswith("lfm2"):
        state = {n: v.squeeze(1) if n.endswith("conv.conv.weight") else v for n, v in state.items()}
    known = _names(architecture, config.get("num_hidden_layers", 9))
    result: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in state.items():
        if found := _EXPERT.fullmatch(name):
            layer, expert, part = found.groups()
            experts.setdefault(f"blk.{layer}.ffn_{_EXPERT_PARTS[part]}_exps.weight", {})[
                int(expert)
            ] = values
            continue
        result[_gguf_name(name, known)] = _converted(name, values, config, architecture)
    return result | {name: np.stack([by[e] for e in sorted(by)]) for name, by in experts.items()}


def _names(architecture: str, layers: int) -> Any:
    gguf = pytest.importorskip("gguf")  # missing where only the tests of the GPU run

    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, layers)


def _gguf_name(name: str, known: Any) -> str:
    """By the gguf package's table. llama.cpp's converter also renames what is no module there."""
    if name.startswith("lm_head."):  # tied heads are not in the table
        return name.replace("lm_head", "output")
    if found := re.fullmatch(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)", name):
        part = "ffn_gate_inp" if found[2] == "scale" else "ffn_down_exps"
        return f"blk.{found[1]}.{part}.scale"
    spellings = (name, *(re.sub("_bias$", end, name) for end in (".bias", "_proj.bias")))
    result = next(filter(None, (known.get_name(s, (".weight", ".bias")) for s in spellings)))
    if result.endswith((".weight", ".bias", ".ssm_a")):
        return result
    return result + (".bias" if result.endswith("exp_probs_b") else ".weight")


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
    if architecture in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
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
