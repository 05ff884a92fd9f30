"""Command R and Aya: layer norms without biases; attention and MLP in parallel, with one norm."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.keys import Table, followed, must_equal, no_effect, renamed
from verbatim.model.spec import ModelSpec

NAMES = tensors.hf_names({}, interleaved=True)
KEYS: Table = {
    **rows.ATTENTION_BIASES,
    "logit_scale": followed("multiplies the logits"),
    "position_embedding_type": must_equal(
        "rope_gptj", note="rotary positions of interleaved pairs"
    ),
    "rotary_pct": must_equal(1.0, 1, note="whole heads are rotated"),
    "use_qk_norm": must_equal(False, note="no layer norm of queries and keys"),
    "use_parallel_block": must_equal(True, note=rows.PARALLEL),
    "use_gated_activation": must_equal(True, note="the MLP has a gate"),
    "use_parallel_embedding": no_effect("training only"),
    "use_embedding_sharing": no_effect("`tie_word_embeddings` decides"),
}
GGUF_KEYS: Table = {
    **gguf_rows.gguf_layer_norm("layer_norm_eps"),
    "logit_scale": renamed("logit_scale"),
}


def parallel(c: Config, spec: ModelSpec) -> ModelSpec:
    return replace(
        spec, norm_bias=False, parallel=True, shared_norm=True, logit_scale=c.number("logit_scale")
    )


FAMILY = Family(
    model_type="cohere",
    name="command-r",
    models="Command R, Aya",
    keys=rows.rotary_keys(KEYS, rows.FULL, eps="layer_norm_eps"),
    spec=lambda c: parallel(c, parts.layer_norm(c)),
    names=NAMES,
    gguf=Gguf("command-r", keys=GGUF_KEYS, names=tensors.GGUF_PAIRS),
    exported=lambda spec: {"logit_scale": float(spec.logit_scale)},
    tiny={"cohere": tiny(rms_norm_eps=None, logit_scale=1.5)},
)
