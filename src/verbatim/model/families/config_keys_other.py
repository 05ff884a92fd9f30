"""Key tables of config.json: families with layer norms, and mixtures of experts, after mixtral and
qwen3_moe."""

from __future__ import annotations

from verbatim.model.families.config_key_parts import (
    COMMON_KEYS,
    FULL,
    NO_BIAS,
    ROUTER,
    TRAINING,
    WINDOW_TYPES,
    llama_keys,
    rope_keys,
    sizes,
    theta_key,
)
from verbatim.model.keys import Key, Table, alias, followed, must_equal, no_effect

_PARALLEL = "attention and MLP read the same residual"
_COHERE: dict[str, Key] = {
    **COMMON_KEYS,
    **sizes(256000, 8192, 22528, 40, 64, None, 8192),
    **llama_keys(eps=("layer_norm_eps", 1e-5), tied=True),
    "attention_bias": followed("biases of q, k, v and o", False),
    "mlp_bias": NO_BIAS,
    "logit_scale": followed("multiplies the logits", 0.0625),
    "position_embedding_type": must_equal(
        "rope_gptj", note="rotary positions of interleaved pairs", private=True
    ),
    "rotary_pct": must_equal(1.0, 1, note="whole heads are rotated", private=True),
    "use_qk_norm": must_equal(False, note="no layer norm of queries and keys", private=True),
    "use_parallel_block": must_equal(True, note=_PARALLEL, private=True),
    "use_gated_activation": must_equal(True, note="the MLP has a gate", private=True),
    "use_parallel_embedding": no_effect("training only", private=True),
    "use_embedding_sharing": no_effect("`tie_word_embeddings` decides", private=True),
}

OTHER_KEYS: dict[str, Table] = {
    "cohere": {
        **_COHERE,
        **rope_keys(500000.0),
        **FULL,
        "layer_norm_eps": followed("epsilon of the norms", 1e-5, nullable=True),
        "logit_scale": followed("multiplies the logits", 0.0625, nullable=True),
        "use_qk_norm": must_equal(False, note="no layer norm of queries and keys"),
    },
    "cohere2": {
        **_COHERE,
        **rope_keys(10000.0),
        "sliding_window": followed(
            "window of the sliding_attention layers; the other layers have no rotary positions",
            4096,
            nullable=True,
        ),
        "layer_types": followed("window or none, layer by layer"),
        "sliding_window_pattern": followed(
            "layer period: every N-th layer is full_attention, where layer_types is absent", 4
        ),
        "layer_switch": no_effect("`sliding_window_pattern` decides", private=True),
        "order_of_interleaved_layers": must_equal(
            "local_attn_first", note="the last layer of a period is full_attention", private=True
        ),
    },
    "gpt_neox": {
        **COMMON_KEYS,
        **sizes(50432, 6144, 24576, 44, 64, None, 2048),
        **rope_keys(10000.0),
        **llama_keys(
            must_equal(note="it is hidden_size / num_attention_heads, as in transformers"),
            eps=("layer_norm_eps", 1e-5),
            act="gelu",
        ),
        **FULL,
        "num_key_value_heads": must_equal(note="as many as query heads, as in transformers"),
        "rotary_emb_base": theta_key("base of the frequencies", 1e4),
        "rotary_pct": followed("rotated fraction of a head, where the rope record has none", 0.25),
        "rope_theta": no_effect("`rotary_emb_base` decides, as in transformers"),
        "partial_rotary_factor": no_effect("`rotary_pct` decides, as in transformers"),
        "attention_bias": followed("biases of q, k, v and o", True),
        "mlp_bias": no_effect("the MLP always has biases, as in transformers"),
        "use_parallel_residual": followed(_PARALLEL, True),
        "is_decoder": no_effect("decoder-only families are decoders"),
    },
    "starcoder2": {
        **COMMON_KEYS,
        **sizes(49152, 3072, 12288, 30, 24, 2, 4096),
        **rope_keys(10000.0),
        **llama_keys(eps=("norm_epsilon", 1e-5), act="gelu_pytorch_tanh", tied=True),
        "use_bias": followed("biases of all matrices", True),
        "attention_bias": NO_BIAS,
        "mlp_bias": NO_BIAS,
        "sliding_window": followed("window of every layer; null: none", nullable=True),
        "layer_types": WINDOW_TYPES,
        "residual_dropout": TRAINING,
        "embedding_dropout": TRAINING,
        "norm_type": must_equal("layer_norm", note="the norms are layer norms", private=True),
        "mlp_type": must_equal("default", note="the MLP has no gate", private=True),
        "layer_norm_epsilon": no_effect("`norm_epsilon` decides", private=True),
        "activation_function": no_effect("`hidden_act` decides", private=True),
    },
    "stablelm": {
        **COMMON_KEYS,
        **sizes(50304, 2560, 6912, 32, 32, 32, 4096),
        **rope_keys(10000.0, fraction=0.25),
        **llama_keys(
            must_equal(note="it is hidden_size / num_attention_heads, as in transformers"),
            eps=("layer_norm_eps", 1e-5),
        ),
        **FULL,
        "attention_bias": NO_BIAS,
        "mlp_bias": NO_BIAS,
        "use_qkv_bias": followed("biases of q, k and v", False),
        "qk_layernorm": must_equal(False, note="no layer norm of queries and keys"),
        "use_parallel_residual": followed(f"{_PARALLEL}, through one norm", False),
        "rope_pct": no_effect("`partial_rotary_factor` decides", private=True),
    },
    "falcon": {
        **COMMON_KEYS,
        **rope_keys(10000.0),
        **FULL,
        "vocab_size": followed("rows of the embedding", 65024),
        "hidden_size": followed("width of the model", 4544),
        "num_hidden_layers": followed("layers", 32),
        "num_attention_heads": followed("query heads", 71),
        "num_kv_heads": followed(
            "key and value heads, unless multi_query; null: as many as query heads"
        ),
        "max_position_embeddings": followed(
            "context, and the trained length of rope scalings", 2048
        ),
        "ffn_hidden_size": followed("inner width of the MLP; null: 4 hidden_size"),
        "activation": followed("activation of the MLP", "gelu", nullable=True),
        "layer_norm_epsilon": followed("epsilon of the norms", 1e-5, nullable=True),
        "bias": followed("biases of all matrices", False, nullable=True),
        "alibi": must_equal(False, note="positions are rotary"),
        "new_decoder_architecture": followed(
            f"num_kv_heads decides, and {_PARALLEL}", False, nullable=True
        ),
        "multi_query": followed(
            "one key and value head, unless new_decoder_architecture", True, nullable=True
        ),
        "parallel_attn": followed(_PARALLEL, True, nullable=True),
        "num_ln_in_parallel_attn": followed(
            "2: attention and MLP have a norm each; absent: 2 with new_decoder_architecture"
        ),
        "head_dim": must_equal(note="it is hidden_size / num_attention_heads, as in transformers"),
        "n_embed": must_equal(note="older name of hidden_size; rename it"),
        "tie_word_embeddings": followed(
            "the head is the embedding, unless the file has another head", True
        ),
        "apply_residual_connection_post_layernorm": must_equal(
            False, note="the residual is added before the norm", private=True
        ),
    },
    "glm4_moe": {
        **COMMON_KEYS,
        **ROUTER,
        **sizes(151552, 4096, 10944, 46, 96, 8, 131072),
        **rope_keys(10000.0, fraction=0.5),
        **llama_keys(eps=("rms_norm_eps", 1e-5)),
        **FULL,
        "attention_bias": followed("biases of q, k and v", False),
        "mlp_bias": NO_BIAS,
        "use_qk_norm": followed("RMS norm of each query and key head", False),
        "n_routed_experts": followed("experts of a layer", 128),
        "num_local_experts": alias("n_routed_experts"),
        "num_experts_per_tok": followed("experts used per token", 8),
        "moe_intermediate_size": followed("inner width of an expert", 1408),
        "n_shared_experts": followed("inner width of the shared MLP, in experts", 1),
        "first_k_dense_replace": followed("first layers with a dense MLP", 1),
        "norm_topk_prob": followed("weights of the chosen experts sum to 1", True),
        "routed_scaling_factor": followed("multiplies the weights of the chosen experts", 1.0),
        "n_group": must_equal(1, note="no groups of experts"),
        "topk_group": must_equal(1, note="no groups of experts"),
        "num_mtp_layers": no_effect("layers that draft tokens are not read"),
        "num_nextn_predict_layers": no_effect("layers that draft tokens are not read"),
    },
    "gpt_oss": {
        **COMMON_KEYS,
        **ROUTER,
        **sizes(201088, 2880, 2880, 36, 64, 8, 131072),
        **rope_keys(150000.0),
        **llama_keys(followed("size of a head", 64), eps=("rms_norm_eps", 1e-5)),
        "rope_parameters": followed(
            "rotary positions; see the rope table. Absent: yarn, factor 32, trained length 4096, "
            "truncate false"
        ),
        "hidden_act": no_effect("the activation is a clamped SwiGLU, as in transformers"),
        "attention_bias": followed("biases of q, k, v and o", True),
        "mlp_bias": no_effect("router and experts always have biases, as in transformers"),
        "intermediate_size": followed("inner width of an expert", 2880),
        "sliding_window": followed("window of the sliding_attention layers", 128, nullable=True),
        "layer_types": followed(
            "window or none, layer by layer; absent: every other layer, from the first on"
        ),
        "num_local_experts": followed("experts of a layer", 128),
        "num_experts": alias("num_local_experts"),
        "num_experts_per_tok": followed("experts used per token", 4),
        "experts_per_token": no_effect("older name; `num_experts_per_tok` decides", private=True),
        "swiglu_limit": must_equal(7.0, 7, note="the activation clamps at 7"),
        "swiglu_alpha": must_equal(1.702, note="the sigmoid's factor is 1.702"),
        "initial_context_length": no_effect("the rope record decides", private=True),
    },
}
