"""How the cuda backend keeps each weight on the GPU, and how many bytes that takes.

In: names, shapes and types of weights, as their file has them. Out: sizes. The backend decides with
these functions, and `verbatim plan` states their result. No PyTorch import: plan needs no GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from verbatim.formats.registry import FORMATS

if TYPE_CHECKING:
    from verbatim.model.spec import ModelSpec

BlockMode: TypeAlias = Literal["unpacked", "both", "only"]
# weights that are stored in half precision
# fmt: off
MATRICES = (
    "attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down",
    "moe.gate", "moe.up", "moe.down", "shared.gate", "shared.up", "shared.down",
    "attn.gate", "conv.in", "conv.out", "delta.qkv", "delta.z", "delta.out",
    "layer_inputs.embed", "layer_inputs.project", "input.gate", "input.project",
    "mtp.project", "eagle.fc",
)
# fmt: on
# read or multiplied with few rows: their size does not count for the buffer
HEADS = ("embed", "head", "layer_inputs.embed")
# matrices that one matmul reads; they stay in their blocks only if all have one format
JOINED = (
    ("attn", ("q", "k", "v")),
    ("mlp", ("gate", "up")),
    ("moe", ("gate", "up")),
    ("shared", ("gate", "up")),
    ("delta", ("qkv", "z")),
)
BK = 128  # inputs per block of a matmul; splits are whole blocks, so it affects the bits
MAX_SPLITS = 4  # partial sums of a matmul; affects the bits
PACKS = (256, 128)  # inputs of quantised weights that a kernel reads at once; divides a split
TILE = 64  # outputs of quantised weights that a program computes
MAX_BUFFER = 1 << 28  # weights with more values are never unpacked into the shared buffer


class StoredWeight(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> str: ...


class DeviceBytes(NamedTuple):
    held: int
    read: int  # by a decode step of few rows


BLOCK_FORMATS = {name: form.gpu for name, form in FORMATS.items() if form.gpu is not None}


def is_matrix(name: str) -> bool:
    return name in (*HEADS, "positions") or name.endswith(MATRICES)


def is_half(name: str, weight: StoredWeight) -> bool:
    """Whether the weight is in half precision, unless it stays in its blocks. The gates of a delta
    net are, if the file has them so: they are joined with its other matrices."""
    is_gate = name.endswith(("delta.b", "delta.a")) and weight.type in ("f16", "bf16")
    return is_gate or is_matrix(name)


def keeps_blocks(name: str, weight: StoredWeight) -> bool:
    """Whether the matmul can read the weight in its blocks."""
    if not is_matrix(name) or name == "positions" or weight.type not in BLOCK_FORMATS:
        return False
    if ".moe." in name:
        return len(weight.shape) == 3 and weight.shape[1] % TILE == 0
    return len(weight.shape) == 2


def split_k(n: int, k: int) -> tuple[int, int]:
    """(splits, blocks of BK inputs per split) of a matmul with a weight [n, k].

    Weights with n <= k (attention output, MLP down) have four splits: tensor parallelism can give
    whole splits to a device and still add them in the same order."""
    blocks = -(-k // BK)
    splits = max(1, min(MAX_SPLITS, blocks // 2)) if n <= k else 1
    blocks_per_split = -(-blocks // splits)
    return -(-blocks // blocks_per_split), blocks_per_split


def packing(k: int) -> tuple[int, int]:
    """(inputs per pack, inputs per row): whole packs fill a split, and whole splits a row."""
    _, blocks = split_k(1, k)
    pack = next(size for size in PACKS if blocks * BK % size == 0)
    return pack, -(-k // (blocks * BK)) * blocks * BK


# ---- bytes


def block_mode(weights: Mapping[str, StoredWeight], memory: float) -> BlockMode:
    """Whether quantised matrices are unpacked to float16: both copies fit twice into the memory,
    because loading needs both. The bits of a result are the same."""
    return "both" if 2 * weight_bytes(weights, "both") <= memory else "only"


def weight_bytes(weights: Mapping[str, StoredWeight], blocks: BlockMode = "only") -> int:
    """Most bytes of the weights while they are loaded: quantised matrices in their blocks and a
    buffer to unpack one of them ("only"), or in their blocks and in half precision ("both")."""
    kept = _stay_in_blocks(weights)
    total = sum(held for held, _ in device_bytes(weights, "only").values())
    if blocks == "both":
        return total + sum(2 * prod(weights[name].shape) for name in kept if ".moe." not in name)
    return total + buffer_bytes(weights, kept)


def device_bytes(weights: Mapping[str, StoredWeight], blocks: BlockMode) -> dict[str, DeviceBytes]:
    """Bytes of each weight after loading. Matrices are in half precision or in blocks, all others
    are float32."""
    kept = _stay_in_blocks(weights) if blocks != "unpacked" else ()
    return {name: _bytes_of(name, w, blocks, name in kept) for name, w in weights.items()}


def activation_bytes(spec: ModelSpec) -> int:
    """Bytes of a step per token, beside weights and KV cache, estimated from the shapes (not
    measured): residual, norm and product outputs of a layer in float32, and the inner rows of its
    MLP, also in half precision. Each expert that a token uses has inner rows and an output."""
    shapes = [spec.kv_shape(i) for i in range(len(spec.layers))]
    qkv = max((spec.heads + 2 * heads) * size for heads, size in shapes)
    if spec.delta is not None:
        qkv = max(qkv, spec.delta.qkv + 2 * spec.delta.values)
    used = [max(spec.experts_used if layer.experts else 0, 1) for layer in spec.layers]
    inner = max(spec.mlp_width(i) * count for i, count in enumerate(used))
    return 4 * ((3 + max(used)) * spec.hidden + qkv) + 10 * (inner + spec.shared_mlp)


def buffer_bytes(weights: Mapping[str, StoredWeight], kept: Collection[str]) -> int:
    """The buffer into which the largest of these weights is unpacked. Gate and up are joined."""
    unpacked = [name for name in kept if name not in HEADS and ".moe." not in name]
    sizes = [2 * prod(weights[name].shape) for name in unpacked]
    return 2 * min(max(sizes, default=0), MAX_BUFFER)


def _bytes_of(name: str, weight: StoredWeight, blocks: BlockMode, kept: bool) -> DeviceBytes:
    values = prod(weight.shape)
    if not kept:
        return DeviceBytes(*[(2 if is_half(name, weight) else 4) * values] * 2)
    *experts, n, k = weight.shape
    form, (_, wide) = BLOCK_FORMATS[weight.type], packing(k)
    rows = -(-n // TILE) * TILE * prod(experts)
    size = rows * (wide * form.bits // 8 + wide // form.group * form.scale_bytes)
    # experts are multiplied in their blocks with any number of rows
    copy = 0 if blocks == "only" or ".moe." in name else 2 * values
    return DeviceBytes(size + copy, size)


def _stay_in_blocks(weights: Mapping[str, StoredWeight]) -> set[str]:
    """Weights in blocks, without those that are joined with a weight of another format or with
    one that ends inside a tile."""
    kept = {name for name, weight in weights.items() if keeps_blocks(name, weight)}
    for name in sorted(kept):
        prefix, _, part = name.rpartition(".")
        for owner, parts in JOINED:
            if part in parts and prefix.endswith(f".{owner}"):
                group = [f"{prefix}.{one}" for one in parts if f"{prefix}.{one}" in weights]
                whole = all(weights[one].shape[-2] % TILE == 0 for one in group[:-1])
                if len({BLOCK_FORMATS.get(weights[one].type) for one in group}) > 1 or not whole:
                    kept.discard(name)
    return kept
