"""GGUF headers of encoders: architecture bert or nomic-bert in, EncoderSpec and pooling out.

Tensor names are those of llama.cpp's converter; tests/encoder/test_encoder_gguf.py compares them
with the gguf package. The converter cuts roberta's unused position rows, so positions start at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verbatim.base.errors import ModelError
from verbatim.encoder.encoder_spec import EncoderSpec
from verbatim.formats.tensor import Tensor
from verbatim.model.config_fields import Fields
from verbatim.model.embedding import EmbeddingSpec
from verbatim.model.families.common.gguf_rows import POOLING
from verbatim.model.keys import Table, check_keys, followed, must_equal, no_effect

PEEK = 4096  # bytes; writers put general.architecture first
MAX_LAYERS = 1024
_LAYER = {
    "o": "blk.{i}.attn_output",
    "attn_norm": "blk.{i}.attn_output_norm",
    "up": "blk.{i}.ffn_up",
    "down": "blk.{i}.ffn_down",
    "mlp_norm": "blk.{i}.layer_output_norm",
}
_EMBED = {"embed": "token_embd", "types": "token_types", "embed_norm": "token_embd_norm"}
# internal name -> name in the file, without .weight and .bias
GGUF_NAMES = {
    "bert": {
        **_EMBED,
        **_LAYER,
        "positions": "position_embd",
        **{name: f"blk.{{i}}.attn_{name}" for name in "qkv"},
    },
    "nomic-bert": {
        **_EMBED,
        **_LAYER,
        "gate": "blk.{i}.ffn_gate",
        **dict.fromkeys("qkv", "blk.{i}.attn_qkv"),
    },
}
_KEYS: Table = {
    "context_length": followed("longest text"),
    "embedding_length": followed("width of the model"),
    "block_count": followed("layers"),
    "feed_forward_length": followed("inner width of the MLP"),
    "attention.head_count": followed("heads"),
    "attention.head_count_kv": no_effect("every head has its own keys and values"),
    "attention.layer_norm_epsilon": followed("epsilon of the norms"),
    "attention.causal": must_equal(False, note="attention is not causal"),
    "pooling_type": followed("1 mean, 2 cls, 3 last; others are refused"),
    "vocab_size": no_effect("the embedding's rows decide"),
    "tensor_data_layout": no_effect("metadata"),
}
GGUF_ENCODER_KEYS: dict[str, Table] = {
    "bert": _KEYS,
    "nomic-bert": {
        **_KEYS,
        "rope.freq_base": followed("base of the rotary frequencies", 1000.0),
        "rope.dimension_count": no_effect("whole heads are rotated"),
        "moe_every_n_layers": must_equal(0, note="no mixture of experts"),
    },
}


def peek_architecture(path: Path) -> str | None:
    """general.architecture of a GGUF file, if it is among the first keys; None for other files."""
    try:
        with open(path, "rb") as handle:
            head = handle.read(PEEK)
    except OSError:
        return None
    key = b"general.architecture"
    at = head.find(key) + len(key)
    if head[:4] != b"GGUF" or at < len(key):
        return None
    size = int.from_bytes(head[at + 4 : at + 12], "little")  # behind the type of the value
    return head[at + 12 : at + 12 + min(size, 64)].decode(errors="replace")


def read_encoder_header(
    metadata: Mapping[str, object], tensors: Mapping[str, Tensor], file: str
) -> tuple[EncoderSpec, EmbeddingSpec, tuple[str, ...]]:
    family = Fields(metadata, file).string("general.architecture")
    prefix = f"{family}."
    checked = check_keys(metadata, GGUF_ENCODER_KEYS[family], what=family, file=file, prefix=prefix)
    f = Fields(checked.values, file, prefix)
    hidden, heads = f.integer("embedding_length"), f.integer("attention.head_count")
    if hidden % heads:
        raise f.fail("embedding_length", f"a multiple of the {heads} heads is needed")
    pooling = POOLING[f.integer("pooling_type", 0, low=0, high=max(POOLING))]
    if pooling == "rank":
        raise f.fail("pooling_type", "cross-encoders are read from safetensors only")
    rows = {name: _rows(tensors, name) for name in ("token_embd", "token_types", "position_embd")}
    if not rows["token_embd"]:
        raise ModelError("tensor token_embd.weight is missing", file=file)
    gated = family == "nomic-bert"
    positions = 0 if gated else rows["position_embd"]
    context = f.integer("context_length")
    spec = EncoderSpec(
        family,
        vocab=rows["token_embd"],
        hidden=hidden,
        heads=heads,
        head_dim=hidden // heads,
        mlp=f.integer("feed_forward_length"),
        layers=f.integer("block_count", high=MAX_LAYERS),
        context=min(context, positions) if positions else context,
        types=rows["token_types"],
        positions=positions,
        rope_theta=f.number("rope.freq_base", 1000.0) if gated else 0.0,
        norm_eps=f.number("attention.layer_norm_epsilon"),
        activation="silu" if gated else "gelu",
        gated=gated,
        bias=not gated,
    )
    stated = EmbeddingSpec(pooling if f.has("pooling_type") else "")
    return spec, stated, tuple(checked.warnings)


def _rows(tensors: Mapping[str, Tensor], name: str) -> int:
    tensor = tensors.get(f"{name}.weight")
    return 0 if tensor is None else tensor.rows
