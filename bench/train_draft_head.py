"""Train an EAGLE-3 head (docs/speculation.md) for a Llama or Qwen2 model, on its own texts.

    python bench/train_draft_head.py --out FOLDER [--model smollm2] [--conversations 24576]
                                     [--mlp 1024] [--words 6144] [--seconds 150]
    python bench/train_draft_head.py --out FOLDER --device cpu --conversations 6 --length 24 \\
        --question 8 --rows 2 --mlp 64 --words 512 --steps 3 --prompts 1  # smoke test

A head drafts for one model, so no corpus is needed: the model continues its template's user header
and one of OPENINGS (temperature 1), then answers what it wrote, one half greedily and one half at
temperature 0.8. All sequences are at the same position in every step, so no batch is padded, and
the states of the chosen layers are kept as they are computed. The head learns the model's
distribution over the draft vocabulary, in three consecutive drafts that read its own states
(training-time test, arXiv 2503.01840), and in the last 40 % of the time with its matrices rounded
to q4_0, as the engine loads them.

Out: FOLDER/model.safetensors and config.json as vllm-project/speculators writes them. The last line
is JSON: the acceptance of chains of five drafts (each fed from the last) over all positions, and
tokens per pass with quartiles over the texts, on held-out answers and on greedy answers to the
prompts of bench/prompts.py, which the head is not trained on.
Needs torch, and a GPU for more than a smoke test.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prompts import CHAT, CODE, COPY
from torch.nn import functional as F

from verbatim.engine.loading.model_info import read_text
from verbatim.hub.catalog import resolve
from verbatim.model.loading.load import Model, load_model

DEPTH, DECAY = 3, 0.8  # drafts that are trained, and the weight of each relative to the one before
EVALUATED = 5  # drafts whose acceptance is reported
ROUNDED = 0.6  # part of the training after which the matrices are rounded
HELD_OUT = 0.02  # part of the answers
QUESTION, ANSWER, DONE = 0, 1, 2  # what a row of a batch writes
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
SETS = {"chat": CHAT, "code": CODE, "copy": COPY}
# Beginnings of questions, used in turn: two in three ask for code.
OPENINGS = (
    *("", "", "", "How do I", "Explain"),
    *("Write a Python function", "Write a Python class", "Implement", "Write a program in C++"),
    *("Write a function in JavaScript", "Write a SQL query", "Write a unit test for"),
    *("Complete this code:\n```python\ndef ", "Fix the bug in this code:\n```", "Refactor this:\n"),
)


# --- the model


class Target:
    """The model in PyTorch, with the engine's weights and rotary frequencies."""

    def __init__(self, model: Model, device: str) -> None:
        spec = self.spec = model.spec
        plain = not (spec.mlp_bias or spec.qk_norm or spec.post_norms)
        plain &= not any(layer.window or layer.experts for layer in spec.layers)
        if spec.family not in ARCHITECTURES or not plain:
            raise SystemExit(f"only Llama and Qwen2 can be trained for; this is {spec.family}")
        self.type = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.device = device
        self.weights = {
            name: torch.from_numpy(np.array(t.to_f32())).to(device, self.type)
            for name, t in model.weights.items()
        }
        rope = spec.layers[0].rope
        assert rope is not None
        self.inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
        self.head = self.weights["embed" if spec.tied else "head"]

    def new_cache(self, rows: int, length: int) -> Any:
        shape = (len(self.spec.layers), 2, rows, self.spec.kv_heads, length, self.spec.head_dim)
        return torch.zeros(shape, dtype=self.type, device=self.device)

    def forward(
        self, ids: Any, start: int = 0, cache: Any = None, captured: Sequence[int] = ()
    ) -> tuple[Any, Any]:
        """The final states [rows, tokens, H] after the norm, and the states of the captured layers,
        side by side. Layer i: its input; behind the last layer: its output."""
        spec, w, found = self.spec, self.weights, []
        x = w["embed"][ids]
        position = torch.arange(start, start + ids.shape[1], device=ids.device)
        for i in range(len(spec.layers)):
            found += [x] if i in captured else []
            name = f"layers.{i}"
            h = rms(x, w[f"{name}.attn_norm"], spec.norm_eps)
            q, k, v = (
                split(
                    F.linear(h, w[f"{name}.attn.{p}"], w.get(f"{name}.attn.{p}.bias")),
                    spec.head_dim,
                )
                for p in "qkv"
            )
            q, k = (rotate(part, position, self.inv_freq) for part in (q, k))
            if cache is not None:
                end = start + ids.shape[1]
                cache[i, 0, :, :, start:end], cache[i, 1, :, :, start:end] = k, v
                k, v = cache[i, 0, :, :, :end], cache[i, 1, :, :, :end]
            causal = ids.shape[1] > 1
            a = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            x = x + a.transpose(1, 2).flatten(2) @ w[f"{name}.attn.o"].T
            h = rms(x, w[f"{name}.mlp_norm"], spec.norm_eps)
            gate, up = (h @ w[f"{name}.mlp.{p}"].T for p in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ w[f"{name}.mlp.down"].T
        found += [x] if len(spec.layers) in captured else []
        states = torch.cat(found, -1) if found else None
        return rms(x, w["final_norm"], spec.norm_eps), states


def rms(x: Any, weight: Any, eps: float) -> Any:
    scaled = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (scaled * weight.float()).to(weight.dtype)


def split(x: Any, head_dim: int) -> Any:
    """[rows, tokens, heads · size] -> [rows, heads, tokens, size]"""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def rotate(x: Any, position: Any, inv_freq: Any) -> Any:
    angles = position[:, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


# --- conversations


@dataclass(frozen=True)
class Template:
    """The ids of a user's header with each opening, those after a user's message, and those that
    end an answer."""

    openings: list[list[int]]
    after: list[int]
    ends: list[int]
    prompts: dict[str, list[list[int]]]  # SETS


def template_of(model: Model, count: int) -> Template:
    words, template = read_text(model.source)
    if template is None:
        raise SystemExit("the model has no chat template, so it cannot talk with itself")

    def rendered(text: str) -> str:
        return template.render([{"role": "user", "content": text}])

    before, _, after = rendered("QUESTION").partition("QUESTION")
    ends = sorted({*model.eos_ids, *words.eos_ids})
    prompts = {
        name: [words.encode(rendered(text), special=True) for text in texts[:count]]
        for name, texts in SETS.items()
    }
    openings = [words.encode(before + text, special=True) for text in OPENINGS]
    return Template(openings, words.encode(after, special=True), ends, prompts)


@dataclass
class Texts:
    """Conversations, and the target's states of all their positions but the last one."""

    ids: Any  # [rows, length], the end token included; zeros behind it
    first: Any  # [rows]: position of the first token of the answer
    last: Any  # [rows]: of its last token
    greedy: Any  # [rows]: written at temperature 0
    states: Any  # [rows, length, captured layers · H]
    final: Any  # [rows, length, H]

    @classmethod
    def empty(cls, target: Target, rows: int, length: int, layers: int) -> Texts:
        device, hidden = target.device, target.spec.hidden
        ids = torch.zeros(rows, length, dtype=torch.long, device=device)
        counts = torch.zeros(rows, dtype=torch.long, device=device)
        states = torch.zeros(rows, length, layers * hidden, dtype=target.type, device=device)
        final = torch.zeros(rows, length, hidden, dtype=target.type, device=device)
        return cls(ids, counts, counts.clone(), counts > 0, states, final)

    def part(self, start: int, rows: int) -> Texts:
        return Texts(*(getattr(self, one.name)[start : start + rows] for one in fields(self)))


@torch.inference_mode()
def write(
    out: Texts, target: Target, template: Template, prompts: Sequence[list[int]], args: Any
) -> None:
    """Continue the prompts: those of half a question with its rest and an answer, others with an
    answer."""
    device, (rows, length), asks = target.device, out.ids.shape, prompts[0] in template.openings
    width = max(map(len, prompts))
    given = torch.zeros(rows, width, dtype=torch.long, device=device)
    sizes = torch.tensor([len(p) for p in prompts], device=device)
    for row, prompt in enumerate(prompts):
        given[row, : len(prompt)] = torch.tensor(prompt, device=device)
    after = torch.tensor(template.after, device=device)
    ends = torch.tensor(template.ends, device=device)
    out.ids[:, 0] = given[:, 0]
    state = torch.full_like(sizes, QUESTION if asks else ANSWER)
    first, last = sizes.clone(), torch.full_like(sizes, length - 1)
    out.greedy[:] = torch.arange(rows, device=device) % 2 == 0 if asks else True
    cache = target.new_cache(rows, length)
    for at in range(1, length):
        final, states = target.forward(out.ids[:, at - 1 : at], at - 1, cache, args.layers)
        out.final[:, at - 1], out.states[:, at - 1] = final[:, 0], states[:, 0]
        # 1e-6: the noise then decides nothing
        heat = torch.where(state == QUESTION, 1.0, torch.where(out.greedy, 1e-6, 0.8))
        logits = (final[:, 0] @ target.head.T).float().div_(heat[:, None])
        token = logits.sub_(torch.empty_like(logits).exponential_().log_()).argmax(-1)
        stops = torch.isin(token, ends) & (at >= sizes)
        turned = (state == QUESTION) & (at > sizes)
        turned &= stops | (at - sizes >= args.question)
        first = torch.where(turned, at + len(after), first)
        state = torch.where(turned, ANSWER, state)
        offset = at - (first - len(after))  # into `after`
        token = torch.where(
            (state == ANSWER) & (at < first) & (at >= sizes),
            after[offset.clamp(0, len(after) - 1)],
            token,
        )
        forced = at < sizes
        token = torch.where(forced, given[:, min(at, width - 1)], token)
        ended = (state == ANSWER) & (at >= first) & ~forced & torch.isin(token, ends)
        out.ids[:, at] = torch.where(state == DONE, 0, token)
        last = torch.where(ended, at, last)
        state = torch.where(ended, DONE, state)
        if bool((state == DONE).all()):
            break
    out.first[:], out.last[:] = first, last


def conversations(target: Target, template: Template, args: Any) -> Texts:
    """What the model writes with itself."""
    count, began = args.conversations, time.monotonic()
    width = max(map(len, template.openings)) + args.question + len(template.after)
    texts = Texts.empty(target, count, width + args.length, len(args.layers))
    for at in range(0, count, args.batch):
        part = texts.part(at, args.batch)
        openings = [template.openings[i % len(OPENINGS)] for i in range(len(part.ids))]
        write(part, target, template, openings, args)
        print(f"{at + len(part.ids)} texts, {time.monotonic() - began:.0f} s", flush=True)
    return texts


# --- the head


class Head:
    """The EAGLE-3 layer, its weights under their published names."""

    def __init__(self, target: Target, words: Any, states: Any, captured: Any, args: Any) -> None:
        spec, device = target.spec, target.device
        self.target, self.words, self.captured = target, words, list(captured)
        self.heads, self.kv_heads, self.mlp = spec.heads, spec.kv_heads, args.mlp
        hidden, dim, count = spec.hidden, spec.head_dim, len(self.captured)

        def noise(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, device=device) / columns**0.5

        # Every layer's states reach the sum with the same size; the last layer's, unchanged.
        size = states.float().unflatten(-1, (count, hidden)).square().mean((0, 1, 3)).sqrt()
        fc = noise(hidden, count * hidden).unflatten(1, (count, hidden)) * 0.3
        fc[:, -1] += torch.eye(hidden, device=device)
        fc = (fc / size[:, None].to(device)).flatten(1)
        ones = torch.ones(hidden, device=device)
        layer, width = "layers.0", self.heads * dim
        self.weights = {
            "fc.weight": fc,
            f"{layer}.hidden_norm.weight": ones.clone(),
            f"{layer}.input_layernorm.weight": ones.clone(),
            f"{layer}.self_attn.q_proj.weight": noise(width, 2 * hidden),
            f"{layer}.self_attn.k_proj.weight": noise(self.kv_heads * dim, 2 * hidden),
            f"{layer}.self_attn.v_proj.weight": noise(self.kv_heads * dim, 2 * hidden),
            f"{layer}.self_attn.o_proj.weight": noise(hidden, width) * 0.3,
            f"{layer}.post_attention_layernorm.weight": ones.clone(),
            f"{layer}.mlp.gate_proj.weight": noise(self.mlp, hidden),
            f"{layer}.mlp.up_proj.weight": noise(self.mlp, hidden),
            f"{layer}.mlp.down_proj.weight": noise(hidden, self.mlp) * 0.3,
            "norm.weight": target.weights["final_norm"].float().clone(),
            "lm_head.weight": target.head[words].float().clone(),
        }
        for weight in self.weights.values():
            weight.requires_grad_()

    def chains(
        self, states: Any, ids: Any, depth: int, *, own: bool, round_it: bool
    ) -> Iterator[Any]:
        """Logits of the drafts of every position, [rows, tokens, words] per depth. The draft of
        position p reads the state of p and the token at p + 1. A further one reads the state of the
        one before, and the next token: the text's, or with `own` the one that was drafted."""
        target, eps = self.target, self.target.spec.norm_eps
        w = {
            name: (rounded(t) if round_it and t.dim() == 2 else t).to(target.type)
            for name, t in self.weights.items()
        }
        layer, x = "layers.0", states @ w["fc.weight"].T
        token, kept = shifted(ids, 1), []
        position = torch.arange(ids.shape[1], device=ids.device)
        for k in range(depth):
            e = rms(target.weights["embed"][token], w[f"{layer}.input_layernorm.weight"], eps)
            h = rms(x, w[f"{layer}.hidden_norm.weight"], eps)
            both = torch.cat([e, h], -1)
            q, key, value = (
                split(both @ w[f"{layer}.self_attn.{p}_proj.weight"].T, target.spec.head_dim)
                for p in "qkv"
            )
            q, key = (rotate(part, position + k, target.inv_freq) for part in (q, key))
            kept.append((key, value))
            a = attend(q, kept).transpose(1, 2).flatten(2)
            x = h + a @ w[f"{layer}.self_attn.o_proj.weight"].T
            h = rms(x, w[f"{layer}.post_attention_layernorm.weight"], eps)
            gate, up = (h @ w[f"{layer}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
            logits = rms(x, w["norm.weight"], eps) @ w["lm_head.weight"].T
            yield logits
            token = self.words[logits.argmax(-1)] if own else shifted(ids, k + 2)

    def save(self, folder: Path, name: str) -> int:
        """Write the head in the speculators format, in bfloat16. Returns its size in bytes."""
        from safetensors.torch import save_file

        spec, rope = self.target.spec, self.target.spec.layers[0].rope
        assert rope is not None
        t2d = torch.zeros(spec.vocab, dtype=torch.bool)
        t2d[self.words.cpu()] = True
        tensors = {n: w.detach().to("cpu", torch.bfloat16) for n, w in self.weights.items()}
        tensors |= {"d2t": self.words.cpu() - torch.arange(len(self.words)), "t2d": t2d}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        layer = {
            "model_type": "llama",
            "vocab_size": spec.vocab,
            "hidden_size": spec.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": spec.head_dim,
            "rms_norm_eps": spec.norm_eps,
            "rope_theta": float(rope.inv_freq[1] ** (-rope.dim / 2)),
            "max_position_embeddings": spec.context,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }
        verifier = {"name_or_path": name, "architectures": [ARCHITECTURES[spec.family]]}
        proposal = {"proposal_type": "greedy", "speculative_tokens": DEPTH}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": verifier,
            },
            "transformer_layer_config": layer,
            "draft_vocab_size": len(self.words),
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": self.captured,
            "torch_dtype": "bfloat16",
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return (folder / "model.safetensors").stat().st_size


def attend(q: Any, kept: list[tuple[Any, Any]]) -> Any:
    """Attention of the drafts at one depth: over the keys of the text up to their position, and
    those of the drafts before them in their own chain."""
    group = q.shape[1] // kept[0][0].shape[1]
    keys, values = (
        [part.repeat_interleave(group, 1) for part in side] for side in zip(*kept, strict=True)
    )
    q = q * q.shape[-1] ** -0.5
    scores = (q @ keys[0].transpose(2, 3)).float()
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    chain = [(q * key).sum(-1, keepdim=True).float() for key in keys[1:]]
    weights = torch.cat([scores.masked_fill(later, -torch.inf), *chain], -1).softmax(-1)
    weights = weights.to(q.dtype)
    count = scores.shape[-1]
    out = weights[..., :count] @ values[0]
    for j, value in enumerate(values[1:]):
        out = out + weights[..., count + j, None] * value
    return out


def shifted(ids: Any, by: int) -> Any:
    return F.pad(ids[:, by:], (0, min(by, ids.shape[1])))


def rounded(weight: Any) -> Any:
    """q4_0 rounding as in formats/blocks_of_32.py, with a straight-through gradient."""
    blocks = weight.detach().reshape(-1, 32)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -8
    steps = blocks / torch.where(scale == 0, 1.0, scale)
    near = (torch.floor(steps + 8.5).clamp(0, 15) - 8) * scale.half().float()
    return weight + (near.reshape(weight.shape) - weight.detach())


# --- training


def batches(texts: Texts, rows: Any, size: int) -> Iterator[Any]:
    """Rows of similar length, for ever."""
    order = rows[texts.last[rows].argsort()]
    while True:
        first = int(torch.randint(max(len(order) - size, 0) + 1, ()))
        yield order[first : first + size]


def loss_of(head: Head, texts: Texts, rows: Any, round_it: bool) -> Any:
    end = int(texts.last[rows].max()) + 1
    ids, states = texts.ids[rows, :end], texts.states[rows, :end]
    scores = head.target.head[head.words]
    at, total = torch.arange(end, device=ids.device), 0.0
    drafts = head.chains(states, ids, DEPTH, own=False, round_it=round_it)
    for k, logits in enumerate(drafts):
        drawn = at + 2 + k  # position of the token that is drafted
        wanted = (drawn >= texts.first[rows, None]) & (drawn <= texts.last[rows, None])
        with torch.no_grad():
            final = texts.final[rows, 1 + k : end]
            teacher = (final[wanted[:, : end - 1 - k]] @ scores.T).float().softmax(-1)
        # Positions behind the end of the text have no teacher; `wanted` leaves them out.
        student = logits[wanted].float().log_softmax(-1)
        total = total - DECAY**k * (teacher * student).sum(-1).mean()
    return total


def train(head: Head, texts: Texts, rows: Any, args: Any) -> int:
    optimiser = torch.optim.AdamW(head.weights.values(), lr=args.rate, betas=(0.9, 0.95))
    began, step, part = time.monotonic(), 0, 0.0
    for chosen in batches(texts, rows, args.rows):
        loss = loss_of(head, texts, chosen, part >= ROUNDED)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.weights.values(), 1.0)
        for group in optimiser.param_groups:
            warm = min((step + 1) / 100, 1.0)
            group["lr"] = args.rate * warm * (0.5 * (1 + np.cos(np.pi * min(part, 1))) + 0.01)
        optimiser.step()
        step += 1
        if step % 200 == 1:
            print(f"step {step}: loss {loss.item():.3f}, {part:.2f} of the training", flush=True)
        part = max(step / args.steps, (time.monotonic() - began) / args.seconds)
        if part >= 1:
            break
    return step


@torch.no_grad()
def acceptance(head: Head, texts: Texts, rows: Any) -> dict[str, Any]:
    """Part of the chains whose first, first two, ... drafts equal the text, and what that makes in
    tokens per pass: over all positions, and quartiles over the texts."""
    hits, counts = [], []
    for some in rows.split(16):
        end = int(texts.last[some].max()) + 1
        ids = texts.ids[some, :end]
        at = torch.arange(end, device=ids.device)
        # chains whose drafts all lie in the answer
        right = (at + 2 >= texts.first[some, None]) & (at + 1 + EVALUATED <= texts.last[some, None])
        counts.append(right.sum(1).cpu())
        drafts = head.chains(texts.states[some, :end], ids, EVALUATED, own=True, round_it=True)
        for k, logits in enumerate(drafts):
            right &= head.words[logits.argmax(-1)] == shifted(ids, k + 2)
            hits.append(right.sum(1).cpu())
    count = torch.cat(counts).numpy()
    found = torch.cat(
        [torch.stack(hits[i : i + EVALUATED], 1) for i in range(0, len(hits), EVALUATED)]
    )
    each = 1 + found.numpy().sum(1)[count > 0] / count[count > 0]
    rates = (found.numpy().sum(0) / max(count.sum(), 1)).round(4).tolist()
    return {
        "positions": int(count.sum()),
        "accepted": rates,
        "tokens_per_pass": round(1 + sum(rates), 3),
        "quartiles": np.quantile(each, (0.25, 0.5, 0.75)).round(3).tolist() if len(each) else [],
    }


# --- main


def main() -> None:
    args, began = arguments(), time.monotonic()
    torch.manual_seed(args.seed)
    model = load_model(resolve(args.model))
    target, template = Target(model, args.device), template_of(model, args.prompts)
    count = len(model.spec.layers)
    args.layers = args.layers or [2, count // 2, count - 3]
    print(f"loaded, {time.monotonic() - began:.0f} s", flush=True)
    texts = conversations(target, template, args)
    order = torch.randperm(len(texts.ids), device=args.device)
    held = order[: max(int(len(order) * HELD_OUT), 2)]
    rows = order[len(held) :]
    place = torch.arange(texts.ids.shape[1], device=args.device)
    answered = (place >= texts.first[:, None]) & (place <= texts.last[:, None])
    counts = torch.bincount(texts.ids[rows][answered[rows]], minlength=model.spec.vocab)
    words = counts.argsort(descending=True, stable=True)[: args.words].sort().values
    covered = float(counts[words].sum() / counts.sum())
    print(f"{int(counts.sum())} answer tokens, {covered:.3f} of them in the vocabulary", flush=True)
    head = Head(target, words, texts.states[rows[:256]], args.layers, args)
    steps = train(head, texts, rows, args)
    size = head.save(args.out, args.model)
    result = {
        "held out, greedy": acceptance(head, texts, held[texts.greedy[held]]),
        "held out, temperature 0.8": acceptance(head, texts, held[~texts.greedy[held]]),
    }
    for name, prompts in template.prompts.items():
        length = max(map(len, prompts)) + args.length
        fixed = Texts.empty(target, len(prompts), length, len(args.layers))
        write(fixed, target, template, prompts, args)
        chosen = torch.arange(len(prompts), device=args.device)
        result[f"{name} prompts"] = acceptance(head, fixed, chosen)
    about = {"out": str(args.out), "bytes": size, "steps": steps, "covered": round(covered, 4)}
    print(json.dumps(about | {"answer_tokens": int(counts.sum()), **result}))


def arguments() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--conversations", type=int, default=24_576)
    parser.add_argument("--batch", type=int, default=4096, help="conversations that are written")
    parser.add_argument("--question", type=int, default=64, help="max tokens of a question")
    parser.add_argument("--length", type=int, default=256, help="max tokens of an answer")
    parser.add_argument("--layers", type=int, nargs="+", help="captured layers")
    parser.add_argument("--mlp", type=int, default=1024)
    parser.add_argument("--words", type=int, default=6144, help="size of the draft vocabulary")
    parser.add_argument("--prompts", type=int, default=40, help="of each set of bench/prompts.py")
    parser.add_argument("--rows", type=int, default=48, help="conversations per step")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=150, help="time limit of the training")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
