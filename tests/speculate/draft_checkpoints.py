"""Tiny random checkpoints with a draft layer, in the layouts that are published: safetensors
directories with `mtp.*` (Qwen) or a last block (GLM), and the same as GGUF with `nextn` tensors.

Names and shapes are written here by hand, so that an error in the loader's tables shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from verbatim.convert.export_model import model_metadata, model_tensors
from verbatim.files.gguf_write import write_gguf
from verbatim.formats.conversion import quantise
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.load import load_model

H, HEADS, KV, HEAD, MLP, VOCAB, EXPERTS = 64, 4, 2, 32, 96, 260, 4
KINDS = ("qwen3_5", "qwen3_next", "glm4_moe")
State = dict[str, np.ndarray]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"model_type": "qwen3_5_text", **_COMMON, **_DELTA, "mtp_num_hidden_layers": 1},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_COMMON,
        **_DELTA,
        **_MOE,
        "shared_expert_intermediate_size": 32,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_COMMON,
        "use_qk_norm": True,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    },
}
for _config in CONFIGS.values():
    _config |= {"num_hidden_layers": 2, "tie_word_embeddings": False}

# Names of the draft layer's own tensors: safetensors -> the suffix in GGUF's block.
QWEN_OWN = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
GLM_OWN = {
    "model.layers.2.eh_proj.weight": "nextn.eh_proj.weight",
    "model.layers.2.enorm.weight": "nextn.enorm.weight",
    "model.layers.2.hnorm.weight": "nextn.hnorm.weight",
    "model.layers.2.shared_head.norm.weight": "nextn.shared_head_norm.weight",
}
_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.shared_expert{s}.{p}_proj": f"ffn_{p}_shexp"
        for s in ("", "s")
        for p in ("gate", "up", "down")
    },
}


def _attention(kind: str) -> dict[str, tuple[int, ...]]:
    gate = 1 if kind == "glm4_moe" else 2  # q_proj holds the output gate, too
    return {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (gate * HEADS * HEAD, H),
        "self_attn.k_proj.weight": (KV * HEAD, H),
        "self_attn.v_proj.weight": (KV * HEAD, H),
        "self_attn.o_proj.weight": (H, HEADS * HEAD),
        "self_attn.q_norm.weight": (HEAD,),
        "self_attn.k_norm.weight": (HEAD,),
    }


def _linear_attention(kind: str) -> dict[str, tuple[int, ...]]:
    fused = {"in_proj_qkvz.weight": (96, H), "in_proj_ba.weight": (8, H)}
    apart = {
        "in_proj_qkv.weight": (64, H),
        "in_proj_z.weight": (32, H),
        "in_proj_b.weight": (4, H),
        "in_proj_a.weight": (4, H),
    }
    parts = {
        **(fused if kind == "qwen3_next" else apart),
        "conv1d.weight": (64, 1, 4),
        "A_log": (4,),
        "dt_bias": (4,),
        "norm.weight": (8,),
        "out_proj.weight": (H, 32),
    }
    norms = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
    return {**norms, **{f"linear_attn.{name}": shape for name, shape in parts.items()}}


def _mlp(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, H),
        f"{prefix}.up_proj.weight": (inner, H),
        f"{prefix}.down_proj.weight": (H, inner),
    }


def _feed_forward(kind: str, layer: int) -> dict[str, tuple[int, ...]]:
    if kind == "qwen3_5" or (kind == "glm4_moe" and layer == 0):
        return _mlp("mlp", MLP)
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (EXPERTS, H)}
    for e in range(EXPERTS):
        shapes |= _mlp(f"mlp.experts.{e}", 32)
    if kind == "glm4_moe":
        bias: dict[str, tuple[int, ...]] = {"mlp.gate.e_score_correction_bias": (EXPERTS,)}
        return shapes | bias | _mlp("mlp.shared_experts", 32)
    return shapes | {"mlp.shared_expert_gate.weight": (1, H)} | _mlp("mlp.shared_expert", 32)


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, H),
        "model.norm.weight": (H,),
        "lm_head.weight": (VOCAB, H),
    }
    types = CONFIGS[kind].get("layer_types", ["full_attention"] * 2)
    for i, layer in enumerate(types):
        mixer = _attention(kind) if layer == "full_attention" else _linear_attention(kind)
        parts = {**mixer, **_feed_forward(kind, i)}
        found |= {f"model.layers.{i}.{name}": shape for name, shape in parts.items()}
    own = GLM_OWN if kind == "glm4_moe" else QWEN_OWN
    prefix = "model.layers.2." if kind == "glm4_moe" else "mtp.layers.0."
    found |= {name: (H, 2 * H) if "proj" in name or ".fc." in name else (H,) for name in own}
    parts = {**_attention(kind), **_feed_forward(kind, 2)}
    return found | {f"{prefix}{name}": shape for name, shape in parts.items()}


def random_state(kind: str, seed: int = 0) -> State:
    r = np.random.default_rng(seed)
    offset = 0.0 if kind == "glm4_moe" else 1.0  # norms multiply by 1 + weight
    state: State = {}
    for name, shape in shapes(kind).items():
        values = r.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            plain = offset if "linear_attn" not in name else 0.0
            values = np.float32(1.0 - plain) + np.float32(0.2) * values
        elif len(shape) == 1:
            values *= np.float32(0.1)
        elif "embed" not in name:
            sharp = 2.0 if "q_proj" in name or "k_proj" in name or "mlp.gate.w" in name else 1.0
            values *= np.float32(sharp / np.sqrt(shape[-1]))
        state[name] = values
    return state


def directory(path: Path, kind: str, state: State) -> Path:
    """Write the checkpoint as safetensors."""
    path.mkdir(exist_ok=True)
    save_file(state, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    return path


def gguf(path: Path, source: Path, kind: str, state: State, type: str = "f32") -> Path:
    """Write the checkpoint in `source` as GGUF: the model's own layers by `convert`, and the draft
    layer as block 2."""
    metadata, extra = model_metadata(load_model(source), "tiny")
    tensors = [*extra, *model_tensors(load_model(source))]
    own = GLM_OWN if kind == "glm4_moe" else QWEN_OWN
    prefix = "model.layers.2." if kind == "glm4_moe" else "mtp.layers.0."
    block: State = {own[name]: state[name] for name in own}
    for name, values in state.items():
        if not name.startswith(prefix) or name in own:
            continue
        part = name.removeprefix(prefix)
        if part.endswith("e_score_correction_bias"):
            block["exp_probs_b.bias"] = values
        elif ".experts." not in part:
            block[f"{_GGUF_PARTS[part.removesuffix('.weight')]}.weight"] = values
    for part in ("gate", "up", "down"):
        stack = [f"{prefix}mlp.experts.{e}.{part}_proj.weight" for e in range(EXPERTS)]
        if stack[0] in state:
            block[f"ffn_{part}_exps.weight"] = np.stack([state[name] for name in stack])
    for name, values in block.items():
        if "norm" in name and kind != "glm4_moe":
            values = values + np.float32(1)  # GGUF stores the sum
        big = values.ndim > 1 and values.shape[-1] % 32 == 0 and "gate_inp" not in name
        stored = type if big else "f32"
        data = quantise(stored, np.ascontiguousarray(values, np.float32))
        tensors.append(Tensor(f"blk.2.{name}", stored, values.shape, data))
    arch = metadata["general.architecture"]
    metadata |= {f"{arch}.block_count": 3, f"{arch}.nextn_predict_layers": 1}
    write_gguf(path, metadata, tensors)
    return path
