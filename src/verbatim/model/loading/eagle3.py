"""Load an EAGLE-3 head in the format of vllm-project/speculators, as a model of its own layers.

In: a directory (config.json, safetensors) and the model that it drafts for. Out: a Model, and the
layers of the target whose states it reads. The first layer reads the target's states of position p
and the embedding of the token at p + 1, and drafts the token at p + 2 (arXiv 2503.01840); its own
output, before the norm, is the state of p + 1 for the next draft. The tensors:

    fc.weight                [H, layers · target's H]   one state of the captured ones
    layers.0.hidden_norm     norm of the state; layers.0.input_layernorm: of the embedding
    layers.0.self_attn.q_proj, k_proj, v_proj           read both, side by side
    lm_head.weight           [draft_vocab_size, H]      d2t: token id of row i, less i
    embed_tokens.weight      the target's, where the file has none

A head that does not fit the model is refused by name. Its matrices become q4_0: a wrong draft costs
time, never an output, and 4 bits are read twice as fast as 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.files.safetensors import SafetensorsDir, read_directory
from verbatim.formats.packed.packed_checkpoint import RawTensor
from verbatim.formats.tensor import Tensor, Weights
from verbatim.model.architecture import read_config
from verbatim.model.config_fields import Fields
from verbatim.model.keys import Table, check_keys, followed, must_equal, no_effect
from verbatim.model.layout import HF_KEY_NAMES
from verbatim.model.loading.collect_weights import WeightCollector
from verbatim.model.loading.load import Model
from verbatim.model.loading.names import Source, hf_source
from verbatim.model.spec import EagleSpec, ModelSpec

KEYS: Table = {
    "speculators_model_type": must_equal("eagle3", note="the kind of head"),
    "speculators_config": followed("the architecture of the model that it was trained for"),
    "transformer_layer_config": followed("the head's layers"),
    "draft_vocab_size": followed("tokens that it drafts"),
    "norm_before_residual": followed("whether the residual starts as the norm of the state"),
    "norm_before_fc": followed("a norm of the target's states", False),
    "eagle_aux_hidden_state_layer_ids": followed("the target's layers whose inputs it reads"),
    "target_hidden_size": followed("the target's hidden size, where it is not the head's"),
    "tie_word_embeddings": must_equal(False, note="a head has an output matrix of its own"),
    **{
        name: no_effect("training and metadata")
        for name in (
            *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
            *("speculators_version", "has_no_defaults_at_init", "embed_requires_grad"),
            *("enable_sp_ulysses", "model_type", "_name_or_path"),
        )
    },
}
OWN = {
    "eagle.fc": "fc",
    "eagle.state_norm": "layers.0.hidden_norm",
    "eagle.input_norm": "input_norm",
}
QUANT = "q4_0"


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """An opened head: its spec and where its weights are."""

    spec: ModelSpec
    captured: tuple[int, ...]  # ascending
    source: SafetensorsDir
    tensors: Mapping[str, Tensor]

    def load(self, target: Model) -> Model:
        embed = target.weights["embed"]
        shared = "embed_tokens.weight" not in self.tensors
        tensors = dict(self.tensors) | ({"embed_tokens.weight": embed} if shared else {})
        file = str(self.source.path)
        collector = WeightCollector(self.spec, tensors, file, QUANT, HF_KEY_NAMES)
        given = {"embed": embed} if shared else {}
        found = collector.collect(self._find, lambda _: False, given)
        # The state of its next draft is the output of its own last layer.
        own = (len(self.spec.layers),)
        weights = Weights(found, file, self.source.digest)
        return Model(self.spec, weights, self.source, captured=own)

    def _find(self, name: str) -> Source:
        if name == "eagle.ids":
            return Source(("d2t",))
        if name in OWN:
            return Source((f"{OWN[name]}.weight",))
        return hf_source(self.spec.family, "", name, 0)


def open_head(path: str | Path, target: ModelSpec) -> Eagle3Head:
    """Read the head's config and tensor names, and check that it fits the model."""
    source = read_directory(path)
    file = str(Path(path) / "config.json")
    if "speculators_model_type" not in source.config:
        raise ModelError(
            "not a draft head in the format of speculators: no speculators_model_type", file=file
        )
    fields = Fields(check_keys(source.config, KEYS, what="eagle3", file=file).values, file)
    _check_verifier(fields, target)
    captured = _captured(fields, target)
    layer = dict(fields.mapping("transformer_layer_config"))
    if layer.get("model_type") not in ("llama", "qwen3"):
        kind = layer.get("model_type")
        raise ModelError(f"layers of model_type {kind!r}: llama or qwen3 is needed", file=file)
    spec, _ = read_config(layer | {"tie_word_embeddings": False}, file=file)
    if spec.vocab != target.vocab:
        raise ModelError(
            f"a head for a vocabulary of {spec.vocab} tokens; the model has {target.vocab}",
            file=file,
        )
    tensors = dict(source.tensors)
    others = {name: t for name, t in source.others.items() if name not in ("d2t", "t2d")}
    if others:
        raise ModelError(f"tensor {min(others)} is not known for an eagle3 head", file=file)
    shared = "embed_tokens.weight" not in tensors
    states = len(captured) * fields.integer("target_hidden_size", spec.hidden)
    if states != len(captured) * target.hidden or (shared and spec.hidden != target.hidden):
        raise ModelError(
            f"a head for states of {states // len(captured)} values; the model's have "
            f"{target.hidden}",
            file=file,
        )
    fields.raw("norm_before_residual")  # readers differ in the default
    norm = fields.boolean("norm_before_residual", False)
    vocab = fields.integer("draft_vocab_size", high=target.vocab)
    eagle = EagleSpec(states, vocab, norm, fields.boolean("norm_before_fc", False))
    if vocab != target.vocab:
        ids = _token_ids(source.others, vocab, target.vocab, file)
        tensors["d2t"] = Tensor("d2t", "f32", (vocab,), ids.astype("<f4").view(np.uint8))
    spec = replace(spec, eagle=eagle, context=target.context)
    return Eagle3Head(spec, captured, source, tensors)


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


def _captured(fields: Fields, target: ModelSpec) -> tuple[int, ...]:
    """Layers whose inputs the head reads. Without a list they are vLLM's."""
    key, count = "eagle_aux_hidden_state_layer_ids", len(target.layers)
    given = fields.raw(key, [2, count // 2, count - 3])
    found = given if isinstance(given, list) else []
    whole = all(type(one) is int and 0 <= one <= count for one in found)
    if len(found) < 2 or not whole or sorted(set(found)) != found:
        raise ModelError(
            f"{key} is {given!r:.80}: two or more layers from 0 to {count} in ascending order are "
            "needed",
            file=fields.file,
        )
    return tuple(found)


def _token_ids(others: Mapping[str, RawTensor], count: int, vocab: int, file: str) -> np.ndarray:
    """The token id of each row of the output matrix."""
    d2t, t2d = others.get("d2t"), others.get("t2d")
    if d2t is None or d2t.dtype not in ("I64", "I32") or d2t.shape != (count,):
        raise ModelError(f"d2t is not a list of {count} whole numbers", file=file)
    ids: np.ndarray = d2t.data.view("<i8" if d2t.dtype == "I64" else "<i4") + np.arange(count)
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != count:
        raise ModelError(f"d2t does not name {count} of the model's {vocab} tokens", file=file)
    drafted = None if t2d is None else np.flatnonzero(t2d.data)
    if drafted is not None and not np.array_equal(drafted, np.sort(ids)):
        raise ModelError("t2d and d2t name different tokens", file=file)
    return ids
