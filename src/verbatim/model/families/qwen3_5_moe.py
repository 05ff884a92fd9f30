"""Qwen3.5 (mixtures): qwen3_5 with the mixtures of qwen3_next in every layer; the text part of
qwen3_5_moe."""

from __future__ import annotations

from verbatim.model.families.common import rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf
from verbatim.model.families.qwen3_5 import (
    GGUF_LAYER,
    KEYS,
    LAYER,
    RULES,
    delta_net,
    exported_sections,
    qwen_wrapper,
    tiled,
)
from verbatim.model.families.qwen3_next import GGUF_DELTA_MOE, MOE_KEYS, TINY_MOE, shared_mixture
from verbatim.model.keys import must_equal, no_effect
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    inner = c.with_values(intermediate_size=c.integer("moe_intermediate_size"))
    return shared_mixture(inner, delta_net(inner))


_GGUF = Gguf("qwen35moe", keys=GGUF_DELTA_MOE, names=tensors.gguf_names(GGUF_LAYER), implied=tiled)
FAMILY = Family(
    model_type="qwen3_5_moe_text",
    name="qwen35moe",
    models="Qwen3.5 (mixtures; the text part of `qwen3_5_moe`)",
    keys={
        **KEYS,
        **MOE_KEYS,
        "intermediate_size": no_effect("every layer is a mixture"),
        "num_experts": rows.EXPERTS,
        "norm_topk_prob": must_equal(True, note="weights of the chosen experts sum to 1"),
        "decoder_sparse_step": must_equal(1, note="every layer is a mixture"),
    },
    spec=_spec,
    rope=RULES,
    names=tensors.hf_names(LAYER),
    gguf=_GGUF,
    exported=exported_sections,
    drafts=tensors.QWEN_MTP,
    tiny={"qwen35moe": TINY_MOE},
)
WRAPPER = qwen_wrapper("qwen3_5_moe", "qwen3_5_moe_text")
