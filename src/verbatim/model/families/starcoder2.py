"""StarCoder 2: layer norms, an MLP without a gate, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.keys import Table, followed, must_equal, no_effect
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    bias = c.boolean("use_bias", True)
    base = parts.layer_norm(c.with_values(attention_bias=bias, mlp_bias=bias), "norm_epsilon")
    return replace(base, gated=False)


_KEYS: Table = {
    "use_bias": followed("biases of all matrices"),
    "residual_dropout": rows.TRAINING,
    "embedding_dropout": rows.TRAINING,
    "norm_type": must_equal("layer_norm", note="the norms are layer norms"),
    "mlp_type": must_equal("default", note="the MLP has no gate"),
    "layer_norm_epsilon": no_effect("`norm_epsilon` decides"),
    "activation_function": no_effect("`hidden_act` decides"),
}
FAMILY = Family(
    model_type="starcoder2",
    models="StarCoder 2",
    keys=rows.rotary_keys(rows.NO_BIASES, rows.ONE_WINDOW, _KEYS, eps="norm_epsilon"),
    spec=_spec,
    names=tensors.hf_names({"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}),
    gguf=Gguf("starcoder2", keys=gguf_rows.gguf_layer_norm("norm_epsilon")),
    tiny={"starcoder2": tiny(rms_norm_eps=None)},
)
