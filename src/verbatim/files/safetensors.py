"""Safetensors reader: a model directory in; configs and memory-mapped weights out.

Layout of a safetensors file: eight bytes with the length of a JSON header, the header (name ->
dtype, shape, two offsets), the data.

Files are untrusted. The header length is checked against the file, its memory is estimated before
it is parsed, and the tensors must cover the data exactly, without gaps or overlaps. Only float
tensors become weights. Others (masks, position ids) are listed in `others`. With a
`quantization_config`, packed_checkpoint.py makes float weights of them. Pickle checkpoints
(pytorch_model.bin) are never read: unpickling runs code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.base.json_io import JsonObject, no_key_twice
from verbatim.files.mapped_file import hash_data, hash_samples, map_file, samples_per_tensor
from verbatim.files.split import group_parts
from verbatim.formats.packed.packed_checkpoint import RawTensor, unpack_checkpoint
from verbatim.formats.registry import BLOCKS
from verbatim.formats.tensor import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_JSON = 32 << 20  # bytes of a config or an index
MAX_HEADER = 100 << 20  # the format's own limit
MAX_DIMS = 8
JSON_MEMORY = 48 << 20  # bytes of memory for parsed JSON, beyond the file size

FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
# Bits per value, also of dtypes that are not read: their offsets are checked.
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class SafetensorsDir:
    """A parsed model directory. `generation_config` is empty if the file is absent."""

    path: Path
    config: JsonObject = field(repr=False)
    generation_config: JsonObject = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)
    digest: str
    others: dict[str, RawTensor] = field(default_factory=dict, repr=False)
    warnings: tuple[str, ...] = ()  # about a quantised checkpoint


def _read_shards(directory: Path) -> tuple[dict[str, Tensor], dict[str, RawTensor]]:
    """The tensors of all shards, and those of types that only a quantised checkpoint has."""
    tensors: dict[str, Tensor] = {}
    others: dict[str, RawTensor] = {}
    for shard, expected in shard_names(directory).items():
        found, passed = read_safetensors(directory / shard)
        for name in expected:
            if name not in found and name not in passed:
                raise ModelError(
                    f"the index places the tensor {name!r:.80} in {shard}, which does not hold it",
                    file=str(directory),
                )
        for name in (*found, *passed):
            if name in tensors or name in others:
                raise ModelError(
                    f"tensor {name!r:.80} appears in two shards", file=str(directory / shard)
                )
        tensors |= found
        others |= passed
    return tensors, others


def read_directory(
    path: str | os.PathLike[str], *, blocks: bool = False, gpu: bool = False
) -> SafetensorsDir:
    """Parse everything but the weights, and map those. Any violation is a ModelError. `blocks`:
    keep quantised weights in GGUF's blocks; the directory must have a quantization_config. `gpu`:
    keep them in blocks that have the bits of the unpacked weights (checkpoint_blocks.py)."""
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(
            "not a directory; a safetensors model is a directory with config.json",
            file=str(directory),
        )
    try:
        has_config = (directory / "config.json").exists()
    except OSError as error:
        raise ModelError(
            f"cannot be read: {error.strerror or error}", file=str(directory)
        ) from error
    if not has_config:
        raise ModelError(_no_model(directory), file=str(directory))
    config = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    generation_config = read_json(generation) if generation.exists() else {}
    tensors, others = _read_shards(directory)
    digest = _digest(config, tensors)
    warnings: tuple[str, ...] = ()
    packing = config.pop("quantization_config", None)
    if isinstance(packing, dict):
        digest = _packed_digest(digest, others)
        file = str(directory / "config.json")
        tensors, others, warnings = unpack_checkpoint(
            packing, tensors, others, file, blocks=blocks, gpu=gpu
        )
    elif blocks:
        raise ModelError(
            "quant 'packed' keeps the integers of a quantised checkpoint, and this config has no "
            "quantization_config; leave quant out",
            file=str(directory),
        )
    elif packing is not None:
        config["quantization_config"] = packing
    return SafetensorsDir(directory, config, generation_config, tensors, digest, others, warnings)


def _packed_digest(digest: str, packed: Mapping[str, RawTensor]) -> str:
    """The digest of the float tensors, and of samples of the others."""
    made, count = hashlib.sha256(digest.encode()), samples_per_tensor(len(packed))
    for name, tensor in sorted(packed.items()):
        made.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode(errors="surrogatepass"))
        hash_data(made, tensor.data, count)
    return made.hexdigest()


def _no_model(directory: Path) -> str:
    """Error text for a directory without config.json; suggests a GGUF file in it."""
    try:
        files = list(group_parts(f.name for f in directory.glob("*.gguf")))
    except OSError:  # no permission to list the directory
        files = []
    if files:
        more = f" (and {len(files) - 1} more)" if len(files) > 1 else ""
        return f"is a directory; give the GGUF file itself: {directory / files[0]}{more}"
    if (directory / "adapter_config.json").exists():
        return "is a LoRA adapter, not a model; load its base model and add --adapter NAME=PATH"
    return "a directory needs config.json and *.safetensors to be a model; or give a .gguf file"


def shard_names(directory: Path) -> dict[str, list[str]]:
    """Shard file name -> names of the tensors that the index assigns to it."""
    index = directory / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError("weight_map is missing or empty", file=str(index))
        shards: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            _check_shard_name(shard, name, index)
            shards.setdefault(shard, []).append(name)
        for shard in shards:
            if not (directory / shard).is_file():
                raise ModelError(
                    f"the shard {shard} is missing; fetch the model again", file=str(index)
                )
        if SINGLE not in shards and (directory / SINGLE).exists():
            raise ModelError(
                f"the directory has {SINGLE}, which the index does not name, and the shards of the "
                "index: two sets of weights; remove one of them",
                file=str(index),
            )
        return dict(sorted(shards.items()))
    if (directory / SINGLE).exists():
        return {SINGLE: []}
    files = sorted(f.name for f in directory.glob("*.safetensors"))
    if len(files) == 1:
        return {files[0]: []}
    if files:
        raise ModelError(
            f"{len(files)} safetensors files but no {INDEX} that says which to read; fetch it, too",
            file=str(directory),
        )
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise ModelError(
            "only pickle weights; they run code when read and are refused: convert to safetensors",
            file=str(directory),
        )
    raise ModelError(
        "no safetensors file beside config.json; fetch the model again", file=str(directory)
    )


def _check_shard_name(shard: object, name: str, index: Path) -> None:
    """Reject shard names that are not plain file names in the directory of the index."""
    if isinstance(shard, str) and any(c in "/\\:" or ord(c) < 32 for c in shard):
        raise ModelError(
            f"the shard name {shard!r:.80} leads out of the model's directory", file=str(index)
        )
    plain = isinstance(shard, str) and len(shard) <= 255 and not shard.startswith(".")
    if not (plain and str(shard).endswith(".safetensors")):
        raise ModelError(
            f"tensor {name!r:.80} lies in {shard!r:.80}, which is not the name of a "
            "safetensors file",
            file=str(index),
        )


# ------------------------------------------------------------------------------------- one file


def read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, RawTensor]]:
    """(float tensors, other tensors) as views of the memory map, in order of offset."""
    view = map_file(file, min_size=10)
    size = len(view)
    length = int.from_bytes(view[:8], "little")
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise ModelError(
            f"a header of {length} bytes does not fit a file of {size}", file=str(file)
        )
    header = parse_json(view[8 : 8 + length], file, size + JSON_MEMORY)
    header.pop("__metadata__", None)
    data = np.frombuffer(view, dtype=np.uint8)[8 + length :]
    entries = sorted(
        ((_entry(file, name, entry), name) for name, entry in header.items()),
        key=lambda item: item[0][:2],
    )
    tensors: dict[str, Tensor] = {}
    others: dict[str, RawTensor] = {}
    position = 0
    for (begin, end, dtype, shape), name in entries:
        if begin != position:
            raise ModelError(
                f"tensor {name!r:.80} begins at {begin}; the one before it ends at {position}",
                file=str(file),
            )
        if end > data.size:
            raise ModelError(
                f"tensor {name!r:.80} ends at {end}; the data end at {data.size} "
                "(cut short? get it again)",
                file=str(file),
            )
        position = end
        if dtype in FLOATS:
            tensors[name] = Tensor(name, FLOATS[dtype], shape or (1,), data[begin:end])
        else:
            others[name] = RawTensor(dtype, shape, data[begin:end])
    if position != data.size:
        raise ModelError(
            f"{data.size - position} bytes after the last tensor belong to none", file=str(file)
        )
    return tensors, others


def _entry(file: Path, name: str, entry: object) -> tuple[int, int, str, tuple[int, ...]]:
    """(begin, end, dtype, shape) of one tensor; checks that the offsets match dtype and shape."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelError(
            f"tensor {name!r:.80} needs exactly dtype, shape and data_offsets", file=str(file)
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ModelError(f"tensor {name!r:.80} has the unknown dtype {dtype!r:.40}", file=str(file))
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_size, shape)):
        raise ModelError(f"tensor {name!r:.80} has the shape {shape!r:.80}", file=str(file))
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ModelError(f"tensor {name!r:.80} has the offsets {offsets!r:.80}", file=str(file))
    if dtype in FLOATS and 0 in shape:
        raise ModelError(f"tensor {name!r:.80} has the empty shape {shape!r:.80}", file=str(file))
    bits = BITS[dtype]
    for dim in shape:
        bits *= dim
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise ModelError(
            f"tensor {name!r:.80} ({dtype} {shape!r:.80}) takes {bits} bits, "
            f"but its offsets are {offsets!r:.80}",
            file=str(file),
        )
    return offsets[0], offsets[1], dtype, tuple(shape)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _digest(config: JsonObject, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the config, of every tensor's name, type and shape, and of 4 KiB of its data.

    An identifier, not an integrity check (see the digest in gguf.py)."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    count = samples_per_tensor(len(tensors))
    for name in sorted(tensors):
        hash_samples(digest, tensors[name], count)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------- JSON


def read_json(file: Path, limit: int = MAX_JSON) -> JsonObject:
    """Parse a small JSON file beside the weights; the top level must be an object."""
    try:
        if not file.is_file():
            why = "not a regular file" if file.exists() else "missing"
            raise ModelError(why, file=str(file))
        with open(file, "rb") as handle:
            raw = handle.read(limit + 1)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}", file=str(file)
        ) from error
    if len(raw) > limit:
        raise ModelError(f"longer than {limit >> 20} MiB", file=str(file))
    return parse_json(raw, file, len(raw) + JSON_MEMORY)


def parse_json(raw: bytes, file: Path, memory: int) -> JsonObject:
    """Parse a JSON object; fail before parsing if the result could exceed `memory` bytes.

    Estimate: each comma, colon and bracket may be one small Python object and its dict entry, at
    most 150 bytes. Text is copied, with up to four bytes per character if it is not ASCII."""
    marks = sum(raw.count(mark) for mark in (b",", b":", b"[", b"{"))
    if 150 * marks + len(raw) * (2 if raw.isascii() else 5) > memory:
        raise ModelError(
            f"JSON with {marks} values in {len(raw)} bytes needs more memory than the limit",
            file=str(file),
        )
    try:
        value = json.loads(raw.decode(), object_pairs_hook=no_key_twice)
    except RecursionError:
        raise ModelError("JSON nested too deeply", file=str(file)) from None
    # Not UTF-8, not JSON, a number with thousands of digits, or a duplicate name.
    except ValueError as error:
        raise ModelError(f"not valid JSON: {error}", file=str(file)) from None
    if not isinstance(value, dict):
        raise ModelError(f"JSON holds a {type(value).__name__}, not an object", file=str(file))
    return value


assert all(BITS[dtype] == 8 * BLOCKS[kind][1] for dtype, kind in FLOATS.items())
