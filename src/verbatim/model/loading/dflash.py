"""Load a DFlash head (arXiv 2602.06036) in the layout of z-lab's checkpoints.

In: a directory (config.json, safetensors) and the spec of the model that it drafts for. Out: a
DraftHead of qwen3 layers without embedding and output matrix, which are the target's. The tensors
beside those of the layers (model/spec.py, DFlashSpec):

    fc.weight            [H, layers · H]   one state of the captured ones
    hidden_norm.weight   [H]               its norm
    norm.weight          [H]               the final norm

`target_layer_ids` are layers whose outputs it reads. Its matrices become q4_0.
"""

from __future__ import annotations

from dataclasses import replace

from verbatim.base.errors import ModelError
from verbatim.files.safetensors import SafetensorsDir
from verbatim.model.architecture import read_config
from verbatim.model.config_fields import Fields
from verbatim.model.keys import Table, check_keys, followed, must_equal
from verbatim.model.loading.draft_head import DraftHead, check_fit, read_layers, refuse_others
from verbatim.model.spec import DFlashSpec, ModelSpec

KEYS: Table = {
    "mask_token_id": followed("token id of a mask"),
    "target_layer_ids": followed("the target's layers whose outputs it reads"),
    "block_size": followed("positions of a block, the last token included"),
    "num_target_layers": followed("layers of the model that it was trained for"),
    "causal": must_equal(False, note="masks see each other"),
    "is_causal": must_equal(False, note="masks see each other"),
}
OUTER = ("block_size", "num_target_layers", "is_causal")  # older files have them in config.json
NAMES = {"dflash.fc": "fc.weight", "dflash.state_norm": "hidden_norm.weight"}


def open_dflash(source: SafetensorsDir, target: ModelSpec) -> DraftHead:
    """Read the config and tensor names, and check that the head fits the model."""
    file, config = str(source.path / "config.json"), dict(source.config)
    values = {name: config.pop(name) for name in OUTER if name in config}
    values |= Fields(config, file).mapping("dflash_config")
    fields = Fields(check_keys(values, KEYS, what="dflash", file=file).values, file)
    del config["dflash_config"]
    config.pop("auto_map", None)
    kind = (config.get("architectures"), config.get("model_type"))
    if kind != (["DFlashDraftModel"], "qwen3"):
        raise ModelError(
            f"architectures and model_type are {kind!r:.80}: DFlashDraftModel and qwen3 are needed",
            file=file,
        )
    count = fields.integer("num_target_layers", len(target.layers))
    if count != len(target.layers):
        raise ModelError(
            f"a head for a model of {count} layers; the model has {len(target.layers)}", file=file
        )
    base, _ = read_config(config, file=file)
    check_fit(base.vocab, base.hidden, target, file)
    refuse_others(source.others, (), file)
    read = read_layers(fields, "target_layer_ids", None, count - 2)
    mask = fields.integer("mask_token_id", low=0, high=target.vocab - 1)
    block = fields.integer("block_size", low=2)
    spec = replace(
        base,
        dflash=DFlashSpec(len(read) * target.hidden, mask, block),
        context=target.context,
        tied=target.tied,
        embed_scale=target.embed_scale,
        logit_scale=target.logit_scale,
        logit_softcap=target.logit_softcap,
    )
    captured = tuple(layer + 1 for layer in read)  # the output is the next layer's input
    shared = ("embed",) if target.tied else ("embed", "head")
    return DraftHead(spec, source, source.tensors, NAMES, captured, shared, chained=False)
