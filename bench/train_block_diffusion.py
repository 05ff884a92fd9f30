"""Train a block-diffusion model (docs/diffusion.md) from a model of the llama family, on its own
texts.

    python bench/train_block_diffusion.py --out FOLDER [--model smollm2] [--conversations 20480]
                                          [--seconds 150]
    python bench/train_block_diffusion.py --out FOLDER --device cpu --conversations 6 --length 24 \\
        --question 8 --rows 2 --steps 3 --prompts 1 --tokens 16  # smoke test

The result has the layout of nemotron_labs_diffusion: finished tokens attend causally, so it still
decodes from left to right; the block in progress sees itself, too, and a mask draws its own
position. The model writes conversations (train_draft_head.py). Each is read twice in one sequence,
a clean and a noised copy (BD3-LM, arXiv 2503.09573): a noised block sees the clean tokens before it
and itself. Blocks have 4 to 32 positions and begin anywhere in the answer; the number of masks is
uniform, with extra weight on blocks that are all masks, but for the first position or not. Loss:
cross entropy of the masks, and on the clean copy the divergence from the model as it was.

Out: FOLDER/model.safetensors (bfloat16), config.json and tokenizer. The last line is JSON: the
perplexity bound on held-out answers, and of the prompts of bench/prompts.py and examples/quiz.jsonl
passes per token, log-probability under the original model, repetition and right answers, for block
lengths and thresholds, and for decoding from left to right. Needs torch, and a GPU for more than a
smoke test.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from train_draft_head import Target, Texts, batches, joined, split, template_of, write

from verbatim.engine.loading.model_info import read_text
from verbatim.hub.catalog import resolve
from verbatim.model.loading.load import Model, load_model
from verbatim.text.gguf_vocab import read_vocabulary

MASK = "<empty_output>"  # an unused control token of SmolLM2
LENGTHS = (4, 8, 16, 32)
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0)  # 1: one position per pass
ALL_MASKED, ALL_BUT_FIRST = 0.2, 0.2  # parts of the blocks
CLEAN_PART = 0.25  # part of the clean positions whose distribution is compared
HELD_OUT = 0.02  # part of the answers
SHARED = 32  # all rows of a batch are cut to this many positions behind their last token
QUIZ = Path(__file__).parent.parent / "examples" / "quiz.jsonl"


# --- the model

Weights = Mapping[str, Any]
Cache = list[tuple[Any, Any]]  # keys and values per layer


class Attention:
    """Rows of a sequence of `clean` causal positions and noised ones, or of a block over a cache.
    `mask`: keys that each row behind the clean ones sees, True [rows, 1, queries, keys]."""

    def __init__(self, position: Any, inv_freq: Any, kind: Any, clean: int, mask: Any) -> None:
        angles = position[:, None] * inv_freq
        self.cos, self.sin = angles.cos().to(kind), angles.sin().to(kind)
        self.clean, self.mask = clean, mask

    def rotate(self, x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        group, n = q.shape[1] // k.shape[1], self.clean
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        parts = []
        if n:
            some = (part[:, :, :n] for part in (q, k, v))
            parts.append(F.scaled_dot_product_attention(*some, is_causal=True))
        if q.shape[2] > n:
            mask = self.mask.expand(-1, q.shape[1], -1, -1)
            parts.append(F.scaled_dot_product_attention(q[:, :, n:], k, v, attn_mask=mask))
        return torch.cat(parts, 2).transpose(1, 2).flatten(2)


def states(
    target: Target, w: Weights, ids: Any, attend: Attention, past: Cache | None = None
) -> tuple[Any, Cache]:
    """Final states [rows, tokens, H], and the keys and values of the given tokens."""
    spec, cache = target.spec, Cache()

    def norm(x: Any, name: str) -> Any:
        return F.rms_norm(x, (spec.hidden,), w[name], spec.norm_eps)

    x = w["embed"][ids]
    for i in range(len(spec.layers)):
        name = f"layers.{i}"
        h = norm(x, f"{name}.attn_norm")
        q, k, v = (split(h @ w[f"{name}.attn.{p}"].T, spec.head_dim) for p in "qkv")
        q, k = attend.rotate(q), attend.rotate(k)
        cache.append((k, v))
        if past is not None:
            k, v = (torch.cat([old, new], 2) for old, new in zip(past[i], (k, v), strict=True))
        x = x + attend(q, k, v) @ w[f"{name}.attn.o"].T
        h = norm(x, f"{name}.mlp_norm")
        gate, up = (h @ w[f"{name}.mlp.{p}"].T for p in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"{name}.mlp.down"].T
    return norm(x, "final_norm"), cache


# --- noise


@dataclass
class Noised:
    """A batch: clean and noised tokens [rows, length], and what is learned of them."""

    clean: Any
    noised: Any
    masked: Any  # positions whose token is predicted
    block: Any  # number of the block of each position; negative before the first
    start: Any  # first position of that block
    answered: Any  # positions from the answer's first token to its last


def noise(texts: Texts, rows: Any, length: int, mask: int, *, exact: bool = False) -> Noised:
    """`exact`: blocks begin at the answer, and the number of masks is uniform."""
    device, count = texts.ids.device, len(rows)
    end = min(-(-(int(texts.last[rows].max()) + 1 + SHARED) // 8) * 8, texts.ids.shape[1] // 8 * 8)
    ids, at = texts.ids[rows, :end], torch.arange(end, device=device)
    first, last = texts.first[rows, None], texts.last[rows, None]
    offset = (torch.rand(count, 1, device=device) * 2 - 1).clamp(0) * length
    anchor = first if exact else first + offset.long()
    inside = (at - anchor) % length
    block = (at - anchor - inside) // length
    # Blocks are contiguous, so sorting by block and noise shuffles each of them in its place.
    order = (block + torch.rand(count, end, device=device)).argsort(1)
    rank = torch.empty_like(inside).scatter_(1, order, inside)
    per_block = torch.rand(count, 2 * (end // length + 2), device=device)
    of = block + end // length + 1  # blocks before the first have negative numbers
    masks = 1 + (per_block * length).long().clamp(max=length - 1)
    kind = torch.rand_like(per_block) if not exact else torch.ones_like(per_block)
    masks = torch.where(kind < ALL_MASKED + ALL_BUT_FIRST, length, masks).gather(1, of)
    but_first = (kind < ALL_BUT_FIRST).gather(1, of) & (inside == 0)
    wanted = (at >= anchor) & (block <= (last - anchor) // length)
    masked = wanted & (rank < masks) & ~but_first
    answered = (at >= first) & (at <= last)
    return Noised(ids, torch.where(masked, mask, ids), masked, block, at - inside, answered)


def attention(target: Target, batch: Noised) -> Attention:
    """A noised position sees the clean tokens before its block, and its noised block."""
    at = torch.arange(batch.clean.shape[1], device=target.device)
    earlier = at < batch.start[:, :, None]
    same = batch.block[:, :, None] == batch.block[:, None]
    mask = torch.cat([earlier, same], 2)[:, None]
    return Attention(torch.cat([at, at]), target.inv_freq, target.type, len(at), mask)


# --- training


def loss_of(target: Target, w: Weights, batch: Noised) -> tuple[Any, Any]:
    length = batch.clean.shape[1]
    both = torch.cat([batch.clean, batch.noised], 1)
    final, _ = states(target, w, both, attention(target, batch))
    logits = (final[:, length:][batch.masked] @ w["embed"].T).float()
    unmasked = F.cross_entropy(logits, batch.clean[batch.masked])
    with torch.no_grad():
        chosen = batch.answered & (
            torch.rand(batch.answered.shape, device=both.device) < CLEAN_PART
        )
        chosen = chosen.roll(-1, 1)  # the row before a position draws it
        at = torch.arange(length, device=both.device)
        causal = Attention(at, target.inv_freq, target.type, length, None)
        before, _ = states(target, target.weights, batch.clean, causal)
        teacher = (before[chosen] @ target.head.T).float().log_softmax(-1)
    student = (final[:, :length][chosen] @ w["embed"].T).float().log_softmax(-1)
    kept = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return unmasked, kept


def train(target: Target, texts: Texts, rows: Any, mask: int, args: Any) -> tuple[Weights, int]:
    weights = {name: w.float().clone().requires_grad_() for name, w in target.weights.items()}
    optimiser = torch.optim.AdamW(
        weights.values(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0, fused=True
    )
    began, step, part = time.monotonic(), 0, 0.0
    for chosen in batches(texts, rows, args.rows):
        for group in optimiser.param_groups:
            warm = min((step + 1) / 50, 1.0)
            group["lr"] = args.rate * warm * (0.5 * (1 + np.cos(np.pi * part)) + 0.01)
        w = {name: weight.to(target.type) for name, weight in weights.items()}
        batch = noise(texts, chosen, LENGTHS[step % len(LENGTHS)], mask)
        unmasked, kept = loss_of(target, w, batch)
        optimiser.zero_grad()
        (unmasked + kept).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimiser.step()
        step += 1
        if step % 50 < len(LENGTHS):
            print(
                f"step {step}: {part:.2f} of the training, blocks of {int(batch.masked.shape[1])}"
                f" positions by {LENGTHS[(step - 1) % len(LENGTHS)]}: loss {unmasked.item():.3f},"
                f" divergence {kept.item():.4f}",
                flush=True,
            )
        part = min(max(step / args.steps, (time.monotonic() - began) / args.seconds), 1.0)
        if part >= 1:
            break
    return {name: weight.detach().to(target.type) for name, weight in weights.items()}, step


# --- evaluation


@torch.inference_mode()
def bounds(target: Target, w: Weights, texts: Texts, rows: Any, mask: int) -> dict[str, Any]:
    """Nats per token of held-out answers, over their whole blocks of 32: the bound of each block
    length (the mean over the number of masks), and from left to right."""
    sums: dict[str, list[float]] = {}

    def add(name: str, values: Any) -> None:
        entry = sums.setdefault(name, [0.0, 0.0])
        entry[0], entry[1] = entry[0] + float(values.sum()), entry[1] + float(values.numel())

    for some in rows.split(32):
        for length in LENGTHS:
            batch = noise(texts, some, length, mask, exact=True)
            ids, count = batch.clean, batch.clean.shape[1]
            size = (texts.last[some] + 1 - texts.first[some])[:, None] // 32 * 32
            at = torch.arange(count, device=ids.device)
            whole = batch.answered & (at < texts.first[some, None] + size)
            final, _ = states(
                target, w, torch.cat([ids, batch.noised], 1), attention(target, batch)
            )
            wanted = whole & batch.masked
            loss = F.cross_entropy(
                (final[:, count:][wanted] @ w["embed"].T).float(), ids[wanted], reduction="none"
            )
            # the mean over the masks of each block, so that every number of masks counts alike
            key = torch.arange(len(some), device=ids.device)[:, None] * count + batch.start
            groups, index = torch.unique(key[wanted], return_inverse=True)
            means = torch.zeros(len(groups), device=ids.device).index_add_(0, index, loss)
            means /= torch.bincount(index)
            add(f"blocks of {length}", means)
        causal = Attention(at, target.inv_freq, target.type, count, None)
        for name, weights in (("original", target.weights), ("left to right", w)):
            before, _ = states(target, weights, ids, causal)
            picked = whole[:, 1:]
            logits = (before[:, :-1][picked] @ weights["embed"].T).float()
            add(name, F.cross_entropy(logits, ids[:, 1:][picked], reduction="none"))
    return {name: round(total / max(count, 1), 4) for name, (total, count) in sums.items()}


@torch.inference_mode()
def drafted(target: Target, w: Weights, texts: Texts, mask: int, length: int = 8) -> list[float]:
    """Part of the chains of self-speculation that equal the text, by length: a block is the last
    known token and masks."""
    hits, count = np.zeros(length - 1), 0
    for shift in range(length):
        moved = copy.copy(texts)
        moved.first = texts.first - 1 + shift
        batch = noise(moved, torch.arange(len(texts.ids)), length, mask, exact=True)
        inside = torch.arange(batch.clean.shape[1], device=batch.clean.device) - batch.start
        batch.noised = torch.where((batch.block >= 0) & (inside > 0), mask, batch.clean)
        both = torch.cat([batch.clean, batch.noised], 1)
        final, _ = states(target, w, both, attention(target, batch))
        logits = final[:, batch.clean.shape[1] :] @ w["embed"].T
        logits[..., mask] = -torch.inf
        right = logits.argmax(-1) == batch.clean
        # blocks that are wholly inside the answer, by row and number
        for row in range(len(right)):
            first, last = int(moved.first[row]), min(int(texts.last[row]) + 1, right.shape[1])
            end = first + (last - first) // length * length
            chain = right[row, first:end].reshape(-1, length)[:, 1:].cumprod(1)
            hits, count = hits + chain.sum(0).cpu().numpy(), count + len(chain)
    return (hits / max(count, 1)).round(4).tolist()  # type: ignore[no-any-return]


class Decoder:
    """Greedy block decoding of prompts, all rows in one batch, aligned at the prompt's end."""

    def __init__(self, target: Target, w: Weights, prompts: list[list[int]], mask: int) -> None:
        self.target, self.w, self.mask = target, w, mask
        width, device = max(map(len, prompts)), target.device
        ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
        pad = torch.tensor([width - len(p) for p in prompts], device=device)
        self.real = torch.arange(width, device=device) >= pad[:, None]
        seen = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        seen = seen & self.real[:, None] | torch.eye(width, dtype=torch.bool, device=device)
        self.prompt = self._run(ids, 0, seen[:, None], None)[1]

    def _run(self, ids: Any, start: int, mask: Any, past: Cache | None) -> tuple[Any, Cache]:
        position = torch.arange(start, start + ids.shape[1], device=ids.device)
        attend = Attention(position, self.target.inv_freq, self.target.type, 0, mask)
        return states(self.target, self.w, ids, attend, past)

    @torch.inference_mode()
    def decode(
        self, length: int, threshold: float, ends: list[int], limit: int
    ) -> tuple[list[list[int]], int]:
        """The answers without their end token, and the passes that they needed in all."""
        device, rows = self.real.device, len(self.real)
        past, passes = self.prompt, 0
        stops = torch.tensor(ends, device=device)
        out = torch.zeros(rows, 0, dtype=torch.long, device=device)
        live = torch.ones(rows, dtype=torch.bool, device=device)
        for start in range(0, limit, length):
            block = torch.full((rows, length), self.mask, device=device)
            size = past[0][0].shape[2]
            seen = torch.ones(rows, length, size + length, dtype=torch.bool, device=device)
            seen[:, :, : self.real.shape[1]] = self.real[:, None]
            while bool(live.any()):
                open_ = (block == self.mask) & live[:, None]
                # a row ends when all tokens before an end token are decided
                known = (block != self.mask).cumprod(1).bool()
                ended = (torch.isin(block, stops) & known).any(1)
                busy = open_.any(1) & ~ended
                if not bool(busy.any()):
                    break
                passes += int(busy.sum())
                logits = self._run(block, size, seen[:, None], past)[0] @ self.w["embed"].T
                logits = logits.float()
                logits[..., self.mask] = -torch.inf
                sure, token = logits.softmax(-1).max(-1)
                sure = torch.where(open_, sure, -1.0)
                best = F.one_hot(sure.argmax(1), length).bool()
                keep = open_ & busy[:, None] & (best | (sure > threshold))
                block = torch.where(keep, token, block)
            known = (block != self.mask).cumprod(1).bool()
            live &= ~(torch.isin(block, stops) & known).any(1)
            out = torch.cat([out, block], 1)
            if not bool(live.any()) or start + length >= limit:
                break
            causal = seen.clone()
            causal[:, :, size:] = torch.ones_like(causal[:, :, size:]).tril()
            new = self._run(block, size, causal[:, None], past)[1]
            past = [
                (torch.cat([k, more], 2), torch.cat([v, rest], 2))
                for (k, v), (more, rest) in zip(past, new, strict=True)
            ]
        return [cut(row, ends, limit) for row in out.tolist()], passes


def cut(row: list[int], ends: list[int], limit: int) -> list[int]:
    end = next((i for i, token in enumerate(row[:limit]) if token in ends), limit)
    return row[:end]


@torch.inference_mode()
def judged(
    target: Target, prompts: list[list[int]], answers: list[list[int]], words: Any, quiz: list[str]
) -> dict[str, Any]:
    """Of the answers: nats per token under the original model, part of the 4-grams that were there
    before, and right answers to the quiz (the last prompts)."""
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.zeros(len(prompts), width, dtype=torch.long, device=target.device)
    drawn = torch.zeros_like(ids, dtype=torch.bool)
    grams, again = 0, 0
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer], device=target.device)
        drawn[row, len(prompt) : end] = True
        seen = [tuple(answer[i : i + 4]) for i in range(len(answer) - 3)]
        grams, again = grams + len(seen), again + len(seen) - len(set(seen))
    final, _ = target.forward(ids)
    logits = (final[:, :-1][drawn[:, 1:]] @ target.head.T).float()
    nats, tokens = float(F.cross_entropy(logits, ids[drawn], reduction="sum")), int(drawn.sum())
    texts = [words.decode(answer).lower() for answer in answers[len(answers) - len(quiz) :]]
    right = sum(answer.lower() in text for answer, text in zip(quiz, texts, strict=True))
    return {
        "tokens": tokens, "nats": round(nats / max(tokens, 1), 4),
        "repeated": round(again / max(grams, 1), 4), "quiz": right,
    }  # fmt: skip


def answers_of(texts: Texts, ends: list[int], limit: int) -> list[list[int]]:
    rows = zip(texts.ids.tolist(), texts.first.tolist(), strict=True)
    return [cut(row[first:], ends, limit) for row, first in rows]


def evaluate(
    target: Target, w: Weights, model: Model, mask: int, args: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of the result: answers from left to right by both models, and in blocks."""
    template = template_of(model, args.prompts)
    words, chat = read_text(model.source)
    assert chat is not None
    quiz = [json.loads(line) for line in QUIZ.read_text().splitlines()]
    asked = [chat.render([{"role": "user", "content": entry["question"]}]) for entry in quiz]
    prompts = [*template.prompts, *(words.encode(text, special=True) for text in asked)]
    right = [entry["answer"] for entry in quiz]
    limits = argparse.Namespace(question=0, length=args.tokens + 1)
    trained = copy.copy(target)
    trained.weights, trained.head = dict(w), w["embed"]
    for name, one in (("original", target), ("left to right", trained)):
        texts = write(one, template, prompts, False, limits)
        answers = answers_of(texts, template.ends, args.tokens)
        yield name, judged(target, prompts, answers, words, right)
        if one is trained:
            yield "self-speculation", {"accepted": drafted(one, w, texts, mask)}
        yield f"text of {name}", {"text": words.decode(answers[0])}
    decoder = Decoder(target, w, prompts, mask)
    for length in LENGTHS:
        for threshold in THRESHOLDS:
            answers, passes = decoder.decode(length, threshold, template.ends, args.tokens)
            found = judged(target, prompts, answers, words, right)
            found |= {"passes": passes, "text": words.decode(answers[0])}
            yield f"blocks of {length}, threshold {threshold}", found


# --- main


def save(target: Target, w: Weights, model: Model, mask: int, folder: Path) -> None:
    """Write the layout of nemotron_labs_diffusion."""
    from safetensors.torch import save_file

    spec, rope = target.spec, target.spec.layers[0].rope
    assert rope is not None
    names = {"embed": "encoder.embed_tokens", "final_norm": "encoder.norm"}
    parts = {
        "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        **{f"attn.{p}": f"self_attn.{p}_proj" for p in "qkvo"},
        **{f"mlp.{p}": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
    }  # fmt: skip
    for i in range(len(spec.layers)):
        names |= {f"layers.{i}.{own}": f"encoder.layers.{i}.{to}" for own, to in parts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{names[n]}.weight": t.to("cpu", torch.bfloat16) for n, t in w.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "nemotron_labs_diffusion",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.mlp,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.context,
        "rope_parameters": {  # a factor of 1 changes nothing
            "rope_type": "yarn",
            "rope_theta": float(rope.inv_freq[1] ** (-rope.dim / 2)),
            "factor": 1.0,
            "original_max_position_embeddings": spec.context,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.0,
        },
        "tie_word_embeddings": True,
        "mask_token_id": mask,
        "block_size": 16,
        "dlm_type": "llada",
        "eos_token_id": list(model.eos_ids),
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    metadata: Mapping[str, Any] = model.source.metadata  # type: ignore[union-attr]
    read_vocabulary(metadata).special.save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    about = {
        "chat_template": metadata["tokenizer.chat_template"],
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    model = load_model(resolve(args.model))
    target, template = Target(model, args.device), template_of(model, args.prompts)
    mask = read_text(model.source)[0].control_tokens[MASK]
    began, parts = time.monotonic(), []
    for at in range(0, args.conversations, args.batch):
        prompts = [template.before] * min(args.batch, args.conversations - at)
        parts.append(write(target, template, prompts, True, args))
        print(f"{at + len(prompts)} texts, {time.monotonic() - began:.0f} s", flush=True)
    texts = joined(parts)
    order = torch.randperm(len(texts.ids), device=args.device)
    held = order[: max(int(len(order) * HELD_OUT), 2)]
    rows = order[len(held) :]
    learned = int((texts.last[rows] + 1 - texts.first[rows]).sum())
    print(f"{learned} tokens of answers", flush=True)
    w, steps = train(target, texts, rows, mask, args)
    save(target, w, model, mask, args.out)
    result: dict[str, Any] = {"steps": steps, "answer_tokens": learned}
    for kind, some in (
        ("greedy", held[texts.greedy[held]]),
        ("temperature 0.8", held[~texts.greedy[held]]),
    ):
        if len(some):
            result[f"nats per token, {kind}"] = bounds(target, w, texts, some, mask)
    for name, row in evaluate(target, w, model, mask, args):
        print(f"{time.monotonic() - began:.0f} s, {name}: {row}", flush=True)
        result[name] = row
    print(json.dumps(result))


def arguments() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--conversations", type=int, default=20_480)
    parser.add_argument("--batch", type=int, default=4096, help="conversations that are written")
    parser.add_argument("--question", type=int, default=64, help="max tokens of a question")
    parser.add_argument("--length", type=int, default=256, help="max tokens of an answer")
    parser.add_argument("--prompts", type=int, default=40, help="of each set of bench/prompts.py")
    parser.add_argument("--tokens", type=int, default=128, help="max tokens of their answers")
    parser.add_argument("--rows", type=int, default=64, help="conversations per step")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=150, help="time limit of the training")
    parser.add_argument("--rate", type=float, default=8e-4)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
