"""Load an encoder: a safetensors directory (or a GGUF file) in, an EncoderModel out.

Tensor names are mapped by one list per family. A missing or an unknown tensor is a ModelError that
names it; heads of other tasks (masked language model, pooler) are ignored by name.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from verbatim.base.errors import ModelError, ParameterError
from verbatim.base.json_io import JsonObject
from verbatim.encoder.encoder_gguf import (
    GGUF_ENCODER_KEYS,
    GGUF_NAMES,
    peek_architecture,
    read_encoder_header,
)
from verbatim.encoder.encoder_keys import ENCODER_KEYS
from verbatim.encoder.encoder_spec import EncoderModel, EncoderSpec
from verbatim.files.gguf import GGUFFile, read_gguf
from verbatim.files.safetensors import SafetensorsDir, read_directory, read_json
from verbatim.formats.tensor import Tensor
from verbatim.model.config_fields import Fields, short
from verbatim.model.embedding import EmbeddingSpec, read_embedding
from verbatim.model.keys import check_keys

MAX_LAYERS = 1024
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
_SCORE = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}
# internal name -> name in the file, without .weight and .bias
_BERT_NAMES = {
    "embed": "embeddings.word_embeddings",
    "types": "embeddings.token_type_embeddings",
    "positions": "embeddings.position_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "q": "encoder.layer.{i}.attention.self.query",
    "k": "encoder.layer.{i}.attention.self.key",
    "v": "encoder.layer.{i}.attention.self.value",
    "o": "encoder.layer.{i}.attention.output.dense",
    "attn_norm": "encoder.layer.{i}.attention.output.LayerNorm",
    "up": "encoder.layer.{i}.intermediate.dense",
    "down": "encoder.layer.{i}.output.dense",
    "mlp_norm": "encoder.layer.{i}.output.LayerNorm",
}
_NOMIC_NAMES = {
    "embed": "embeddings.word_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embed_norm": "emb_ln",
    **dict.fromkeys("qkv", "encoder.layers.{i}.attn.Wqkv"),
    "o": "encoder.layers.{i}.attn.out_proj",
    "attn_norm": "encoder.layers.{i}.norm1",
    "up": "encoder.layers.{i}.mlp.fc11",
    "gate": "encoder.layers.{i}.mlp.fc12",
    "down": "encoder.layers.{i}.mlp.fc2",
    "mlp_norm": "encoder.layers.{i}.norm2",
}
NAMES = {
    "bert": {**_BERT_NAMES, "score.dense": "pooler.dense", "score.out": "/classifier"},
    "roberta": {
        **_BERT_NAMES,
        "score.dense": "/classifier.dense",
        "score.out": "/classifier.out_proj",
    },
    "nomic-bert": _NOMIC_NAMES,
}
# Keys that decide which tensors are expected, and their shapes, for error texts.
_HF_SIZES = (
    "num_hidden_layers, type_vocab_size",
    "vocab_size, hidden_size, head_dim, intermediate_size, max_position_embeddings or "
    "type_vocab_size",
)
_GGUF_SIZES = ("block_count", "embedding_length, feed_forward_length or context_length")
PREFIXES = ("", "bert.", "roberta.", "nomic_bert.")
# Heads of other tasks, and buffers that older versions of transformers saved.
_IGNORED = re.compile(
    r"(cls|lm_head|qa_outputs)\..*"
    r"|(bert\.|roberta\.)?(pooler\..*|embeddings\.(position|token_type)_ids)"
)


def encoder_type(path: Path) -> str | None:
    """The model_type of a directory with an encoder, or the architecture of a GGUF file with one;
    None for any other model."""
    if path.is_file():
        found = peek_architecture(path)
        return found if found in GGUF_ENCODER_KEYS else None
    if not (path / "config.json").is_file():
        return None
    kind = read_json(path / "config.json").get("model_type")
    return kind if isinstance(kind, str) and kind in ENCODER_KEYS else None


def load_encoder(path: Path, *, context: int | None = None) -> EncoderModel:
    """Load the encoder at `path`, a directory or a GGUF file.

    `context`: the longest text in tokens; None: what the model's files state."""
    return _read(path, context)[1]()


def check_encoder(path: Path, *, context: int | None = None) -> EncoderSpec:
    """The spec of the encoder at `path`. Raises what load_encoder() raises, as far as config and
    tensor names tell."""
    return _read(path, context)[0]


def _read(path: Path, context: int | None) -> tuple[EncoderSpec, Callable[[], EncoderModel]]:
    """The checked spec, and a function that reads the weights."""
    source: SafetensorsDir | GGUFFile
    more: tuple[str, ...] = ()
    if path.is_dir():
        source = read_directory(path)
        embedding = read_embedding(path)
        spec, warnings = read_encoder_config(source.config, str(path / "config.json"))
        finder = _Finder(
            spec, source.tensors, str(path), NAMES[spec.family], _HF_SIZES, source.others
        )
        more = source.warnings
    else:
        source = read_gguf(path)
        spec, embedding, warnings = read_encoder_header(source.metadata, source.tensors, str(path))
        names = GGUF_NAMES[spec.family]
        finder = _Finder(spec, source.tensors, str(path), names, _GGUF_SIZES, {})
    spec = with_context(spec, embedding, context)
    finder.check_names()
    identity = repr((source.digest, spec))

    def load() -> EncoderModel:
        weights, digest = finder.collect(), hashlib.sha256(identity.encode()).hexdigest()
        types = dict(finder.types)
        return EncoderModel(spec, weights, source, digest, embedding, types, (*warnings, *more))

    return spec, load


def with_context(spec: EncoderSpec, embedding: EmbeddingSpec, context: int | None) -> EncoderSpec:
    """The spec for texts of at most `context` tokens, or of the length that the files state."""
    if context is not None and context > spec.context:
        raise ParameterError(
            "context",
            f"{context} is more than this model's {spec.context} positions; ask for at most that",
        )
    stated = min(embedding.max_tokens or spec.context, spec.context)
    return replace(spec, context=context or stated)


def read_encoder_config(
    config: Mapping[str, object], file: str
) -> tuple[EncoderSpec, tuple[str, ...]]:
    kind = Fields(config, file).string("model_type")
    checked = check_keys(config, ENCODER_KEYS[kind], what=kind, file=file)
    f = Fields(checked.values, file, written=checked.written)
    scores = _is_cross_encoder(f)
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    if hidden % heads:
        raise f.fail("hidden_size", f"a multiple of num_attention_heads ({heads}) is needed")
    activation = f.string("hidden_act")
    if activation not in ACTIVATIONS:
        raise f.fail("hidden_act", f"one of {', '.join(ACTIVATIONS)} is needed")
    common: JsonObject = {
        "vocab": f.integer("vocab_size"),
        "hidden": hidden,
        "heads": heads,
        "head_dim": hidden // heads,
        "mlp": f.integer("intermediate_size"),
        "layers": f.integer("num_hidden_layers", high=MAX_LAYERS),
        "types": f.integer("type_vocab_size", low=0),
        "norm_eps": f.number("layer_norm_eps"),
        "activation": ACTIVATIONS[activation],
        "scores": scores,
        "score_activation": _score_activation(f),
    }
    positions = f.integer("max_position_embeddings")
    if kind == "nomic_bert":
        if scores:
            raise f.fail("architectures", "nomic_bert cross-encoders are not implemented")
        spec = _nomic(f, positions, common)
    else:
        first = 0 if kind == "bert" else f.integer("pad_token_id", low=0) + 1
        if positions <= first:
            raise f.fail("max_position_embeddings", f"the first position is {first}")
        family = "bert" if kind == "bert" else "roberta"
        spec = EncoderSpec(
            family, **common, context=positions - first, positions=positions, first_position=first
        )
    return spec, tuple(checked.warnings)


def _nomic(f: Fields, positions: int, common: JsonObject) -> EncoderSpec:
    record = f.mapping("rope_parameters")
    inner = Fields(record, f.file, "")
    known = {"rope_type", "rope_theta"}
    if inner.string("rope_type", "default") != "default" or set(record) - known:
        raise f.fail("rope_parameters", "only the rope_type default is supported")
    if None in record.values():
        raise f.fail("rope_parameters", "null is no rope_type and no rope_theta; remove the key")
    theta = inner.number("rope_theta", f.number("rope_theta"))
    limit = f.integer("n_positions", positions)
    limit = min(limit, f.integer("max_trained_positions", limit))
    common["head_dim"] = f.integer("head_dim", common["head_dim"])
    if common["head_dim"] % 2:
        raise f.fail("head_dim", "rotary positions need an even head")
    return EncoderSpec(
        "nomic-bert", **common, context=limit, rope_theta=theta, gated=True, bias=False
    )


def _is_cross_encoder(f: Fields) -> bool:
    names = [name for name in f.items("architectures") if isinstance(name, str)]
    if not any(name.endswith("ForSequenceClassification") for name in names):
        return False
    labels = len(f.mapping("id2label")) or f.integer("num_labels", 2)
    if labels != 1:
        raise ModelError(f"the classifier has {labels} labels; a cross-encoder has 1", file=f.file)
    return True


def _score_activation(f: Fields) -> object:
    """sentence-transformers' rule: the activation that the config names, else the sigmoid."""
    inner, old = f.mapping("sentence_transformers"), "sbert_ce_default_activation_function"
    if "activation_fn" not in inner and not f.has(old):
        return "sigmoid"
    name = inner["activation_fn"] if "activation_fn" in inner else f.raw(old)
    if not isinstance(name, str) or name not in _SCORE:
        raise ModelError(
            f"the score's activation is {short(name)}; known: {', '.join(_SCORE)}", file=f.file
        )
    return _SCORE[name]


class _Finder:
    """Maps the tensors of a file to the weights of the spec, as float32 arrays."""

    def __init__(
        self,
        spec: EncoderSpec,
        tensors: Mapping[str, Tensor],
        file: str,
        names: Mapping[str, str],
        sizes: tuple[str, str],
        others: Mapping[str, object],  # tensors that are not float
    ) -> None:
        self.spec, self.tensors, self.file, self.sizes = spec, tensors, file, sizes
        self.names, self.others = names, others
        self.prefix = self._find_prefix()
        self.types: Counter[str] = Counter()

    def _find_prefix(self) -> str:
        embed = f"{self.names['embed']}.weight"
        found = next((p for p in PREFIXES if p + embed in self.tensors), None)
        if found is None:
            raise ModelError(f"tensor {embed} is missing", file=self.file)
        return found

    def check_names(self) -> None:
        """A missing or unknown tensor is an error."""
        shapes = self.spec.shapes()
        wanted = {self.file_name(name) for name in shapes}
        if missing := sorted(wanted - set(self.tensors)):
            raise ModelError(
                f"tensor {missing[0]} is missing; it is expected by {self.sizes[0]}", file=self.file
            )
        extra = (*self.tensors, *self.others)
        if unknown := sorted(n for n in extra if n not in wanted and not _IGNORED.fullmatch(n)):
            raise ModelError(
                f"tensor {unknown[0]} is not known for {self.spec.family}; the family and "
                f"{self.sizes[0]} decide which tensors are expected",
                file=self.file,
            )

    def collect(self) -> dict[str, np.ndarray]:
        return {name: self._weight(name, shape) for name, shape in self.spec.shapes().items()}

    def file_name(self, name: str) -> str:
        stem, end = (name[:-5], ".bias") if name.endswith(".bias") else (name, ".weight")
        if stem.startswith("layers."):
            _, layer, part = stem.split(".")
            found = self.names[part].replace("{i}", layer)
        else:
            found = self.names[stem]
        return found[1:] + end if found.startswith("/") else self.prefix + found + end

    def _weight(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        tensor: Tensor = self.tensors[self.file_name(name)]
        stem = name.rpartition(".")[2]
        fused = 3 if stem in "qkv" and self.names["q"] == self.names["k"] else 1
        expected = (shape[0] * fused, *shape[1:])
        if tensor.shape != expected:
            raise ModelError(
                f"tensor {tensor.name} has shape {tensor.shape}, {expected} is needed by "
                f"{self.sizes[1]}",
                file=self.file,
            )
        values = tensor.to_f32().reshape(expected)
        if fused > 1:
            at = "qkv".index(name[-1]) * shape[0]
            values = values[at : at + shape[0]]
        self.types[tensor.type] += values.size
        return np.ascontiguousarray(values, np.float32)
