"""Public fakes for tests: an engine without a model.

FakeBackend's "keys and values" are one number per position: a hash of all tokens up to it. It is
computed from the number found in the cache at the position before, so a wrong block, a missing copy
or a stale table changes every later token. With `canary` every visible cache slot is verified at
every read: each slot records its position and token.

    llm = LLM.from_loaded(fake_parts(), kv_blocks=64)
    llm.generate("hello", SamplingParams(max_tokens=8, seed=1))
"""

from __future__ import annotations

import itertools
import time
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from verbatim.backend.protocol import BackendInfo
from verbatim.base.config import BLOCK_SIZE
from verbatim.base.records import (
    BROKEN,
    Drawn,
    SeqResult,
    SeqStep,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from verbatim.engine.loaded_model import AdapterInfo, LoadedModel
from verbatim.model.embedding import EmbeddingSpec
from verbatim.model.spec import DiffusionSpec, LayerSpec, ModelSpec
from verbatim.testing.launcher import FakeLauncher

_MASK = (1 << 64) - 1
MOST_VERIFIED = 1024  # sequences whose verified slots are remembered
_NAN = -1  # the number of a position whose values are NaN


@lru_cache(maxsize=1 << 16)  # every step verifies all positions of the cache again
def mix(a: int, b: int) -> int:
    """A 64-bit hash of two numbers (the finaliser of splitmix64)."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0xD1B54A32D192ED03) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def fake_spec(
    vocab: int = 260,
    context: int = 4096,
    windows: Sequence[int | None] = (None,),
    diffusion: DiffusionSpec | None = None,
) -> ModelSpec:
    """A minimal architecture with one layer per window."""
    layers = tuple(LayerSpec(window=w) for w in windows)
    return ModelSpec(
        "fake",
        vocab,
        hidden=8,
        heads=1,
        kv_heads=1,
        head_dim=8,
        mlp=8,
        context=context,
        layers=layers,
        diffusion=diffusion,
    )


class CanaryError(AssertionError):
    """The cache does not hold what the block table says."""


Slot: TypeAlias = tuple[int, int, int] | None  # position, token, number


class _Blocks(dict[int, list[Slot]]):
    """A fake KV cache: block -> its slots. A block is made
    at its first use: most tests open an engine with thousands of blocks and use a few."""

    def __init__(self, blocks: int, block_size: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.block_size = block_size

    def __missing__(self, block: int) -> list[Slot]:
        if not 0 <= block < self.blocks:
            raise CanaryError(f"block {block} is not one of the {self.blocks} of the cache")
        self[block] = [None] * self.block_size
        return self[block]


class FakeBackend:
    """A backend that hashes tokens instead of running a model.

    pipeline  True: draw with the real sampler from hashed logits. False: the token itself is a
              hash, which is much faster; only withheld ids and `beam` affect it
    canary    verify every visible cache slot at every read
    known     returns a sequence's tokens, for the strictest check of the canary
    broken    a token whose values are NaN, as are those of every position behind it
    overlap   launch steps ahead (testing_launcher.py), and overwrite the KV slot behind every
              drawn token, as a discarded launch does
    """

    def __init__(
        self,
        spec: ModelSpec | None = None,
        *,
        block_size: int = BLOCK_SIZE,
        pipeline: bool = True,
        canary: bool = False,
        known: Callable[[int], Sequence[int]] | None = None,
        broken: int | None = None,
        overlap: bool = False,
    ) -> None:
        self.spec = spec or fake_spec()
        self.overlap = overlap
        self.block_size = block_size
        self.pipeline = pipeline
        self.canary = canary
        self.known = known
        self.broken = broken
        self.slots: list[_Blocks] = []  # one per group
        self._verified: dict[tuple[int, int, int], list[Slot]] = {}  # sequence -> its slots
        self.steps = 0
        self.rows = 0
        self.closed = False
        self._salts = np.arange(self.spec.vocab, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    @property
    def info(self) -> BackendInfo:
        return BackendInfo("fake", "hash", 1, "fake-1", weight_bytes=0, kv_token_bytes=16)

    def draft_layer(self, model: object) -> None:
        return None

    @property
    def launcher(self) -> FakeLauncher | None:
        return FakeLauncher(self._sequence) if self.overlap else None

    def available_memory(self) -> None:
        return None  # the fake KV cache is in main memory

    def block_bytes(self) -> tuple[int, ...]:
        return tuple(16 * self.block_size * len(g.layers) for g in self.spec.groups)

    def allocate(self, blocks: tuple[int, ...]) -> None:
        self.slots = [_Blocks(n, self.block_size) for n in blocks]

    def read_block(self, group: int, block: int) -> bytes:
        return repr(self.slots[group][block]).encode()

    def write_block(self, group: int, block: int, data: bytes) -> None:
        self.slots[group][block] = literal_eval(data.decode())

    def close(self) -> None:
        self.closed = True

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        self.rows += plan.rows
        for group, source, target in plan.copies:
            self.slots[group][target] = list(self.slots[group][source])
        return StepResult(plan.step, tuple([self._sequence(step) for step in plan.sequences]))

    def _sequence(self, step: SeqStep) -> SeqResult:
        if self.canary:
            self._verify(step)
        number = self._read(step, 0, step.start - 1)[2] if step.start else _first(step)
        numbers = []
        for position, token in enumerate(step.tokens, step.start):
            number = self._next(number, token)
            numbers.append(number)
            for table, slots in zip(step.blocks, self.slots, strict=True):
                slots[table[position // self.block_size]][position % self.block_size] = (
                    position,
                    token,
                    number,
                )
        scored = tuple(
            self._score(n, t, step.target_top) for n, t in zip(numbers, step.targets, strict=False)
        )
        hidden = np.array([self._hidden(n) for n in numbers], np.float32) if step.hidden else None
        rows = step.picks or range(len(numbers) - step.draws, len(numbers))
        seen = numbers if step.block == 1 else self._seen(step, numbers)
        drawn = self._draw(step, [seen[row] for row in rows]) if step.draws else ()
        behind = step.end // self.block_size
        if self.overlap and step.draws and all(behind < len(table) for table in step.blocks):
            for table, slots in zip(step.blocks, self.slots, strict=True):
                slots[table[behind]][step.end % self.block_size] = (step.end, -1, 0)
        return SeqResult(step.seq_id, drawn, scored, hidden)

    def _seen(self, step: SeqStep, numbers: list[int]) -> list[int]:
        """Per row a number of all tokens up to the end of its block, and of the position."""
        ends = [
            at + 1 if at < step.causal else min((at // step.block + 1) * step.block, step.end)
            for at in range(step.start, step.end)
        ]
        seen = [numbers[end - 1 - step.start] for end in ends]
        return [n if n == _NAN else mix(n, step.start + i) for i, n in enumerate(seen)]

    # ------------------------------------------------------------------------------------ the cache

    def _read(self, step: SeqStep, group: int, position: int) -> tuple[int, int, int]:
        block = step.blocks[group][position // self.block_size]
        slot = None if block < 0 else self.slots[group][block][position % self.block_size]
        if slot is None or slot[0] != position:
            raise CanaryError(
                f"sequence {step.seq_id}: position {position} of group {group} reads {slot} "
                f"from block {block}"
            )
        return slot

    def _verify(self, step: SeqStep) -> None:
        """Slots equal to those of the sequence's last step were verified then: no hash again."""
        known = self.known(step.seq_id) if self.known else None
        for group, layers in enumerate(self.spec.groups):
            first = 0 if layers.window is None else max(step.start - layers.window + 1, 0)
            before: int | None = _first(step) if first == 0 else None
            key, done = (step.seq_id, step.adapter, group), 0
            held: list[Slot] = []
            if first == 0:
                for block in step.blocks[group][: -(-step.start // self.block_size)]:
                    held += self.slots[group][block]
                seen = self._verified.pop(key, [])[: step.start]
                if seen and held[: len(seen)] == seen and (last := seen[-1]) is not None:
                    done, before = len(seen), last[2]
            tokens = [slot[1] for slot in held[:done] if slot is not None]
            wrong = known is not None and tokens != list(known[:done])
            for position in range(max(first, done), step.start):
                _, token, number = self._read(step, group, position)
                wrong |= known is not None and token != known[position]
                wrong |= before is not None and number != self._next(before, token)
                before = number
            if wrong:
                raise CanaryError(f"sequence {step.seq_id}: group {group} holds another sequence")
            self._verified[key] = held[: step.start]
            if len(self._verified) > MOST_VERIFIED:
                self._verified.pop(next(iter(self._verified)))

    # ------------------------------------------------------------------------------------ the model

    def _next(self, number: int, token: int) -> int:
        return _NAN if number == _NAN or token == self.broken else mix(number, token)

    def logits(self, number: int) -> np.ndarray:
        """float32 [vocab] in -8 … 8, a function of `number` only."""
        if number == _NAN:
            return np.full(self.spec.vocab, np.nan, np.float32)
        x = self._salts + np.uint64(number)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        unit = (x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return (unit - np.float32(0.5)) * np.float32(16)

    def _hidden(self, number: int) -> list[float]:
        if number == _NAN:
            return [np.nan] * self.spec.hidden
        return [(mix(number, i) >> 40) * 2.0**-24 for i in range(self.spec.hidden)]

    def _score(self, number: int, target: int, top: int) -> TokenLogprob:
        if not self.pipeline and number == _NAN:
            return TokenLogprob(BROKEN, 0.0)
        if not self.pipeline:
            return TokenLogprob(target, -(mix(number, target) >> 40) * 2.0**-20)
        from verbatim.sampling.logprobs import score_targets

        return score_targets(self.logits(number)[None], [target], top)[0]

    def _draw(self, step: SeqStep, numbers: Sequence[int]) -> tuple[Drawn, ...]:
        if self.pipeline:
            from verbatim.sampling.pipeline import rows_of, sample_rows

            return tuple(sample_rows(np.stack([self.logits(n) for n in numbers]), rows_of(step)))
        spec = step.draw
        assert spec is not None
        rows = step.picks or range(len(step.tokens) - step.draws, len(step.tokens))
        first = step.start + 1 + step.shift
        return tuple(
            [
                self._hash_draw(n, spec.key, first + row, spec.withheld, spec.beam)
                for n, row in zip(numbers, rows, strict=True)
            ]
        )

    def _hash_draw(
        self, number: int, key: int, position: int, withheld: Iterable[int], beam: int
    ) -> Drawn:
        if number == _NAN:
            return Drawn(BROKEN, 0.0)
        seed = mix(mix(number, key), position)
        token = seed % self.spec.vocab
        while token in withheld:
            token = (token + 1) % self.spec.vocab

        def logprob(token: int) -> float:
            return -(mix(number, token) >> 40) * 2.0**-20

        ids = range(self.spec.vocab) if beam else ()
        best = sorted(ids, key=logprob, reverse=True)[:beam]  # stable: ties to the lower id
        return Drawn(token, logprob(token), candidates=tuple((t, logprob(t)) for t in best))


def _first(step: SeqStep) -> int:
    """The number before the first token: each adapter has another."""
    return step.adapter + 2


class ByteTokenizer:
    """One token per byte, and four control tokens: "hi" is [104, 105]."""

    BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259
    NAMES: tuple[str, ...] = ("<s>", "</s>", "<|user|>", "<|assistant|>")

    vocab_size = 260
    bos_id: int | None = BOS
    eos_ids: tuple[int, ...] = (EOS,)
    special_tokens: Mapping[str, str] = MappingProxyType(
        {"bos_token": NAMES[0], "eos_token": NAMES[1]}
    )
    space_prefix = False

    def __init__(self) -> None:
        self.control_tokens = {name: 256 + i for i, name in enumerate(self.NAMES)}

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        if not special:
            return list(text.encode())
        out: list[int] = []
        while text:
            name = next((n for n in self.NAMES if text.startswith(n)), None)
            out += [self.control_tokens[name]] if name else text[0].encode()
            text = text[len(name) if name else 1 :]
        return out

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        ids = self.encode(text, special=special)
        return ids if ids[:1] == [self.BOS] else [self.BOS, *ids]

    def truncated(self, ids: list[int], limit: int) -> list[int]:
        return ids[:limit]

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.NAMES[token - 256].encode()

    def is_control(self, token: int) -> bool:
        return token >= 256

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return b"".join(
            self.token_bytes(t) for t in ids if not (skip_special and self.is_control(t))
        ).decode(errors="replace")


def fake_parts(backend: Any = None, **options: Any) -> LoadedModel:
    """Parts for LLM.from_loaded and AsyncEngine.from_loaded without a model. `options` are those of
    FakeBackend."""
    backend = backend or FakeBackend(**options)
    return LoadedModel(
        backend,
        ByteTokenizer(),
        eos_ids=(ByteTokenizer.EOS,),
        name="fake",
        digest="fake",
        embedding=EmbeddingSpec("mean"),
    )


# -------------------------------------------------------------------------- for tests of the server

CHAT_SOURCE = (
    "{% for m in messages %}{{ '<|user|>' if m.role != 'assistant' else '<|assistant|>' }}"
    "{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class PacedBackend(FakeBackend):
    """A FakeBackend whose steps take `pause` seconds. `gate` names a file that contains the number
    of steps that may run; a test advances the engine by writing a larger number."""

    def __init__(
        self, *args: Any, pause: float = 0.0, gate: str | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.pause = pause
        self._gate_file = gate
        self._gated_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        if self.pause:
            time.sleep(self.pause)
        if self._gate_file is not None:
            self._gated_steps += 1
            while int(Path(self._gate_file).read_text() or 0) < self._gated_steps:
                time.sleep(0.005)
        return super().execute(plan)


class ChatByteTokenizer(ByteTokenizer):
    """A ByteTokenizer that works with a ChatTemplate."""

    def __init__(self) -> None:
        from verbatim.text.control_tokens import ControlFinder

        super().__init__()
        self.finder = ControlFinder(self.control_tokens)

    def split_control(self, text: str) -> list[tuple[str, int | None]]:
        return self.finder.split(text)

    def encode_parts(self, parts: Iterable[tuple[str, int | None]]) -> list[int]:
        return [
            t
            for text, control in parts
            for t in ([control] if control is not None else self.encode(text))
        ]


class PairByteTokenizer(ChatByteTokenizer):
    """Bytes, for a fake cross-encoder: BOS query EOS document EOS."""

    def encode_pair(self, first: str, second: str, limit: int | None = None) -> list[int]:
        ids = [self.BOS, *first.encode(), self.EOS, *second.encode()]
        return [*(ids if limit is None else ids[: limit - 1]), self.EOS]


class ThinkByteTokenizer(ChatByteTokenizer):
    """Bytes, and the tags of a reasoning model as control tokens."""

    OPEN, CLOSE = 260, 261
    NAMES = (*ByteTokenizer.NAMES, "<think>", "</think>")
    vocab_size = 262


# A template like Qwen3's: the model opens its reasoning itself, and a switch closes it at once.
THINK_SOURCE = (
    "{% for m in messages %}{{ '<|user|>' if m.role != 'assistant' else '<|assistant|>' }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% else %}<think>{% endif %}"
)


def server_parts(options: str) -> LoadedModel:
    """Parts for `verbatim serve --test-engine OPTIONS`: "pipeline" (the real sampler) or "hash",
    then pause=SECONDS, gate=FILE, context=TOKENS, think=yes (a reasoning model), rank=yes (a
    cross-encoder), adapters=A+B (LoRA adapters of these names), broken=TOKEN (of FakeBackend),
    diffusion=LENGTH (a diffusion model with blocks of this length)."""
    from verbatim.engine import request
    from verbatim.text.templates.chat_template import ChatTemplate

    request.new_seed = itertools.count(1).__next__  # as to_params.count_seeds()
    kind, *pairs = options.split(",")
    values = dict(pair.split("=", 1) for pair in pairs)
    reasoning, ranks = "think" in values, "rank" in values
    kinds = {(True, False): ThinkByteTokenizer, (False, True): PairByteTokenizer}
    tokenizer = kinds.get((reasoning, ranks), ChatByteTokenizer)()
    context = int(values.get("context", 4096))
    length = int(values.get("diffusion", 0))
    diffusion = DiffusionSpec(mask=ByteTokenizer.ASSISTANT, block=length) if length else None
    spec = fake_spec(vocab=tokenizer.vocab_size, context=context, diffusion=diffusion)
    backend = PacedBackend(
        spec,
        pipeline=kind == "pipeline",
        pause=float(values.get("pause", 0)),
        gate=values.get("gate"),
        broken=int(values["broken"]) if "broken" in values else None,
    )
    template = ChatTemplate(THINK_SOURCE if reasoning else CHAT_SOURCE, "<s>", "</s>")
    adapters = values["adapters"].split("+") if "adapters" in values else ()
    parts = replace(
        fake_parts(backend),
        tokenizer=tokenizer,
        template=template,
        adapters=tuple(AdapterInfo(name, f"fake {name}", 4) for name in adapters),
    )
    if not ranks:
        return parts
    return replace(parts, template=None, embedding=EmbeddingSpec("last"), task="rerank")
