"""Phi 3, 3.5, 4 and 4 mini: llama with fused matrices; heads may be rotated in part."""

from __future__ import annotations

from verbatim.model.families.common import parts, rows, tensors
from verbatim.model.families.common.family import Family, Gguf, RopeRules
from verbatim.model.keys import must_equal

_UNUSED = must_equal(1, note="not used by transformers")
FAMILY = Family(
    model_type="phi3",
    models="Phi 3, 3.5, 4, 4 mini",
    keys=rows.rotary_keys(
        rows.NO_BIASES,
        rows.ONE_WINDOW,
        rows.PARTIAL,
        {"full_attn_mod": _UNUSED, "interpolate_factor": _UNUSED},
    ),
    spec=parts.rotary,
    rope=RopeRules(partial=True, only_longrope=True),
    names=tensors.hf_names(tensors.fused_qkv("self_attn.qkv_proj") | tensors.FUSED_MLP),
    gguf=Gguf("phi3", names=tensors.gguf_names({**tensors.GGUF_FUSED_QKV, "mlp.gate": "ffn_up"})),
)
