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
from verbatim.model.loading.names import Source, hf_source
from verbatim.model.spec import DFlashSpec, ModelSpec

KEY = "dflash_config"
KEYS: Table = {
    "mask_token_id": followed("token id of a mask"),
    "target_layer_ids": followed("the target's layers whose outputs it reads"),
    "block_size": followed("positions of a block, the last token included"),
    "num_target_layers": followed("layers of the model that it was trained for"),
    "causal": must_equal(False, note="masks see each other"),
}
# Keys of config.json that are no keys of a qwen3 model.
OWN = (KEY, "block_size", "num_target_layers", "is_causal", "auto_map")
NAMES = {"dflash.fc": "fc.weight", "dflash.state_norm": "hidden_norm.weight"}


def open_dflash(source: SafetensorsDir, target: ModelSpec) -> DraftHead:
    """Read the config and tensor names, and check that the head fits the model."""
    file = str(source.path / "config.json")
    config = {name: value for name, value in source.config.items() if name not in OWN}
    fields = _own_fields(source, file)
    if config.get("architectures", ["DFlashDraftModel"]) != ["DFlashDraftModel"]:
        kind = config["architectures"]
        raise ModelError(f"architectures is {kind!r:.80}: DFlashDraftModel is needed", file=file)
    if config.get("model_type") != "qwen3":
        kind = config.get("model_type")
        raise ModelError(f"layers of model_type {kind!r}: qwen3 is needed", file=file)
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
    return DraftHead(spec, source, source.tensors, _find, captured, shared, chained=False)


def _own_fields(source: SafetensorsDir, file: str) -> Fields:
    """The keys of `dflash_config`. Older files have some of them outside."""
    outer = {"block_size", "num_target_layers"} & source.config.keys()
    causal = {"causal": source.config["is_causal"]} if "is_causal" in source.config else {}
    own = {name: source.config[name] for name in outer} | causal
    values = own | dict(Fields(source.config, file).mapping(KEY))
    return Fields(check_keys(values, KEYS, what="dflash", file=file).values, file)


def _find(name: str) -> Source:
    return Source((NAMES[name],)) if name in NAMES else hf_source("qwen3", "", name, 0)
