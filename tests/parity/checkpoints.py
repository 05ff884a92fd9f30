"""Tiny random checkpoints of every supported family, rope scaling and attention shape.

transformers creates them; its logits are the expected values of the parity tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemma4_checkpoints import GEMMA4_CASES
from newer_checkpoints import NEWER_CASES
from parity_case import ABSENT, VOCAB, Case, rope
from recurrent_checkpoints import RECURRENT_CASES
from registry_cases import derived_cases

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9, "num_hidden_layers": 4}
_LONG = [1.0, 1.2, 1.5, 2.0]
_SHORT = [1.0, 1.0, 1.1, 1.2]


_LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
_YARN_FULL = rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    beta_fast=16.0,
    beta_slow=2.0,
    mscale=0.7,
    mscale_all_dim=0.3,
)
_LONGROPE = rope(
    "longrope", long_factor=_LONG, short_factor=_SHORT, original_max_position_embeddings=16
)
_LONGROPE_SHORT = rope(
    "longrope", long_factor=_LONG, short_factor=_SHORT, original_max_position_embeddings=64
)
_PHI_LONG = {
    **rope("longrope", long_factor=_LONG[:3], short_factor=_SHORT[:3], partial_rotary_factor=0.75),
    "original_max_position_embeddings": 16,
}

FIRST_CASES = [
    Case("llama", "Llama", gguf="llama"),
    Case(
        "llama-mha-tied",
        "Llama",
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        gguf="llama",
    ),
    Case(
        "llama-mqa-wide-heads",
        "Llama",
        # an epsilon that changes the logits: without it, no case would find that it is ignored
        {"num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 0.05},
        gguf="llama",
    ),
    Case(
        "llama-biases",
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
        refused="hidden_act",
    ),
    Case(
        "llama-attention-bias",
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
        gguf="llama",
    ),
    Case("llama-linear", "Llama", rope("linear", factor=4.0), gguf="llama", seed=1),
    Case(
        "llama-dynamic-short", "Llama", rope("dynamic", factor=4.0), refused="rope_type 'dynamic'"
    ),
    # transformers uses the longest sequence so far, the engine its context. The two agree after
    # a sequence that fills the context.
    Case(
        "llama-dynamic-long",
        "Llama",
        {"max_position_embeddings": 32, **rope("dynamic", factor=4.0)},
        context=112,
        prompt=80,
        refused="rope_type 'dynamic'",
    ),
    Case("llama-llama3", "Llama", _LLAMA3, gguf="llama"),
    Case("llama-yarn", "Llama", _YARN, gguf="llama"),
    Case("llama-yarn-mscale", "Llama", _YARN_FULL),
    # transformers switches at the original length. A prompt beyond it is long for both, a context
    # within it is short for both.
    Case("llama-longrope-long", "Llama", _LONGROPE),
    Case("llama-longrope-short", "Llama", _LONGROPE_SHORT, context=64),
    Case("mistral", "Mistral", {"sliding_window": 9}, gguf="llama"),
    Case("mistral-no-window", "Mistral", {"sliding_window": None, "head_dim": 16}, gguf="llama"),
    Case("qwen2", "Qwen2", {"tie_word_embeddings": True}, gguf="qwen2"),
    Case(
        "qwen2-windows",
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        refused="layer_types",
    ),
    Case("qwen3", "Qwen3", {"head_dim": 16}, gguf="qwen3"),
    Case(
        "qwen3-tied",
        "Qwen3",
        {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 1},
        gguf="qwen3",
    ),
    Case("gemma2", "Gemma2", {**_GEMMA, "query_pre_attn_scalar": 16}, gguf="gemma2"),
    Case(
        "gemma2-caps",
        "Gemma2",
        {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        refused="query_pre_attn_scalar",
    ),
    Case(
        "gemma3",
        "Gemma3Text",
        {**_GEMMA, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
        gguf="gemma3",
    ),
    Case(
        "gemma3-linear",
        "Gemma3Text",
        {
            **_GEMMA,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    Case("phi3", "Phi3", {}, gguf="phi3"),
    Case("phi3-window", "Phi3", {"sliding_window": 9, "num_key_value_heads": 4}, gguf="phi3"),
    Case("phi3-longrope", "Phi3", _PHI_LONG, gguf="phi3"),
    Case("gpt2", "GPT2", {}, gguf="gpt2"),
    Case("mixtral", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, gguf="llama"),
    Case(
        "mixtral-window",
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 9},
    ),
    Case(
        "qwen3moe",
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
        gguf="qwen3moe",
    ),
    Case(
        "qwen3moe-mixed",
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
        refused="mlp_only_layers",
    ),
]

_LISTED = FIRST_CASES + NEWER_CASES + RECURRENT_CASES + GEMMA4_CASES
CASES = _LISTED + derived_cases(case.name for case in _LISTED)


def config_of(case: Case) -> Any:
    import transformers

    if case.kind == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCAB}
        return transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, **case.changes)
    values = {k: v for k, v in {**_BASE, **case.changes}.items() if v is not ABSENT}
    if text := case.changes.get("text_config"):
        values = {**case.changes, "text_config": {**_BASE, **text}}
    return getattr(transformers, f"{case.kind}Config")(**values)


def class_of(case: Case) -> str:
    if case.kind == "GPT2":
        return "GPT2LMHeadModel"
    if "text_config" in case.changes:
        return f"{case.kind}ForConditionalGeneration"
    return f"{case.kind.removesuffix('Text')}ForCausalLM"


def build(case: Case, directory: Path) -> Any:
    """Build the transformers model (float32, eager attention) and save it to `directory`."""
    import torch
    import transformers

    torch.manual_seed(sum(case.name.encode()) + 10_000 * case.seed)
    config = config_of(case)
    config._attn_implementation = "eager"
    model = getattr(transformers, class_of(case))(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            randomise(name, p)
        for name, p in model.named_buffers():
            if name.endswith(
                ("e_score_correction_bias", "expert_bias", "layer_scalar")
            ):  # of a router, and trained
                randomise(name, p)
    model.save_pretrained(directory)
    return model


def randomise(name: str, p: Any) -> None:
    """Draw larger weights than the library's initialisers.

    Those give near-uniform attention and flat logits, which would hide errors."""
    import torch

    if "sinks" in name:
        p.copy_(torch.randn_like(p))
    elif name.endswith("A_log"):
        # The library's states forget at once: a wrong state would be hidden, and outputs near zero
        # amplify rounding, so that the library's two forms differ by 1e-3.
        p.copy_(-1.0 + 0.5 * torch.randn_like(p))
    elif p.ndim == 1:
        p.add_(0.1 * torch.randn_like(p))
    elif "embed" in name or "wte" in name or "wpe" in name:
        p.copy_(0.7 * torch.randn_like(p))
    else:
        sharp = (
            2.0
            if any(
                part in name
                for part in (
                    *("q_proj", "k_proj", "qkv", "c_attn", "query_key_value", "router"),
                    *("mlp.gate.", "feed_forward.gate."),
                )
            )
            else 1.0
        )
        p.copy_(torch.randn_like(p) * sharp / p.shape[-1] ** 0.5)
