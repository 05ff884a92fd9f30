"""EncoderBackend: bidirectional encoders (BERT, RoBERTa, Nomic) in NumPy, in float32.

In: a StepPlan whose sequences are whole texts. Out: the final hidden state of every token; for a
cross-encoder, one row with the relevance score. There is no KV cache and no draw.

Invariant: a text's bits depend on that text alone. Texts are computed one after another, without
padding, and every product has the shape of one text.
"""

from __future__ import annotations

import math

import numpy as np

from verbatim.backend.protocol import BackendInfo
from verbatim.backend.reference.blas import one_thread
from verbatim.backend.reference.ops import activate, sigmoid, softmax
from verbatim.base.config import BLOCK_SIZE, SETTINGS, EngineConfig
from verbatim.base.errors import BackendError, ParameterError
from verbatim.base.records import SeqResult, StepPlan, StepResult
from verbatim.encoder.encoder_spec import EncoderModel, EncoderSpec

NUMERICS_VERSION = "encoder-1"
Array = np.ndarray
F32 = np.float32


def encoder_config(config: EngineConfig, context: int) -> EngineConfig:
    """The engine's settings for an encoder: one whole text per step, and no cache memory."""
    from dataclasses import replace

    for name, rule in SETTINGS.items():
        if not rule.encoders and getattr(config, name) != rule.default:
            raise ParameterError(name, "has no effect on an encoder; leave it out")
    blocks = -(-context // BLOCK_SIZE)
    config = replace(config, step_tokens=context, max_running=1, kv_blocks=blocks)
    return replace(config, prefix_cache=False, speculate="off")


class EncoderBackend:
    """`separator`: in a cross-encoder, tokens behind the first of this id have token type 1."""

    def __init__(
        self, model: EncoderModel, config: EngineConfig, separator: int | None = None
    ) -> None:
        if config.backend == "cuda":
            raise BackendError(
                "the cuda backend runs no encoders; use the backend auto, cpu or reference"
            )
        self.spec = model.spec.as_model_spec()
        self.block_size = BLOCK_SIZE
        self.launcher = None
        self._model = model
        self._separator = separator

    def draft_layer(self, model: object) -> None:
        return None

    @property
    def info(self) -> BackendInfo:
        size = sum(int(w.nbytes) for w in self._model.weights.values())
        detail = f"numpy {np.__version__}, float32 encoder"
        return BackendInfo("reference", detail, 1, NUMERICS_VERSION, size, 0)

    def available_memory(self) -> None:
        return None

    def block_bytes(self) -> tuple[int, ...]:
        return (0,)

    def allocate(self, blocks: tuple[int, ...]) -> None:
        """An encoder keeps no keys and values."""

    def read_block(self, group: int, block: int) -> bytes:
        raise NotImplementedError("an encoder has no KV cache")

    def write_block(self, group: int, block: int, data: bytes) -> None:
        raise NotImplementedError("an encoder has no KV cache")

    def execute(self, plan: StepPlan) -> StepResult:
        spec, weights = self._model.spec, self._model.weights
        results = []
        for step in plan.sequences:
            assert step.start == 0, "a step has one whole text"
            assert step.hidden, "an encoder draws no token"
            tokens = np.array(step.tokens)
            with one_thread(), np.errstate(over="ignore", under="ignore", invalid="ignore"):
                states = encode(spec, weights, tokens, self._types(tokens))
                if spec.scores:
                    states = score(spec, weights, states)
            results.append(SeqResult(step.seq_id, hidden=states))
        return StepResult(plan.step, tuple(results))

    def _types(self, tokens: Array) -> Array:
        """Token types [tokens]: 1 behind the first separator of a pair, else 0."""
        if self._separator is None:
            return np.zeros_like(tokens)
        seen = np.cumsum(tokens == self._separator)
        return np.concatenate([[0], np.minimum(seen[:-1], 1)])

    def close(self) -> None:
        self._model.weights.clear()


# ------------------------------------------------------------------------------------ forward pass


def encode(spec: EncoderSpec, weights: dict[str, Array], tokens: Array, types: Array) -> Array:
    """Final hidden states [tokens, hidden] of one text."""
    x = weights["embed"][tokens]
    if spec.types:
        x = x + weights["types"][types]
    if spec.positions:
        first = spec.first_position
        x = x + weights["positions"][first : first + len(tokens)]
    x = layer_norm(spec, weights, "embed_norm", x)
    angles = rotary_angles(spec, len(tokens)) if spec.rope_theta else None
    for i in range(spec.layers):
        layer = f"layers.{i}."
        mixed = attend(spec, weights, layer, x, angles)
        x = layer_norm(spec, weights, layer + "attn_norm", x + mixed)
        x = layer_norm(spec, weights, layer + "mlp_norm", x + mlp(spec, weights, layer, x))
    return x


def score(spec: EncoderSpec, weights: dict[str, Array], states: Array) -> Array:
    """Relevance [1, 1] from the first state of a pair."""
    inner = np.tanh(linear(weights, "score.dense", states[:1]))
    logit = linear(weights, "score.out", inner)
    return sigmoid(logit) if spec.score_activation == "sigmoid" else logit


def linear(weights: dict[str, Array], name: str, x: Array) -> Array:
    y: Array = x @ weights[name].T
    bias = weights.get(name + ".bias")
    return y if bias is None else y + bias


def layer_norm(spec: EncoderSpec, weights: dict[str, Array], name: str, x: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    unit = centred / np.sqrt(variance + F32(spec.norm_eps))
    y: Array = unit * weights[name] + weights[name + ".bias"]
    return y


def attend(
    spec: EncoderSpec,
    weights: dict[str, Array],
    layer: str,
    x: Array,
    angles: tuple[Array, Array] | None,
) -> Array:
    """Attention of every token to every token of the text."""
    q, k, v = (heads_of(spec, linear(weights, layer + name, x)) for name in "qkv")
    if angles is not None:
        q, k = rotate(q, *angles), rotate(k, *angles)
    scores = np.matmul(q, k.transpose(0, 2, 1)) * F32(1.0 / math.sqrt(spec.head_dim))
    mixed = np.matmul(softmax(scores), v)  # [heads, tokens, head_dim]
    joined = mixed.transpose(1, 0, 2).reshape(len(x), -1)
    return linear(weights, layer + "o", joined)


def heads_of(spec: EncoderSpec, x: Array) -> Array:
    """[tokens, heads * head_dim] -> [heads, tokens, head_dim]"""
    return np.ascontiguousarray(x.reshape(len(x), spec.heads, spec.head_dim).transpose(1, 0, 2))


def rotary_angles(spec: EncoderSpec, tokens: int) -> tuple[Array, Array]:
    """Cosines and sines [tokens, head_dim / 2]."""
    pairs = np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim
    frequencies = (1.0 / spec.rope_theta**pairs).astype(F32)
    angles = np.arange(tokens, dtype=F32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs (j, j + head_dim / 2)."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def mlp(spec: EncoderSpec, weights: dict[str, Array], layer: str, x: Array) -> Array:
    up = linear(weights, layer + "up", x)
    if spec.gated:
        inner = activation(linear(weights, layer + "gate", x), spec.activation) * up
    else:
        inner = activation(up, spec.activation)
    return linear(weights, layer + "down", inner)


def activation(x: Array, kind: str) -> Array:
    y: Array
    if kind == "relu":
        y = np.maximum(x, F32(0))
    elif kind == "gelu":
        y = F32(0.5) * x * (F32(1) + erf(x * F32(math.sqrt(0.5))))
    else:
        y = activate(x, kind)
    return y


_ERF_STEPS = 256  # table entries per unit; cubic interpolation is then exact to 1e-11
_ERF_AT = np.arange(6 * _ERF_STEPS + 2) / _ERF_STEPS
_ERF = np.array([math.erf(x) for x in _ERF_AT])
_ERF_SLOPE = 2 / math.sqrt(math.pi) * np.exp(-_ERF_AT * _ERF_AT) / _ERF_STEPS  # per table entry


def erf(x: Array) -> Array:
    """The error function in float32, by cubic Hermite interpolation of a table in float64. NumPy
    has none, and a call of math.erf per element takes as long as the matrix products."""
    at = np.minimum(np.abs(x.astype(np.float64)), 6.0) * _ERF_STEPS
    at = np.where(np.isnan(at), 0.0, at)
    i = at.astype(np.int64)
    t = at - i
    low, high, slope, next_slope = _ERF[i], _ERF[i + 1], _ERF_SLOPE[i], _ERF_SLOPE[i + 1]
    rise = high - low
    inner = 3 * rise - 2 * slope - next_slope + t * (slope + next_slope - 2 * rise)
    found = low + t * (slope + t * inner)
    signed: Array = np.copysign(found, x).astype(F32)
    return signed
