"""Key tables of GGUF headers (see keys.py for the three treatments).

`ARCH.*` keys have one table per architecture. An unknown one is ignored with a warning if its value
means off; any other value is an error. `general.*`, `tokenizer.*` and other namespaces cannot
change logits, so an unknown key there is a warning. Names are those of llama.cpp's gguf constants;
tests/model/test_model_keys.py compares them.
"""

from __future__ import annotations

import re

from verbatim.model.keys import Key, Table, alias, followed, must_equal, no_effect

POOLING = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # values of ARCH.pooling_type

_FIRST: dict[str, Key] = {
    "context_length": followed("context, and the trained length of rope scalings"),
    "embedding_length": followed("width of the model"),
    "block_count": followed("layers"),
    "feed_forward_length": followed("inner width of the MLP"),
    "attention.head_count": followed("query heads"),
    "attention.head_count_kv": followed("key and value heads; absent: as many as query heads"),
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
_ROTARY: dict[str, Key] = {
    **_FIRST,
    "attention.key_length": followed("size of a head; absent: embedding_length / head_count"),
    "attention.value_length": followed("checked: equal to attention.key_length"),
    "attention.layer_norm_rms_epsilon": followed("epsilon of the norms"),
    "attention.layer_norm_epsilon": no_effect("the norms are RMS norms"),
    "attention.sliding_window": followed("window of every layer; 0: none"),
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
_MOE: dict[str, Key] = {
    "expert_count": followed("experts of a layer; 0: dense"),
    "expert_used_count": followed("experts used per token"),
    "expert_feed_forward_length": followed("inner width of an expert"),
    "expert_shared_count": must_equal(0, note="no shared experts"),
    "expert_shared_feed_forward_length": must_equal(0, note="no shared experts"),
    "expert_group_count": must_equal(0, 1, note="no groups of experts"),
    "expert_group_used_count": must_equal(0, 1, note="no groups of experts"),
    "expert_gating_func": must_equal(0, 1, note="softmax"),
    "expert_weights_scale": must_equal(0, 1, note="not scaled"),
    "expert_weights_norm": must_equal(True, note="weights of the chosen experts sum to 1"),
    "leading_dense_block_count": must_equal(0, note="every layer is a mixture"),
    "moe_every_n_layers": must_equal(0, 1, note="every layer is a mixture"),
    "interleave_moe_layer_step": must_equal(0, 1, note="every layer is a mixture"),
}
_GEMMA = {"final_logit_softcapping": followed("cap of logits; 0: none")}
_LAYER_NORM: dict[str, Key] = {
    **_ROTARY,
    "attention.layer_norm_epsilon": followed("epsilon of the norms"),
    "attention.layer_norm_rms_epsilon": no_effect("the norms are layer norms"),
}
_DELTA: dict[str, Key] = {
    **_ROTARY,
    "ssm.conv_kernel": followed("taps of the convolutions"),
    "ssm.state_size": followed("size of a key head of a delta net"),
    "ssm.group_count": followed("key heads of a delta net"),
    "ssm.time_step_rank": followed("value heads of a delta net"),
    "ssm.inner_size": followed("width of all value heads of a delta net"),
    "full_attention_interval": followed("layer period: every N-th layer is attention", 4),
    "nextn_predict_layers": followed("last layers, which draft tokens and are not used", 0),
    "rope.dimension_sections": no_effect("text has one position per token in every section"),
}
_DELTA_MOE: dict[str, Key] = {
    **_DELTA,
    **_MOE,
    "expert_count": followed("experts of a layer"),
    "expert_shared_feed_forward_length": followed("inner width of the shared MLP"),
}
_CONV: dict[str, Key] = {
    "attention.head_count_kv": followed(
        "key and value heads, layer by layer; 0: the layer is a convolution"
    ),
    "shortconv.l_cache": followed("taps of the convolutions"),
}
_PARALLEL = "attention and MLP read the same residual"


def _pattern(period: int, what: str) -> dict[str, Key]:
    """Windows of some layers. `what`: remark on the layers without one."""
    return {
        "attention.sliding_window": followed(f"window of the sliding layers; 0: none{what}"),
        "attention.sliding_window_pattern": followed(
            "layer period: every N-th layer is full attention; or one flag per layer", period
        ),
    }


GGUF_KEYS: dict[str, Table] = {
    "llama": {**_ROTARY, **_MOE},
    "qwen2": {**_ROTARY},
    "qwen3": {**_ROTARY},
    "qwen3moe": {**_ROTARY, **_MOE},
    "gemma2": {
        **_ROTARY,
        **_GEMMA,
        "attn_logit_softcapping": followed("cap of attention scores; 0: none", 50.0),
        "final_logit_softcapping": followed("cap of logits; 0: none", 30.0),
        "attention.sliding_window": followed(
            "window of every other layer, from the first on", 4096
        ),
        "attention.sliding_window_pattern": must_equal(2, note="every other layer has a window"),
    },
    "gemma3": {
        **_ROTARY,
        **_GEMMA,
        "attn_logit_softcapping": must_equal(
            0, note="llama.cpp and transformers ignore it in gemma3"
        ),
        "attention.sliding_window": followed("window of the sliding layers", 1024),
        "attention.sliding_window_pattern": followed(
            "layer period: every N-th layer is full attention; or one flag per layer", 6
        ),
        "rope.freq_base": followed("base of the frequencies of full layers", 1e6),
        "rope.freq_base_swa": followed("base of the frequencies of sliding layers", 10000.0),
    },
    "gemma4": {
        **_ROTARY,
        **_MOE,
        "attention.head_count_kv": followed("key and value heads, of all layers or layer by layer"),
        "feed_forward_length": followed("inner width of the MLP, of all layers or layer by layer"),
        "attention.key_length": followed("size of a head of full layers"),
        "attention.key_length_swa": followed("size of a head of sliding layers"),
        "attention.value_length_swa": followed("checked: equal to attention.key_length_swa"),
        "attention.shared_kv_layers": followed(
            "last layers, which read the keys and values of the last earlier layer of their type"
        ),
        "attention.sliding_window": followed("window of the sliding layers"),
        "attention.sliding_window_pattern": followed(
            "layer period: every N-th layer is full attention; or one flag per layer", 6
        ),
        "rope.dimension_count": followed("rotated part of a head of full layers"),
        "rope.dimension_count_swa": followed("rotated part of a head of sliding layers"),
        "rope.freq_base": followed("base of the frequencies of full layers", 1e6),
        "rope.freq_base_swa": followed("base of the frequencies of sliding layers", 10000.0),
        "embedding_length_per_layer_input": followed("width of each layer's own input; 0: none"),
        "final_logit_softcapping": followed("cap of logits; 0: none"),
        "expert_count": followed("experts beside the MLP of a layer; 0: none"),
    },
    "phi3": {**_ROTARY},
    "gpt2": {**_FIRST, "attention.layer_norm_epsilon": followed("epsilon of the norms")},
    "smollm3": {**_ROTARY},
    "granite": {
        **_ROTARY,
        "attention.scale": followed("multiplies the scores of attention; 0: 1 / root of a head"),
        "embedding_scale": followed("multiplies the embeddings; 0: not scaled"),
        "residual_scale": followed("multiplies the outputs of attention and MLP; 0: not scaled"),
        "logit_scale": followed("divides the logits"),
        "rope.scaling.finetuned": must_equal(True, note="positions are rotary"),
    },
    "olmo2": {
        **_ROTARY,
        **_pattern(4, "; rope scaling applies to full layers only"),
        "rope.freq_base_swa": followed("base of the frequencies of sliding layers"),
    },
    "seed_oss": {**_ROTARY},
    "hunyuan-dense": {**_ROTARY},
    "mistral3": {
        **_ROTARY,
        "attention.temperature_scale": followed(
            "queries at position p are multiplied by 1 + this ln(1 + floor(p / trained length))"
        ),
        "rope.scaling.yarn_log_multiplier": followed(
            "cosines and sines are divided by 0.1 this ln(factor) + 1"
        ),
    },
    "exaone4": {**_ROTARY, **_pattern(4, "; full layers then have no rotary positions")},
    "command-r": {**_LAYER_NORM, "logit_scale": followed("multiplies the logits")},
    "cohere2": {
        **_LAYER_NORM,
        **_pattern(4, "; full layers have no rotary positions"),
        "logit_scale": followed("multiplies the logits"),
    },
    "glm4": {**_ROTARY},
    "ernie4_5": {**_ROTARY},
    "arcee": {**_ROTARY},
    "gptneox": {**_LAYER_NORM, "use_parallel_residual": followed(_PARALLEL)},
    "starcoder2": {**_LAYER_NORM},
    "stablelm": {
        **_LAYER_NORM,
        "use_parallel_residual": no_effect("the norms in the file decide"),
    },
    "falcon": {**_LAYER_NORM},
    "glm4moe": {
        **_ROTARY,
        **_MOE,
        "expert_shared_count": followed("inner width of the shared MLP, in experts"),
        "expert_gating_func": must_equal(0, 2, note="sigmoid"),
        "expert_weights_scale": followed("multiplies the weights of the chosen experts; 0: 1"),
        "expert_weights_norm": followed("weights of the chosen experts sum to 1", False),
        "leading_dense_block_count": followed("first layers with a dense MLP", 0),
        "nextn_predict_layers": followed("last layers, which draft tokens and are not used", 0),
    },
    "gpt-oss": {
        **_ROTARY,
        **_MOE,
        **_pattern(2, ""),
        "expert_gating_func": must_equal(0, 1, 3, note="softmax"),
    },
    "lfm2": {**_ROTARY, **_CONV},
    "qwen3next": _DELTA_MOE,
    "lfm2moe": {
        **_ROTARY,
        **_MOE,
        **_CONV,
        "expert_count": followed("experts of a layer"),
        "expert_gating_func": must_equal(0, 2, note="sigmoid"),
        "expert_weights_scale": followed("multiplies the weights of the chosen experts; 0: 1"),
        "expert_weights_norm": followed("weights of the chosen experts sum to 1", True),
        "leading_dense_block_count": followed("first layers with a dense MLP", 0),
    },
    "qwen35": _DELTA,
    "qwen35moe": _DELTA_MOE,
}

# Namespaces other than ARCH.* and their use. None of them changes logits.
GENERAL_KEYS: dict[str, Key] = {
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
