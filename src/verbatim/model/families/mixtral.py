"""Mixtral: mistral whose layers are mixtures of experts."""

from __future__ import annotations

from verbatim.model.families.common import parts, rows, tensors
from verbatim.model.families.common.family import Family, tiny
from verbatim.model.keys import Table, alias

_KEYS: Table = {
    "num_local_experts": rows.EXPERTS,
    "num_experts": alias("num_local_experts"),
    "num_experts_per_tok": rows.EXPERTS_USED,
}
_LAYER = {
    "moe.router": "block_sparse_moe.gate",
    "moe.gate": "block_sparse_moe.experts.{e}.w1",
    "moe.up": "block_sparse_moe.experts.{e}.w3",
    "moe.down": "block_sparse_moe.experts.{e}.w2",
}
FAMILY = Family(
    model_type="mixtral",
    models="Mixtral",
    keys=rows.rotary_keys(rows.NO_BIASES, rows.ONE_WINDOW, rows.ROUTER, _KEYS),
    spec=lambda c: parts.with_experts(
        c, parts.rotary(c), "num_local_experts", inner="intermediate_size"
    ),
    names=tensors.hf_names(_LAYER),
    architecture="llama",
    tiny={"mixtral": tiny(num_experts_per_tok=2, num_local_experts=4)},
)
