"""The dense models of Granite 4, whose configs are those of hybrids without Mamba layers."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import rows, tensors
from verbatim.model.families.common.family import Config, Family, tiny
from verbatim.model.families.granite import SCALES, exported_scales, granite
from verbatim.model.keys import Table, alias, followed, must_equal, no_effect
from verbatim.model.spec import LayerSpec, ModelSpec

_MAMBA = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
    *("mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
)


def _spec(c: Config) -> ModelSpec:
    mamba = sum(t in ("mamba", "linear_attention") for t in c.items("layer_types"))
    if mamba:
        raise c.fail("layer_types", f"{mamba} Mamba layers, which are not supported")
    if c.integer("num_local_experts", low=0):
        raise c.fail("num_local_experts", "only 0 is supported")
    if not c.has("layer_types"):
        raise c.fail(
            "layer_types", "without it all layers are Mamba layers, which are not supported"
        )
    kind = c.string("position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise c.fail("position_embedding_type", "rope or nope is needed")
    spec = granite(c.with_values(intermediate_size=c.integer("shared_intermediate_size")))
    return spec if kind == "rope" else replace(spec, layers=(LayerSpec(),) * len(spec.layers))


_KEYS: Table = {
    "intermediate_size": no_effect("inner width of an expert; `shared_intermediate_size` decides"),
    "shared_intermediate_size": followed("inner width of the MLP"),
    "num_local_experts": followed("checked: 0, because only dense models are supported"),
    "num_experts_per_tok": no_effect("there are no experts"),
    "layer_types": followed("checked: every layer is attention; Mamba layers are not supported"),
    "layers_block_type": alias("layer_types"),
    "position_embedding_type": followed("rope: rotary positions; nope or absent: none"),
    "sliding_window": rows.NO_WINDOW,
    **{key: followed(f"{note}; null: 1") for key, note in SCALES.items()},
    **dict.fromkeys(_MAMBA, no_effect("of Mamba layers, which are not supported")),
    "init_method": rows.TRAINING,
    "normalization_function": must_equal("rmsnorm", note="RMS norms"),
}
_LAYER = {
    "mlp.gate": "shared_mlp.input_linear",
    "mlp.up": "shared_mlp.input_linear",
    "mlp.down": "shared_mlp.output_linear",
}
_TINY = tiny(
    shared_intermediate_size=48,
    num_local_experts=0,
    mamba_n_heads=4,
    layer_types=["attention"] * 3,
    position_embedding_type="rope",
    residual_multiplier=0.7,
    attention_multiplier=0.4,
)
FAMILY = Family(
    model_type="granitemoehybrid",
    name="granitehybrid",
    models="Granite 4 (dense)",
    keys=rows.rotary_keys(rows.ROUTER, rows.ATTENTION_BIASES, _KEYS),
    spec=_spec,
    names=tensors.hf_names(_LAYER),
    architecture="granite",
    exported=exported_scales,
    tiny={"granitehybrid": _TINY},
)
