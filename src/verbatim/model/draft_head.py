"""Draft heads: a small net that guesses the tokens after the next one from the state that the next one was drawn from.

In: a GGUF file of some million weights, trained on what its model writes (bench/train_head.py). Out: DraftHead, checked against the model.
One guess, for a final state h (after the last norm) and the token t that was drawn from it:

    x  = [ h * state_scale ; rms(embed[t]) * word_scale ]
    z  = h * keep + down @ ( silu(gate @ x) * (up @ x) )          gate and up are the two halves of `up`
    h' = rms(z) * out
    p  = softmax( head[words] @ h' )                              the model's own head, of the words that the net knows; rounded where that is quicker

The most likely word is the guess and p its odds; h' and that word give the next guess. A wrong guess costs time and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.model.load import Model
from verbatim.weights.gguf import read_gguf
from verbatim.weights.quant import broken_block
from verbatim.weights.tensor import Tensor

ARCHITECTURE = "verbatim-draft-head"
SCALES = ("state_scale", "word_scale", "keep", "out")
EPS = np.float32(1e-6)
COLD = 0.05  # below this a text is as good as greedy, and the odds are those of temperature 0: divided by so little, every guess would seem sure
SHIPPED = (
    Path(__file__).parent / "heads"
)  # named by the digest of the file that they were trained for


@dataclass(frozen=True, slots=True)
class DraftHead:
    up: Tensor  # [2 * inner, 2 * hidden]
    down: Tensor  # [hidden, inner]
    state_scale: np.ndarray
    word_scale: np.ndarray
    keep: np.ndarray
    out: np.ndarray
    words: np.ndarray  # int32: the ids it may guess, rising
    file: str = ""


def find_head(model: Model) -> DraftHead | None:
    """The head that comes with the engine for exactly this file, if there is one."""
    path = SHIPPED / f"{model.source.digest[:16]}.gguf"
    return read_head(path, model) if path.exists() else None


def read_head(path: str | Path, model: Model) -> DraftHead:
    source = read_gguf(path)
    file = str(path)
    if source.metadata.get("general.architecture") != ARCHITECTURE:
        raise ModelError(
            f"this is no draft head (general.architecture is not {ARCHITECTURE})", file=file
        )
    missing = [name for name in ("up", "down", *SCALES) if name not in source.tensors]
    words = source.metadata.get("draft.words")
    if missing or not isinstance(words, list) or not words:
        raise ModelError(f"a draft head without {', '.join(missing) or 'draft.words'}", file=file)
    hidden, vocab = model.spec.hidden, model.spec.vocab
    up, down = source.tensors["up"], source.tensors["down"]
    inner = down.shape[-1]
    if (
        up.shape != (2 * inner, 2 * hidden)
        or down.shape != (hidden, inner)
        or hidden % 32
        or inner % 32
    ):
        raise ModelError(
            f"a draft head for states of {up.shape[-1] // 2}, and the model's are of {hidden}",
            file=file,
        )
    for matrix in (up, down):
        if (block := broken_block(matrix)) is not None:
            raise ModelError(
                f"tensor {matrix.name}: block {block} has a scale that is not a finite number; the file is damaged: get it again, or "
                "leave the draft head out (speculate without head)",
                file=file,
            )
    scales = {
        name: np.ascontiguousarray(source.tensors[name].to_f32().reshape(-1), np.float32)
        for name in SCALES
    }
    if any(s.size != hidden or not np.isfinite(s).all() for s in scales.values()):
        raise ModelError(
            "a scale of the draft head does not fit, or is not a finite number", file=file
        )
    if any(type(w) is not int for w in words):
        raise ModelError("the words of a draft head must be ids", file=file)
    if min(words) < 0 or max(words) >= vocab:
        raise ModelError(f"the draft head knows words outside the model's {vocab}", file=file)
    return DraftHead(up, down, **scales, words=np.array(words, np.int32), file=file)


def write_head(
    path: str | Path, arrays: dict[str, np.ndarray], type: str = "q4_0", **about: Any
) -> None:
    """`arrays`: up, down, the four scales and words, as trained. `about`: further metadata (what it was trained on)."""
    from verbatim.weights.gguf_write import write_gguf
    from verbatim.weights.quantise import quantise

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


def guess(
    head: DraftHead,
    model: Model,
    state: np.ndarray,
    token: int,
    count: int,
    temperature: float = 0.0,
) -> tuple[list[int], list[float]]:
    """The definition, in plain floats: `count` guesses after `token`, and the odds that each and all before it come true. Slow; for tests."""
    up, down = head.up.to_f32(), head.down.to_f32()
    embed = model.weights["embed"].to_f32()
    scores = (embed if model.spec.tied else model.weights["head"].to_f32())[head.words]
    h, odds, tokens, chances = state.astype(np.float32), 1.0, [], []
    for _ in range(count):
        x = np.concatenate([h * head.state_scale, _rms(embed[token]) * head.word_scale])
        gate, value = np.split(up @ x, 2)
        h = _rms(h * head.keep + down @ (gate / (1 + np.exp(-gate)) * value)) * head.out
        logits = (scores @ h) / np.float32(temperature if temperature > COLD else 1.0)
        best = int(np.argmax(logits))
        odds /= float(np.exp(logits - logits[best]).sum())
        token = int(head.words[best])
        tokens.append(token)
        chances.append(odds)
    return tokens, chances


def _rms(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt(np.mean(x * x) + EPS), np.float32)
