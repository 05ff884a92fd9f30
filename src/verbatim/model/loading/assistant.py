"""Load a Gemma 4 assistant (`gemma4_assistant`), the draft head published beside each Gemma 4.

In: a directory (config.json, safetensors) and the spec of the model that it drafts for. Out: a
DraftHead. Its layers have queries only and read the target's KV cache: each the last layer of its
type that has keys and values (model/spec.py, AssistantSpec). The tensors:

    pre_projection.weight          [H, 2 · target's H]   of [embedding; state], both of the target
    post_projection.weight         [target's H, H]       the state of the next draft
    model.layers.{i}, model.norm                         gemma4, without keys and values
    model.embed_tokens.weight      [V, H]                the output matrix
    masked_embedding.centroids     [n, H]                with use_ordered_embeddings: clusters of
    masked_embedding.token_ordering [V]                  tokens, one after the other

Its matrices become q8_0: they are small, and with clusters few rows of the largest are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.files.safetensors import SafetensorsDir
from verbatim.formats.packed.packed_checkpoint import RawTensor
from verbatim.model.architecture import read_config
from verbatim.model.config_fields import Fields
from verbatim.model.families.common import rows
from verbatim.model.keys import Table, check_keys, followed, must_equal, no_effect
from verbatim.model.loading.draft_head import (
    DraftHead,
    check_fit,
    id_tensor,
    refuse_others,
    whole_numbers,
)
from verbatim.model.spec import AssistantSpec, LayerSpec, ModelSpec

TOKENS = "audio_token_id boa_token_id boi_token_id eoa_token_id eoi_token_id image_token_id"
KEYS: Table = {
    **rows.COMMON_KEYS,
    **dict.fromkeys(TOKENS.split(), no_effect("images and audio are not read")),
    "model_type": must_equal("gemma4_assistant", note="the kind of head"),
    "text_config": followed("its layers"),
    "backbone_hidden_size": followed("the target's hidden size", 1536),
    "use_ordered_embeddings": followed("whether the head has clusters", False),
    "num_centroids": followed("clusters of the head", 2048),
    "centroid_intermediate_top_k": followed("clusters that a draft may come from", 32),
    "tie_word_embeddings": must_equal(True, note="the output matrix is model.embed_tokens"),
}
ORDER = "masked_embedding.token_ordering"
NAMES = {
    "embed": "target.embed_tokens",
    "head": "model.embed_tokens.weight",
    "mtp.project": "pre_projection.weight",
    "assistant.out": "post_projection.weight",
    "assistant.centroids": "masked_embedding.centroids.weight",
    "assistant.ids": ORDER,
}


def open_assistant(source: SafetensorsDir, target: ModelSpec) -> DraftHead:
    """Read the config and tensor names, and check that the assistant fits the model."""
    file = str(source.path / "config.json")
    fields = Fields(
        check_keys(source.config, KEYS, what="gemma4_assistant", file=file).values, file
    )
    if target.family != "gemma4":
        raise ModelError(f"an assistant for gemma4; the model is {target.family}", file=file)
    config = dict(fields.mapping("text_config"))
    own = {"num_kv_shared_layers": 0, "tie_word_embeddings": False}
    base, _ = read_config({"model_type": "gemma4_text", **config, **own}, file=file)
    check_fit(base.vocab, fields.integer("backbone_hidden_size"), target, file)
    if base.family != "gemma4" or base.layer_input or base.experts_beside:
        raise ModelError(
            "text_config: gemma4 without layer inputs and experts is needed", file=file
        )
    refuse_others(source.others, (ORDER,), file)
    tensors, order, spec = dict(source.tensors), None, AssistantSpec(target)
    if fields.boolean("use_ordered_embeddings", False):
        spec, order = _clusters(fields, source.others, target, spec)
        tensors[ORDER] = id_tensor(ORDER, order)
    base = replace(
        base,
        layers=tuple(_shared(base, i, target, file) for i in range(len(base.layers))),
        context=target.context,
        embed_scale=target.embed_scale,
        logit_softcap=0.0,  # transformers' assistant has none
        assistant=spec,
    )
    return DraftHead(
        base, source, tensors, NAMES, (), ("embed",), quant="q8_0", prefix="model.", order=order
    )


def _shared(spec: ModelSpec, i: int, target: ModelSpec, file: str) -> LayerSpec:
    """Layer i, with the target's layer whose keys and values it reads."""
    layer = spec.layers[i]
    same = [
        j
        for j, other in enumerate(target.layers)
        if other.kv_layer is None and (other.window is None) == (layer.window is None)
    ]
    mine = (layer.window, *spec.kv_shape(i), layer.rope)
    theirs = [(target.layers[j].window, *target.kv_shape(j), target.layers[j].rope) for j in same]
    if not same or mine != theirs[-1]:
        what = "sliding_attention" if layer.window is not None else "full_attention"
        raise ModelError(
            f"layer {i} is {what} with another window, key heads or rope than the model's layers "
            "of this type; it is an assistant for another model",
            file=file,
        )
    return replace(layer, kv_layer=same[-1], value_is_key=False)


def _clusters(
    fields: Fields, others: Mapping[str, RawTensor], target: ModelSpec, spec: AssistantSpec
) -> tuple[AssistantSpec, np.ndarray]:
    count = fields.integer("num_centroids", 2048, high=target.vocab)
    used = fields.integer("centroid_intermediate_top_k", 32, high=count)
    if target.vocab % count:
        raise fields.fail("num_centroids", f"a divisor of {target.vocab} tokens is needed")
    order = whole_numbers(others, ORDER, target.vocab, fields.file)
    if not np.array_equal(np.sort(order), np.arange(target.vocab)):
        raise ModelError(f"{ORDER} does not name every token once", file=fields.file)
    return replace(spec, centroids=count, used=used), order
