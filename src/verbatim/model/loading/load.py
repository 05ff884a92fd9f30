"""Load a model: a .gguf file or a safetensors directory in, a Model out.

A Model is the architecture as data (ModelSpec) and every weight under its internal name. Weights
are views of the memory-mapped file. Only weights that must be rearranged are copied: llama's
interleaved query and key rows in GGUF, gpt2's transposed matrices, stacked experts. With `quant`,
float matrices are quantised a few rows at a time, so that peak memory is the quantised model plus
a few MiB (plus one stack for stacked experts).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verbatim.base.errors import ModelError, ParameterError
from verbatim.files.gguf import GGUFFile, read_gguf
from verbatim.files.safetensors import SafetensorsDir, read_directory, read_json, read_safetensors
from verbatim.formats.packed.packed_checkpoint import RawTensor
from verbatim.formats.tensor import Tensor, Weights
from verbatim.model.adapter import Adapter
from verbatim.model.architecture import Header, read_config, read_header
from verbatim.model.embedding import EmbeddingSpec, read_embedding
from verbatim.model.families import WRAPPERS, named
from verbatim.model.families.common.tensors import GGUF_NEXTN, DraftNames
from verbatim.model.layout import GGUF_KEY_NAMES, HF_KEY_NAMES
from verbatim.model.loading.collect_weights import PACKED, WeightCollector
from verbatim.model.loading.draft_layer import DraftFinder, differ
from verbatim.model.loading.names import (
    FUSED_EXPERTS,
    FUSED_EXPERTS_GGUF,
    Source,
    find_prefix,
    gguf_source,
    hf_source,
    ignorable,
)
from verbatim.model.spec import ModelSpec

QUANTS = ("q8_0", "q4_0", PACKED)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model: input of the backends, and of the tokenizer and chat template."""

    spec: ModelSpec
    weights: Weights
    source: GGUFFile | SafetensorsDir
    eos_ids: tuple[int, ...] = ()
    generation_config: dict[str, Any] = field(default_factory=dict)
    # Keys that are ignored or that differ from transformers; shown to the user at load.
    warnings: tuple[str, ...] = ()
    embedding: EmbeddingSpec = field(default_factory=EmbeddingSpec)
    adapters: tuple[Adapter, ...] = ()  # a request may name one of them
    draft: Model | None = None  # the file's draft layer, whose spec has `draft_layer`
    # layers whose inputs a step returns with the final states; their number: the last one's output
    captured: tuple[int, ...] = ()

    @property
    def path(self) -> Path:
        return Path(self.source.path)


def load_model(
    path: str | Path,
    *,
    context: int | None = None,
    quant: str | None = None,
    gpu: bool = False,
    part: Part | None = None,
) -> Model:
    """Load the model at `path`.

    `context`: positions that the engine serves (None: the model's own). `quant`: q8_0 or q4_0
    quantises float weights; packed keeps the integers of quantised safetensors in blocks. `gpu`:
    without `quant`, keep quantised safetensors in blocks for the cuda backend (open_backend unpacks
    them for the others). The bits of the weights are the same.
    `part`: keep the part of one rank of a group, weight by weight; the spec is that of the whole
    model."""
    path = Path(path)
    _check_arguments(path, quant)
    if path.is_dir():
        model, names = _from_directory(path, context, quant, gpu=gpu, part=part)
        return model if part is not None else _with_draft(model, names)
    model, names = _from_gguf(path, context, quant, part)
    return model if part is not None else _with_draft(model, names, GGUF_NEXTN)


def check_model(
    path: str | Path, *, context: int | None = None, quant: str | None = None
) -> ModelSpec:
    """The spec of the model at `path`. Raises what load_model() raises, as far as it can be told
    from config and tensor names; of a quantised directory only the config is checked."""
    path = Path(path)
    _check_arguments(path, quant)
    if not path.is_dir():
        header, names = _gguf_names(read_gguf(path), context, quant)
        names.check()
        return header.spec
    config = read_json(path / "config.json") if (path / "config.json").exists() else {}
    if config.pop("quantization_config", None):  # read_directory would unpack the weights
        for shard in sorted(path.glob("*.safetensors")):
            read_safetensors(shard)
        return read_config(config, context=context, file=str(path / "config.json"))[0]
    source = read_directory(path, blocks=quant == PACKED)
    spec, _ = read_config(source.config, context=context, file=str(path / "config.json"))
    _directory_names(source, spec, quant).check()
    return spec


def _check_arguments(path: Path, quant: str | None) -> None:
    if quant is not None and quant not in QUANTS:
        raise ParameterError("quant", f"{quant!r} is not one of {', '.join(QUANTS)}")
    if path.is_dir():
        return
    if not path.exists():
        raise ModelError("no such file or directory", file=str(path))
    if path.suffix == ".safetensors":
        raise ModelError(
            "give the directory that holds this file and its config.json", file=str(path)
        )
    if quant == PACKED:
        raise ParameterError(
            "quant", "'packed' is for quantised safetensors; a GGUF file keeps its blocks anyway"
        )


# Of a spec: how a rank of a group cuts a weight.
Part = Callable[[ModelSpec], Callable[[str, Tensor], Tensor]]


class _Names(NamedTuple):
    """Where a file holds each weight of the spec."""

    collector: WeightCollector
    find: Callable[[str], Source]
    is_ignorable: Callable[[str], bool]

    def check(self) -> None:
        self.collector.check_names(self.find, self.is_ignorable)

    def collect(self, part: Part | None) -> dict[str, Tensor]:
        if part is not None:
            self.collector.cut = part(self.collector.spec)
        return self.collector.collect(self.find, self.is_ignorable)


def _gguf_names(source: GGUFFile, context: int | None, quant: str | None) -> tuple[Header, _Names]:
    file = str(source.path)  # the first part of a split model
    header = read_header(source.metadata, source.tensors, context=context, file=file)
    spec = header.spec
    architecture = source.metadata["general.architecture"]
    two_norms = spec.parallel and not spec.shared_norm
    fused = any(f".{FUSED_EXPERTS_GGUF}." in name for name in source.tensors)
    return header, _Names(
        WeightCollector(spec, source.tensors, file, quant, GGUF_KEY_NAMES),
        lambda name: gguf_source(architecture, name, two_norms=two_norms, fused_experts=fused),
        ignorable(
            "gguf",
            tied=spec.tied,
            nested=False,
            draft_layers_from=_draft_layers(spec),
            shared_kv=_shared_kv(spec),
        ),
    )


def _from_gguf(
    path: Path, context: int | None, quant: str | None, part: Part | None
) -> tuple[Model, _Names]:
    source = read_gguf(path)
    header, names = _gguf_names(source, context, quant)
    spec = header.spec
    tensors = names.collect(part)
    weights = Weights(tensors, names.collector.file, _digest(source.digest, spec, quant))
    eos = _gguf_eos(source.metadata)
    warnings = (*header.warnings, *_eos_warnings(eos, spec))
    embedding = EmbeddingSpec(header.pooling)
    return Model(spec, weights, source, eos, {}, warnings, embedding), names


def _directory_names(source: SafetensorsDir, spec: ModelSpec, quant: str | None) -> _Names:
    file = str(source.path)
    prefix = find_prefix(source.tensors, spec.family)
    if prefix is None:
        raise ModelError("no embedding weight was found under any known name", file=file)
    find = _finder(spec, source.tensors, prefix)
    family = named(spec.family)
    key_names = {**HF_KEY_NAMES, **(family.key_names if family else {})}
    is_ignorable = ignorable(
        "hf",
        tied=spec.tied,
        nested=source.config.get("model_type") in WRAPPERS,
        draft_layers_from=_draft_layers(spec),
        shared_kv=_shared_kv(spec),
    )
    collector = WeightCollector(spec, source.tensors, file, quant, key_names, _types(source.others))
    return _Names(collector, find, is_ignorable)


def _finder(spec: ModelSpec, tensors: Mapping[str, Tensor], prefix: str) -> Callable[[str], Source]:
    experts = max(layer.experts for layer in spec.layers)
    two_norms = spec.parallel and not spec.shared_norm
    end = f".experts.{FUSED_EXPERTS}"
    fused = any(name.startswith(prefix) and name.endswith(end) for name in tensors)

    def find(name: str) -> Source:
        return hf_source(
            spec.family, prefix, name, experts, two_norms=two_norms, fused_experts=fused
        )

    return find


def _from_directory(
    path: Path, context: int | None, quant: str | None, *, gpu: bool, part: Part | None
) -> tuple[Model, _Names]:
    source = read_directory(path, blocks=quant == PACKED, gpu=gpu and quant is None)
    spec, warnings = read_config(source.config, context=context, file=str(path / "config.json"))
    warnings = (*warnings, *source.warnings)
    names = _directory_names(source, spec, quant)
    embed, head = (names.find(name).names[0] for name in ("embed", "head"))
    if spec.tied and has_own_head(source.tensors, embed, head):
        spec = replace(spec, tied=False)
        names = _directory_names(source, spec, quant)
        warnings = (
            *warnings,
            f"tie_word_embeddings is true, but the file has {head} with "
            "other values than the embedding; the file's head is used, as in transformers",
        )
    weights = Weights(names.collect(part), str(path), _digest(source.digest, spec, quant))
    generation = dict(source.generation_config or {})
    eos = _config_eos(source.config, generation)
    warnings = (*warnings, *_eos_warnings(eos, spec))
    embedding = read_embedding(path)
    return Model(spec, weights, source, eos, generation, warnings, embedding), names


def _with_draft(model: Model, names: _Names, draft: DraftNames | None = None) -> Model:
    """The model with its file's draft layer, if there is one. A draft layer that cannot be loaded
    is a warning: the model runs without it. `draft`: the names, where not the family's."""
    spec, family = model.spec, named(model.spec.family)
    if family is None or family.drafts is None:
        return model
    draft, count = draft or family.drafts, len(spec.layers)
    if draft.prefix:
        stem, layer = draft.prefix, _finder(spec, names.collector.tensors, draft.prefix)
    else:

        def layer(name: str) -> Source:
            return names.find(name.replace("layers.0.", f"layers.{count}.", 1))

        first = layer("layers.0.attn_norm").names[0]
        stem = first[: first.rindex(f"{count}.")] + f"{count}."
    finder = DraftFinder(draft, names.collector, names.find, layer, stem)
    if not finder.has("mtp.project"):
        return model
    try:
        own = Model(*finder.load(model.weights), model.source)
    except ModelError as error:
        text = f"the file's draft layer is not used: {error.message}"
        return replace(model, warnings=(*model.warnings, text))
    return replace(model, draft=own)


def _types(others: Mapping[str, RawTensor]) -> dict[str, str]:
    return {name: tensor.dtype for name, tensor in others.items()}


def has_own_head(tensors: Mapping[str, Tensor], embed: str, head: str) -> bool:
    """Whether the file has an output head that differs from the embedding."""
    if head not in tensors or embed not in tensors:
        return False
    return differ(tensors[embed], tensors[head])


def _draft_layers(spec: ModelSpec) -> int | None:
    """The first layer behind the model's own, where files of the family have such layers."""
    family = named(spec.family)
    return len(spec.layers) if family and family.drafts else None


def _shared_kv(spec: ModelSpec) -> frozenset[int]:
    """Layers that read the keys and values of another layer."""
    return frozenset(i for i, a in enumerate(spec.layers) if a.kv_layer is not None)


def _digest(source: str, spec: ModelSpec, quant: str | None) -> str:
    """The model's part of fingerprints: file digest, quantisation and layer specs.

    `quant` changes the weights and the context may change rotary frequencies, so two engines that
    differ in either may generate different tokens."""
    return hashlib.sha256(repr((source, quant, spec.layers)).encode()).hexdigest()


# ---------------------------------------------------------------------------------- stop tokens


def _eos_warnings(eos: tuple[int, ...], spec: ModelSpec) -> tuple[str, ...]:
    return tuple(
        f"the stop token {one} is outside the vocabulary of {spec.vocab} tokens; it ends no output"
        for one in eos
        if one >= spec.vocab
    )


def _ids(key: str, value: Any) -> list[int]:
    """The token ids of a key that has one, a list or none. -1: none, as some files say it."""
    if value is None:
        return []
    values = list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, (int, np.integer)):
            raise ModelError(f"{key} is {value!r:.60}: token ids are whole numbers")
    return [int(one) for one in values if one >= 0]


def _gguf_eos(metadata: Mapping[str, object]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eos_token_ids", "eot_token_id", "eom_token_id")
    names = [f"tokenizer.ggml.{key}" for key in keys]
    found = [i for name in names for i in _ids(name, metadata.get(name))]
    return tuple(dict.fromkeys(found))


def _config_eos(config: Mapping[str, object], generation: Mapping[str, object]) -> tuple[int, ...]:
    """Stop tokens of config.json and generation_config.json.

    Chat models often list their end-of-turn token in the second file only."""
    text = config.get("text_config")
    nested = text.get("eos_token_id") if isinstance(text, Mapping) else None
    found = _ids("eos_token_id", config.get("eos_token_id"))
    found += _ids("text_config.eos_token_id", nested)
    found += _ids("generation_config.json: eos_token_id", generation.get("eos_token_id"))
    return tuple(dict.fromkeys(found))


# -------------------------------------------------------------------------------------- weights
