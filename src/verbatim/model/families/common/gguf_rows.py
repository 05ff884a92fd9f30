"""Rows of the key tables of GGUF headers (see keys.py for the three treatments).

`ARCH.*` keys have one table per architecture, in its family's file. An unknown one is ignored with
a warning if its value means off; any other value is an error. `general.*`, `tokenizer.*` and other
namespaces cannot change logits, so an unknown key there is a warning. Names are those of
llama.cpp's gguf constants; tests/model/test_model_keys.py compares them.
"""

from __future__ import annotations

import re

from verbatim.model.keys import Table, alias, followed, must_equal, no_effect, renamed

POOLING = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # values of ARCH.pooling_type

GGUF_KEYS: Table = {
    "context_length": renamed("max_position_embeddings"),
    "embedding_length": renamed("hidden_size"),
    "block_count": renamed("num_hidden_layers"),
    "feed_forward_length": renamed("intermediate_size"),
    "attention.head_count": renamed("num_attention_heads"),
    "attention.head_count_kv": renamed("num_key_value_heads"),
    "attention.causal": must_equal(True, note="attention is causal; encoders are not supported"),
    "pooling_type": followed(
        "how `embed` pools a sequence: 1 mean, 2 cls, 3 last; `embed` refuses others, and "
        "a file without it, unless the setting `pooling` names one"
    ),
    "vocab_size": no_effect("the embedding's rows decide"),
    "tensor_data_layout": no_effect("metadata"),
    "rope.scaling.finetuned": no_effect("metadata"),
    "use_parallel_residual": must_equal(False, note="attention and MLP follow one another"),
    "attention.clamp_kqv": must_equal(0, note="queries, keys and values are not clamped"),
    "attention.max_alibi_bias": must_equal(0, note="no ALiBi"),
    "attention.scale": must_equal(0, note="scores are divided by the root of a head's size"),
    "attention.output_scale": must_equal(0, 1, note="not scaled"),
    "attention.shared_kv_layers": must_equal(0, note="every layer has its own keys and values"),
    "logit_scale": must_equal(0, 1, note="not scaled"),
    "residual_scale": must_equal(0, 1, note="not scaled"),
    "embedding_scale": must_equal(0, 1, note="not scaled, except by the family's own rule"),
    "nextn_predict_layers": must_equal(0, note="no multi-token prediction layers"),
}
GGUF_ROTARY: Table = {
    **GGUF_KEYS,
    "attention.key_length": renamed("head_dim"),
    "attention.value_length": followed("checked: equal to attention.key_length"),
    "attention.layer_norm_rms_epsilon": renamed("rms_norm_eps"),
    "attention.layer_norm_epsilon": no_effect("the norms are RMS norms"),
    "attention.sliding_window": renamed(
        "sliding_window", "window of every layer; 0: none", zero=True
    ),
    "rope.dimension_count": followed("rotated part of a head"),
    "rope.freq_base": followed("base of the frequencies", 10000.0),
    "rope.scaling.type": followed("none, linear, yarn or longrope; absent: linear"),
    "rope.scaling.factor": followed("scale"),
    "rope.scale_linear": alias("rope.scaling.factor", private=True),
    "rope.scaling.original_context_length": followed("trained length"),
    "rope.scaling.attn_factor": followed(
        "multiplies cosines and sines; checked: 1 without yarn and longrope"
    ),
    "rope.scaling.yarn_beta_fast": followed("start of yarn's blended band", 32.0),
    "rope.scaling.yarn_beta_slow": followed("end of yarn's blended band", 1.0),
    "rope.scaling.yarn_ext_factor": must_equal(-1, 1, note="yarn's band is used in full"),
    "rope.scaling.yarn_attn_factor": must_equal(1, note="rope.scaling.attn_factor decides"),
    "rope.scaling.yarn_log_multiplier": must_equal(0, note="yarn's own magnitude is used"),
    "rope.scaling.alpha": must_equal(0, 1, note="no NTK scaling of the base"),
}


def rotary(*tables: Table) -> Table:
    """The keys of an architecture with rotary positions, then its own."""
    keys = dict(GGUF_ROTARY)
    for table in tables:
        keys |= table
    return keys


def gguf_experts(config: str, note: str = "experts of a layer; 0: dense") -> Table:
    """The keys of a mixture. `config`: the config's key of the number of experts."""
    return {**_EXPERTS, "expert_count": renamed(config, note)}


_NO_SHARED = must_equal(0, note="no shared experts")
_NO_GROUPS = must_equal(0, 1, note="no groups of experts")
_EVERY_LAYER = must_equal(0, 1, note="every layer is a mixture")
_EXPERTS: Table = {
    "expert_used_count": renamed("num_experts_per_tok"),
    "expert_feed_forward_length": renamed("moe_intermediate_size"),
    "expert_shared_count": _NO_SHARED,
    "expert_shared_feed_forward_length": _NO_SHARED,
    "expert_group_count": _NO_GROUPS,
    "expert_group_used_count": _NO_GROUPS,
    "expert_gating_func": must_equal(0, 1, note="softmax"),
    "expert_weights_scale": must_equal(0, 1, note="not scaled"),
    "expert_weights_norm": must_equal(True, note="weights of the chosen experts sum to 1"),
    "leading_dense_block_count": must_equal(0, note="every layer is a mixture"),
    "moe_every_n_layers": _EVERY_LAYER,
    "interleave_moe_layer_step": _EVERY_LAYER,
}
# Files of this architecture do not state whether the weights of the chosen experts sum to 1.
NOT_RENORMALISED = must_equal(False, note="weights are not divided by their sum")
SHARED_WIDTH = renamed("shared_expert_intermediate_size")


def sigmoid_experts(config: str, dense: str, *, norm: bool, note: str) -> Table:
    """A mixture with a sigmoid router. `dense`: the config's key of the number of dense first
    layers. `norm`: the default of norm_topk_prob."""
    return {
        **gguf_experts(config, note),
        "expert_gating_func": must_equal(0, 2, note="sigmoid"),
        "expert_weights_scale": renamed("routed_scaling_factor", zero=True),
        "expert_weights_norm": renamed("norm_topk_prob", default=norm),
        "leading_dense_block_count": renamed(dense, default=0),
    }


DRAFTS = followed("last layers, of which the first drafts tokens", 0)
LOGIT_CAP = renamed("final_logit_softcapping", zero=True)
# A period, or one flag per layer
LAYER_PERIOD = "layer period: every N-th layer is full attention; or one flag per layer"


def gguf_layer_norm(eps: str) -> Table:
    """`eps`: the config's key of the norms' epsilon."""
    return {
        **GGUF_ROTARY,
        "attention.layer_norm_epsilon": renamed(eps),
        "attention.layer_norm_rms_epsilon": no_effect("the norms are layer norms"),
    }


def pattern(period: int, what: str = "", *, zero: bool = True) -> Table:
    """Windows of some layers. `what`: remark on the layers without one. `zero`: 0 is no window;
    otherwise a window is required."""
    note = f"window of the sliding layers{'; 0: none' if zero else ''}{what}"
    return {
        "attention.sliding_window": renamed("sliding_window", note, zero=zero),
        "attention.sliding_window_pattern": renamed("layer_types", LAYER_PERIOD, period),
    }


# Namespaces other than ARCH.* and their use. None of them changes logits.
# A diffusion model with full attention: keys of the architecture, and of other namespaces.
GGUF_FULL: Table = {
    **GGUF_ROTARY,
    "attention.causal": must_equal(False, note="every position sees all others"),
}


def gguf_masks(shift: bool) -> Table:
    """`shift`: a row draws the next position."""
    return {
        "tokenizer.ggml.mask_token_id": renamed("mask_token_id"),
        "diffusion.shift_logits": must_equal(shift, note="which position a row draws"),
    }


GENERAL_KEYS: Table = {
    "general.architecture": followed("chooses the family"),
    "general.alignment": followed("alignment of tensor data in bytes", 32),
    "general.type": must_equal(
        "model", note="adapters, projectors and importance matrices are not models"
    ),
    "general.quantization_version": no_effect("metadata; tensor types decide"),
    "general.file_type": no_effect("metadata; tensor types decide"),
}
NAMESPACES = {
    "general.": "metadata",
    "tokenizer.": "read with the tokenizer and the chat template",
    "split.": "parts of a split model",
    "quantize.": "metadata",
    "imatrix.": "metadata",
    "training.": "training only",
}
_METADATA = re.compile(
    r"general\.((sampling|base_model|dataset|source|license)\b.*"
    r"|name|author|version|organization|finetune|basename"
    r"|description|quantized_by|size_label|url|doi|uuid|repo_url|tags|languages|license)"
    r"|tokenizer\..*|split\.(no|count|tensors\.count)"
    r"|quantize\.imatrix\..*|imatrix\..*|training\..*"
)


def is_metadata(name: str) -> bool:
    """Whether a key outside ARCH.* is known and cannot change logits."""
    return _METADATA.fullmatch(name) is not None
