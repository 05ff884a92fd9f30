"""Checks of a model's weights: NaN and infinite values; a tied head with its own values. In:
ModelFiles. Out: Findings. Every byte that can hold a NaN is read; quantised blocks hold one only in
their scales."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from verbatim.diagnose.file_checks import text_config
from verbatim.diagnose.findings import Finding, bad, good, guarded
from verbatim.diagnose.model_files import ModelFiles
from verbatim.model.load import has_own_head
from verbatim.weights.names import find_prefix, hf_source
from verbatim.weights.tensor import BLOCKS, Tensor

CHUNK = 1 << 24  # bytes looked at together: temporaries stay small
# Type -> byte offsets of its f16 scales in a block (weights/block_formats.py). q8_k has one in f32.
_SCALES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}
# Type -> (integer type, exponent bits). All exponent bits set: infinite, or NaN.
_EXPONENTS = {
    "f32": (np.uint32, 0x7F800000),
    "f16": (np.uint16, 0x7C00),
    "bf16": (np.uint16, 0x7F80),
}


def check_weights(files: ModelFiles) -> list[Finding]:
    return [
        *guarded("tied head", lambda: _tied(files)),
        *guarded("weights", lambda: _finite(files)),
    ]


def _tied(files: ModelFiles) -> Iterator[Finding]:
    if files.kind == "gguf" or files.model is None:
        return
    spec = files.model.spec
    stated = text_config(files.config).get("tie_word_embeddings")
    stated = files.config.get("tie_word_embeddings", stated)
    prefix = find_prefix(files.tensors, spec.family)
    if prefix is None:
        return
    names = [hf_source(spec.family, prefix, part, 0).names[0] for part in ("embed", "head")]
    if stated and has_own_head(files.tensors, *names):
        yield bad(
            "tied head",
            "the config ties the head to the embedding, but the file has a head of its own",
            f"tie_word_embeddings is true; {names[1]} differs from {names[0]}",
            "set tie_word_embeddings to false if the head was trained, else delete the tensor",
        )
    else:
        tied = "the head is the embedding" if spec.tied else "the head has its own weights"
        yield good("tied head", f"{tied}, and the file agrees")


def _finite(files: ModelFiles) -> Iterator[Finding]:
    if not files.tensors:
        return
    wrong = {name: count for name, tensor in files.tensors.items() if (count := not_finite(tensor))}
    if wrong:
        name, count = next(iter(wrong.items()))
        more = f", and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        yield bad(
            "weights",
            "weights are NaN or infinite: every logit can become NaN",
            f"{name}: {count} of {files.tensors[name].rows * files.tensors[name].shape[-1]}{more}",
            "fetch the file again; a float16 copy of a bfloat16 model can overflow, too",
        )
    else:
        yield good("weights", f"all finite in {len(files.tensors)} tensors")


def not_finite(tensor: Tensor) -> int:
    """Number of values (of scales, in quantised blocks) that are NaN or infinite."""
    if tensor.type in _EXPONENTS:
        return _count(tensor.data, tensor.type)
    _, size = BLOCKS[tensor.type]
    blocks = tensor.data.reshape(-1, size)
    if tensor.type == "q8_k":
        return _count(np.ascontiguousarray(blocks[:, :4]).reshape(-1), "f32")
    return sum(
        _count(np.ascontiguousarray(blocks[:, at : at + 2]).reshape(-1), "f16")
        for at in _SCALES[tensor.type]
    )


def _count(data: np.ndarray, kind: str) -> int:
    integer, exponent = _EXPONENTS[kind]
    mask = integer(exponent)
    return sum(
        int(np.count_nonzero((data[at : at + CHUNK].view(integer) & mask) == mask))
        for at in range(0, data.size, CHUNK)
    )
