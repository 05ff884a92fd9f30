"""Checks of a model's weights: NaN and infinite values; a tied head with its own values. In:
ModelFiles. Out: Findings. Every byte that can hold a NaN is read; quantised blocks hold one only in
their scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

import numpy as np

from verbatim.backend.cpu.repack import MEMORY
from verbatim.diagnose.doctor.file_checks import text_config
from verbatim.diagnose.doctor.findings import Finding, bad, checks, good, note
from verbatim.diagnose.doctor.model_files import ModelFiles
from verbatim.formats.registry import BLOCKS
from verbatim.formats.requantise import broken_scales
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.load import Model, has_own_head
from verbatim.model.loading.names import find_prefix, hf_source

CHUNK = 1 << 24  # bytes looked at together: temporaries stay small


def check_weights(files: ModelFiles) -> list[Finding]:
    return [*_tied(files), *_finite(files), *_memory(files)]


@checks("tied head")
def _tied(files: ModelFiles) -> Iterator[Finding]:
    if files.kind == "gguf" or not isinstance(files.model, Model):
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
            "the config ties the head to the embedding, but the file has a head of its own",
            f"tie_word_embeddings is true; {names[1]} differs from {names[0]}",
            "set tie_word_embeddings to false if the head was trained, else delete the tensor",
        )
    else:
        tied = "the head is the embedding" if spec.tied else "the head has its own weights"
        yield good(f"{tied}, and the file agrees")


@checks("weights")
def _finite(files: ModelFiles) -> Iterator[Finding]:
    if not files.tensors:
        return
    wrong = {name: count for name, tensor in files.tensors.items() if (count := not_finite(tensor))}
    if wrong:
        name, count = next(iter(wrong.items()))
        output = "embedding" if files.encoder else "logit"
        more = f", and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        yield bad(
            f"weights are NaN or infinite: every {output} can become NaN",
            f"{name}: {count} of {files.tensors[name].rows * files.tensors[name].shape[-1]}{more}",
            "fetch the file again; a float16 copy of a bfloat16 model can overflow, too",
        )
    else:
        yield good(f"all finite in {len(files.tensors)} tensors")


@checks("memory")
def _memory(files: ModelFiles) -> Iterator[Finding]:
    """Findings on tensor types that need more memory than their file."""
    if files.encoder:  # computed in float32, whatever the file holds
        return
    larger = [t for t in files.tensors.values() if t.type in MEMORY]
    if larger:
        types = Counter(t.type for t in larger)
        stored = sum(t.data.nbytes for t in larger)
        held = sum(prod(t.shape) * MEMORY[t.type] for t in larger)
        yield note(
            "weights of these types take more memory on the cpu backend than in the file",
            f"{', '.join(f'{n} {t}' for t, n in types.items())} tensors: {stored / 1e6:,.1f} MB in "
            f"the file, {held / 1e6:,.1f} MB in memory",
            "nothing, if the memory suffices; else a q2_k to q4_k file, which is computed as it is",
        )


def not_finite(tensor: Tensor) -> int:
    """Number of values (of scales, in quantised blocks) that are NaN or infinite."""
    step = CHUNK // BLOCKS[tensor.type][1] * BLOCKS[tensor.type][1]
    return sum(
        int(np.count_nonzero(broken_scales(tensor.type, tensor.data[at : at + step])))
        for at in range(0, tensor.data.size, step)
    )
