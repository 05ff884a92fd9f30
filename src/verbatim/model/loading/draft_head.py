"""Draft head for speculative decoding: a small network that drafts the tokens after the next one.

In: a GGUF file of a few million weights, trained on the model's own output (bench/train_head.py).
Out: a DraftHead, validated against the model.

One draft token, from a final hidden state h (after the last norm) and the token t sampled from it:

    x  = [ h * state_scale ; rms(embed[t]) * word_scale ]
    z  = h * keep + down @ ( silu(gate @ x) * (up @ x) )     gate and up are the two halves of `up`
    h' = rms(z) * out
    p  = softmax( head[words] @ h' )                         the model's output head, limited to
                                                             the draft vocabulary `words`

The most likely token is the draft and p its acceptance probability. h' and that token give the
next draft. Backends may quantise the head rows for speed: a wrong draft costs time but never
changes the output, because the target model verifies every draft token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.files.gguf import read_gguf
from verbatim.formats.requantise import broken_block
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.load import Model
from verbatim.model.spec import ModelSpec

ARCHITECTURE = "verbatim-draft-head"
SCALES = ("state_scale", "word_scale", "keep", "out")
EPS = np.float32(1e-6)  # epsilon of the RMS norms
# Temperatures up to this count as greedy, and acceptance probabilities are those of temperature 1.
# Logits divided by a tiny temperature would make every draft look certain.
GREEDY_TEMPERATURE = 0.05
# Heads that ship with the package. File name: digest of the model file they were trained for.
BUNDLED_HEADS = Path(__file__).parent / "heads"


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Weights of a draft head. The four scales are float32 [hidden]."""

    up: Tensor  # [2 * inner, 2 * hidden]
    down: Tensor  # [hidden, inner]
    state_scale: np.ndarray
    word_scale: np.ndarray
    keep: np.ndarray
    out: np.ndarray
    words: np.ndarray  # int32: the draft vocabulary, as ascending token ids of the model
    file: str = ""


def find_head(model: Model) -> DraftHead | None:
    """The bundled draft head of exactly this model file, if there is one."""
    path = BUNDLED_HEADS / f"{model.source.digest[:16]}.gguf"
    return read_head(path, model.spec) if path.exists() else None


def read_head(path: str | Path, spec: ModelSpec) -> DraftHead:
    """Read a draft head and check every shape, scale and token id against the model."""
    source = read_gguf(path)
    file = str(path)
    if source.metadata.get("general.architecture") != ARCHITECTURE:
        raise ModelError(f"not a draft head: general.architecture is not {ARCHITECTURE}", file=file)
    missing = [name for name in ("up", "down", *SCALES) if name not in source.tensors]
    words = source.metadata.get("draft.words")
    if missing or not isinstance(words, list) or not words:
        raise ModelError(
            f"the draft head is without {', '.join(missing) or 'draft.words'}", file=file
        )
    hidden, vocab = spec.hidden, spec.vocab
    up, down = source.tensors["up"], source.tensors["down"]
    inner = down.shape[-1]
    if (
        up.shape != (2 * inner, 2 * hidden)
        or down.shape != (hidden, inner)
        or hidden % 32
        or inner % 32
    ):
        raise ModelError(
            f"draft head for states of {up.shape[-1] // 2} values; the model's have {hidden}",
            file=file,
        )
    for matrix in (up, down):
        if (block := broken_block(matrix)) is not None:
            raise ModelError(
                f"tensor {matrix.name}: block {block} has a scale that is not a finite number; the "
                "file is damaged: download it again, or do not speculate with a draft head",
                file=file,
            )
    scales = {
        name: np.ascontiguousarray(source.tensors[name].to_f32().reshape(-1), np.float32)
        for name in SCALES
    }
    if any(s.size != hidden or not np.isfinite(s).all() for s in scales.values()):
        raise ModelError(
            "a scale of the draft head has the wrong size or is not a finite number", file=file
        )
    if any(type(w) is not int for w in words):
        raise ModelError("draft.words must be ids of tokens", file=file)
    if min(words) < 0 or max(words) >= vocab:
        raise ModelError(f"draft.words holds token ids outside the model's {vocab}", file=file)
    return DraftHead(up, down, **scales, words=np.array(words, np.int32), file=file)


def write_head(
    path: str | Path, arrays: dict[str, np.ndarray], type: str = "q4_0", **about: Any
) -> None:
    """Write a draft head as GGUF.

    `arrays`: up, down, the four scales and words, as trained. `about`: further metadata, such as
    the training data."""
    from verbatim.files.gguf_write import write_gguf
    from verbatim.formats.conversion import quantise

    tensors = [
        Tensor(n, type, arrays[n].shape, quantise(type, arrays[n].astype(np.float32)).reshape(-1))
        for n in ("up", "down")
    ]
    tensors += [
        Tensor(n, "f32", arrays[n].shape, arrays[n].astype("<f4").view(np.uint8).reshape(-1))
        for n in SCALES
    ]
    metadata = {
        "general.architecture": ARCHITECTURE,
        "draft.words": [int(i) for i in arrays["words"]],
        **about,
    }
    write_gguf(path, metadata, tensors)
