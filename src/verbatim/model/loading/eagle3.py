"""Load an EAGLE-3 head in the format of vllm-project/speculators, as a model of its own layers.

In: a directory (config.json, safetensors) and the spec of the model that it drafts for. Out: a
DraftHead. The first layer reads the target's states of position p and the embedding of the token at
p + 1, and drafts the token at p + 2 (arXiv 2503.01840); its own output, before the norm, is the
state of p + 1 for the next draft. The tensors:

    fc.weight                [H, layers · target's H]   one state of the captured ones
    layers.0.hidden_norm     norm of the state; layers.0.input_layernorm: of the embedding
    layers.0.self_attn.q_proj, k_proj, v_proj           read both, side by side
    lm_head.weight           [draft_vocab_size, H]      d2t: token id of row i, less i
    embed_tokens.weight      the target's, where the file has none

A head that does not fit the model is refused by name. Its matrices become q4_0: 4 bits are read
twice as fast as 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
    read_layers,
    refuse_others,
    whole_numbers,
)
from verbatim.model.spec import EagleSpec, ModelSpec

TRAINING = "speculators_version has_no_defaults_at_init embed_requires_grad enable_sp_ulysses"
KEYS: Table = {
    **rows.COMMON_KEYS,
    **dict.fromkeys((*TRAINING.split(), "model_type"), no_effect("training and metadata")),
    "speculators_model_type": must_equal("eagle3", note="the kind of head"),
    "speculators_config": followed("the architecture of the model that it was trained for"),
    "transformer_layer_config": followed("the head's layers"),
    "draft_vocab_size": followed("tokens that it drafts"),
    "norm_before_residual": followed("whether the residual starts as the norm of the state"),
    "norm_before_fc": followed("a norm of the target's states", False),
    "eagle_aux_hidden_state_layer_ids": followed("the target's layers whose inputs it reads"),
    "target_hidden_size": followed("the target's hidden size, where it is not the head's"),
    "tie_word_embeddings": must_equal(False, note="a head has an output matrix of its own"),
}
NAMES = {
    "eagle.fc": "fc.weight",
    "eagle.state_norm": "layers.0.hidden_norm.weight",
    "eagle.input_norm": "input_norm.weight",
    "eagle.ids": "d2t",
}


def open_eagle3(source: SafetensorsDir, target: ModelSpec) -> DraftHead:
    """Read the head's config and tensor names, and check that it fits the model."""
    file = str(source.path / "config.json")
    fields = Fields(check_keys(source.config, KEYS, what="eagle3", file=file).values, file)
    _check_verifier(fields, target)
    count = len(target.layers)  # without a list the layers are vLLM's
    usual = [2, count // 2, count - 3]
    captured = read_layers(fields, "eagle_aux_hidden_state_layer_ids", usual, count)
    layer = dict(fields.mapping("transformer_layer_config"))
    if layer.get("model_type") not in ("llama", "qwen3"):
        kind = layer.get("model_type")
        raise ModelError(f"layers of model_type {kind!r}: llama or qwen3 is needed", file=file)
    spec, _ = read_config(layer | {"tie_word_embeddings": False}, file=file)
    width = fields.integer("target_hidden_size", spec.hidden)
    tensors = dict(source.tensors)
    refuse_others(source.others, ("d2t", "t2d"), file)
    shared = ("embed",) if "embed_tokens.weight" not in tensors else ()
    check_fit(spec.vocab, spec.hidden if shared and width == target.hidden else width, target, file)
    fields.raw("norm_before_residual")  # readers differ in the default
    norm = fields.boolean("norm_before_residual", False)
    vocab = fields.integer("draft_vocab_size", high=target.vocab)
    before = fields.boolean("norm_before_fc", False)
    eagle = EagleSpec(len(captured) * width, vocab, norm, before)
    if vocab != target.vocab:
        tensors["d2t"] = id_tensor("d2t", _token_ids(source.others, vocab, target.vocab, file))
    spec = replace(spec, eagle=eagle, context=target.context)
    return DraftHead(spec, source, tensors, NAMES, captured, shared)


def _check_verifier(fields: Fields, target: ModelSpec) -> None:
    """Whether the head was trained for a model of this family."""
    if not fields.has("speculators_config"):
        return
    config: Any = fields.mapping("speculators_config")
    verifier = config.get("verifier")
    names = verifier.get("architectures") if isinstance(verifier, Mapping) else None
    named = [n.removesuffix("ForCausalLM") for n in names or () if n.endswith("ForCausalLM")]
    family = target.family.replace("_", "")
    if named and family not in [name.lower() for name in named]:
        raise ModelError(
            f"a head for {named[0]}ForCausalLM; the model is {target.family}", file=fields.file
        )


def _token_ids(others: Mapping[str, RawTensor], count: int, vocab: int, file: str) -> np.ndarray:
    """The token id of each row of the output matrix."""
    ids: np.ndarray = whole_numbers(others, "d2t", count, file) + np.arange(count)
    t2d = others.get("t2d")
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != count:
        raise ModelError(f"d2t does not name {count} of the model's {vocab} tokens", file=file)
    drafted = None if t2d is None else np.flatnonzero(t2d.data)
    if drafted is not None and not np.array_equal(drafted, np.sort(ids)):
        raise ModelError("t2d and d2t name different tokens", file=file)
    return ids
