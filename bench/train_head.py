"""Train a draft head (model/loading/draft_head.py) on the conversations of a llama-family model.

    python bench/train_head.py [--model smollm2] [--out HEAD.gguf] [--conversations 28700]
                               [--steps 25000]
    python bench/train_head.py --conversations 4 --length 24 --positions 256 --seconds 5 \\
                               --device cpu                                        # smoke test

A head predicts the output of one model file, so no corpus is needed. The model writes the questions
(it continues its template's user header), then answers them, one half greedily and one half at
temperature 0.8. Its final hidden states are computed once. The network is trained by cross-entropy
over three consecutive drafts with teacher forcing, and in the last 40 % of the steps with its
matrices rounded to q4_0, as in the file.

The head of the default model: 28,693 conversations (5.8 M answer tokens), 25,000 steps of 16,384
positions, 200 seconds on one H200. Accuracy at depth 1, 2, 3: 62, 54, 50 % on held-out answers with
teacher forcing; 48, 27, 16 % on the 40 chat prompts of bench/prompts.py, which are not in the
training data, when each draft continues from the last.

Needs torch and transformers, and a GPU for more than a smoke test. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.hub.catalog import resolve
from verbatim.model.loading.draft_head import EPS, SCALES, read_head, write_head
from verbatim.model.loading.load import Model, load_model

DEPTH = 3  # consecutive drafts that are trained
ROUNDED = 0.6  # fraction of the steps after which the matrices are rounded
WARM_UP = 0.02  # fraction of the steps
HELD_OUT = 0.02  # fraction of the answers
QUESTION = 96  # max tokens of a question


# --- model


def in_torch(model: Model, device: str) -> Any:
    """The same weights, dequantised, in the Llama of transformers, which generates in large
    batches."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = model.spec
    if (
        spec.family != "llama"
        or any(layer.window or layer.experts for layer in spec.layers)
        or spec.qkv_bias
        or spec.mlp_bias
    ):
        raise SystemExit(
            f"only plain llama models can be trained for here; this one is {spec.family}"
        )
    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.mlp,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.norm_eps,
        max_position_embeddings=spec.context,
        tie_word_embeddings=spec.tied,
    )
    net = LlamaForCausalLM(config)
    for name, parameter in net.named_parameters():
        parameter.data.copy_(torch.from_numpy(np.array(model.weights[our_name(name)].to_f32())))
    net.to(device, torch.bfloat16 if device.startswith("cuda") else torch.float32)
    rope = spec.layers[0].rope
    assert rope is not None
    rotary = net.model.rotary_emb  # our frequencies include every kind of scaling
    rotary.inv_freq = torch.tensor(np.array(rope.inv_freq), dtype=torch.float32, device=device)
    rotary.original_inv_freq = rotary.inv_freq
    rotary.attention_scaling = rope.attention_factor
    return net.eval()


def our_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> layers.3.attn.q"""
    name = name.removeprefix("model.").removesuffix(".weight")
    for theirs, ours in (
        ("self_attn.", "attn."),
        ("_proj", ""),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("embed_tokens", "embed"),
        ("lm_head", "head"),
    ):
        name = name.replace(theirs, ours)
    return "final_norm" if name == "norm" else name


# --- conversations


@dataclass(frozen=True)
class Turns:
    """The ids around a question: all before it (the template's system prompt and user header),
    and all from its end up to the answer."""

    before: list[int]
    after: list[int]
    ends: list[int]


def turns_of(model: Model) -> Turns:
    """Rendered with the model's own template around a marker."""
    from verbatim.files.gguf_file import GGUFFile
    from verbatim.text import tokenizer
    from verbatim.text.templates import chat_template

    source = model.source
    if isinstance(source, GGUFFile):
        words, template = (
            tokenizer.from_gguf(source.metadata),
            chat_template.template_from_gguf(source.metadata),
        )
    else:
        words, template = (
            tokenizer.from_directory(source.path),
            chat_template.template_from_directory(source.path),
        )
    if template is None:
        raise SystemExit("the model has no chat template, so it cannot talk with itself")
    mark = "QUESTION"
    before, _, after = template.render([{"role": "user", "content": mark}]).partition(mark)
    ends = sorted({*model.eos_ids, *words.eos_ids})
    return Turns(words.encode(before, special=True), words.encode(after, special=True), ends)


def write_on(
    net: Any, prompts: list[list[int]], turns: Turns, length: int, temperature: float
) -> list[list[int]]:
    """The model's continuation of each prompt up to and including an end token; at most
    `length`."""
    import torch

    widest = max(map(len, prompts))
    pad = turns.ends[0]
    ids = torch.tensor([[pad] * (widest - len(p)) + p for p in prompts], device=net.device)
    mask = torch.tensor(
        [[0] * (widest - len(p)) + [1] * len(p) for p in prompts], device=net.device
    )
    how: dict[str, Any] = {"do_sample": False}
    if temperature:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        out = net.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=length,
            eos_token_id=turns.ends,
            pad_token_id=pad,
            **how,
        )
    written = out[:, widest:].tolist()
    return [
        row[: next((i + 1 for i, t in enumerate(row) if t in turns.ends), len(row))]
        for row in written
    ]


def conversations(
    net: Any, turns: Turns, count: int, length: int, batch: int
) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) pairs. The end token belongs to the answer, because the engine draws it
    too."""
    found: list[tuple[list[int], list[int]]] = []
    began = time.monotonic()
    while len(found) < count:
        size = min(batch, count - len(found))
        questions = write_on(net, [turns.before] * size, turns, QUESTION, 1.0)
        questions = [[t for t in q if t not in turns.ends] for q in questions]
        prompts = [turns.before + q + turns.after for q in questions if q]
        half = (len(prompts) + len(found) % 2) // 2
        for part, temperature in ((prompts[:half], 0.0), (prompts[half:], 0.8)):
            if part:
                found += zip(part, write_on(net, part, turns, length, temperature), strict=True)
        print(f"{len(found)} conversations, {time.monotonic() - began:.0f} s", flush=True)
    return found


@dataclass(frozen=True)
class Data:
    """Flat over all answers. Row j: the hidden state that token j was drawn from, the token, and
    the number of tokens of its answer that follow."""

    states: Any  # [rows, hidden]
    tokens: Any  # [rows]
    left: Any  # [rows]


def states_of(net: Any, texts: list[tuple[list[int], list[int]]], batch: int) -> Data:
    import torch

    texts = sorted(texts, key=lambda t: len(t[0]) + len(t[1]))  # to pad little
    states, tokens, left = [], [], []
    for at in range(0, len(texts), batch):
        group = texts[at : at + batch]
        widest = max(len(p) + len(a) for p, a in group)
        ids = torch.tensor(
            [[*p, *a, *[0] * (widest - len(p) - len(a))] for p, a in group], device=net.device
        )
        with torch.inference_mode():
            # After the final norm. The padding is on the right, so no real token attends to it.
            last = net.model(ids, use_cache=False).last_hidden_state
        for row, (prompt, answer) in zip(last, group, strict=True):
            states.append(row[len(prompt) - 1 : len(prompt) - 1 + len(answer)].clone())
            tokens += answer
            left += range(len(answer) - 1, -1, -1)
    return Data(
        torch.cat(states),
        torch.tensor(tokens, device=net.device),
        torch.tensor(left, device=net.device),
    )


# --- network


def rounded(weight: Any) -> Any:
    """q4_0 rounding as in formats/blocks_of_32.py, with a straight-through gradient."""
    import torch

    blocks = weight.detach().reshape(-1, 32)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -8
    steps = blocks / torch.where(scale == 0, 1.0, scale)
    near = (torch.floor(steps + 8.5).clamp(0, 15) - 8) * scale.half().float()
    return weight + (near.reshape(weight.shape) - weight.detach())


def rms(x: Any) -> Any:
    return x * (x.square().mean(-1, keepdim=True) + float(EPS)).rsqrt()


def new_net(data: Data, inner: int) -> dict[str, Any]:
    """Initialised near the identity: states are normalised per channel on the way in and
    rescaled on the way out."""
    import torch

    hidden, device = data.states.shape[1], data.states.device
    colour = data.states.float().square().mean(0).sqrt().clamp(min=1e-3)
    net = {
        "up": torch.randn(2 * inner, 2 * hidden, device=device) / (2 * hidden) ** 0.5,
        "down": torch.randn(hidden, inner, device=device) * 0.1 / inner**0.5,
        "state_scale": 1 / colour,
        "word_scale": torch.ones(hidden, device=device),
        "keep": 1 / colour,
        "out": colour.clone(),
    }
    return {name: value.requires_grad_() for name, value in net.items()}


def forward(net: dict[str, Any], h: Any, word: Any, round_it: bool) -> Any:
    """The next state of the draft head: h [rows, hidden], and the embedding of the token
    drawn from it."""
    import torch

    up, down = (rounded(net[n]) if round_it else net[n] for n in ("up", "down"))
    x = torch.cat([h * net["state_scale"], rms(word) * net["word_scale"]], -1)
    gate, value = (x @ up.T).chunk(2, -1)
    return rms(h * net["keep"] + (torch.nn.functional.silu(gate) * value) @ down.T) * net["out"]


@dataclass(frozen=True)
class Task:
    data: Data
    embed: Any  # [vocab, hidden]
    scores: Any  # [words, hidden]: rows of the LM head
    known: Any  # [vocab]: row in `scores`; -1: not in the head's vocabulary


def loss_of(net: dict[str, Any], task: Task, rows: Any, round_it: bool) -> Any:
    """Cross-entropy of DEPTH drafts, over the head's vocabulary."""
    import torch

    data, total = task.data, 0.0
    h = data.states[rows].float()
    for depth in range(1, DEPTH + 1):
        at = (rows + depth).clamp(max=len(data.tokens) - 1)
        h = forward(net, h, task.embed[data.tokens[at - 1]], round_it)
        wanted = torch.where(data.left[rows] >= depth, task.known[data.tokens[at]], -1)
        logits = h.to(task.scores.dtype) @ task.scores.T
        total = total + torch.nn.functional.cross_entropy(
            logits.float(), wanted, ignore_index=-1, reduction="sum"
        )
    return total / (DEPTH * len(rows))


def train(
    task: Task, rows: Any, inner: int, steps: int, positions: int, seconds: float, rate: float
) -> tuple[dict[str, Any], int]:
    """Until `steps` or `seconds`, whichever comes first; the learning rate follows the one
    nearer to its end."""
    import torch

    net = new_net(task.data, inner)
    optimiser = torch.optim.AdamW(net.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    began, step, part = time.monotonic(), 0, 0.0
    while part < 1:
        chosen = rows[torch.randint(len(rows), (positions,), device=rows.device)]
        loss = loss_of(net, task, chosen, part >= ROUNDED)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.values(), 1.0)
        warm = min((step + 1) / max(WARM_UP * steps, 1), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = rate * warm * (0.5 * (1 + np.cos(np.pi * part)) + 0.01)
        optimiser.step()
        step += 1
        if step % 500 == 0:
            print(
                f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True
            )
        part = max(step / steps, (time.monotonic() - began) / seconds)
    return net, step


def hits(net: dict[str, Any], task: Task, rows: Any, words: Any, self_fed: bool) -> list[float]:
    """Accuracy at each depth. Self-fed: this draft and all before it, each drafted from the
    last."""
    import torch

    data, out = task.data, []
    with torch.no_grad():
        rows = rows[data.left[rows] >= DEPTH]
        h, token, right = (
            data.states[rows].float(),
            data.tokens[rows],
            torch.ones_like(rows, dtype=torch.bool),
        )
        for depth in range(1, DEPTH + 1):
            h = forward(net, h, task.embed[token], True)
            token = words[(h.to(task.scores.dtype) @ task.scores.T).argmax(-1)]
            hit = token == data.tokens[rows + depth]
            right = right & hit
            out.append((right if self_fed else hit).float().mean().item() if len(rows) else 0.0)
            token = token if self_fed else data.tokens[rows + depth]
    return out


# --- main


def split(data: Data, part: float) -> tuple[Any, Any]:
    """Training rows, and the rows of whole held-out answers."""
    import torch

    answer = torch.cumsum(torch.cat([data.left.new_zeros(1), (data.left[:-1] == 0).long()]), 0)
    kept = torch.rand(int(answer[-1]) + 1, device=answer.device) < part
    kept[0] = True  # at least one held out, and one to train on
    kept[-1] = False
    return (~kept[answer]).nonzero().reshape(-1), kept[answer].nonzero().reshape(-1)


def main() -> None:
    args = arguments()
    import torch

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = load_model(resolve(args.model))
    net = in_torch(model, args.device)
    texts = conversations(net, turns_of(model), max(args.conversations, 2), args.length, args.batch)
    data = states_of(net, texts, max(args.batch // 8, 1))
    embed = net.get_input_embeddings().weight.detach().float()
    head = net.get_output_embeddings().weight.detach()
    del net
    counts = torch.bincount(data.tokens, minlength=model.spec.vocab)
    words = counts.argsort(descending=True, stable=True)[: args.words].sort().values
    known = torch.full((model.spec.vocab,), -1, device=words.device)
    known[words] = torch.arange(len(words), device=words.device)
    task = Task(data, embed, head[words].clone(), known)
    rows, kept = split(data, HELD_OUT)
    print(
        f"{len(data.tokens)} answer tokens, {len(rows)} to train on, {len(words)} words", flush=True
    )
    trained, steps = train(
        task, rows, args.inner, args.steps, args.positions, args.seconds, args.rate
    )
    arrays = {name: trained[name].detach().cpu().numpy() for name in ("up", "down", *SCALES)} | {
        "words": words.cpu().numpy()
    }
    out = args.out or Path(f"{model.source.digest[:16]}.gguf")
    write_head(out, arrays, **{"draft.model": args.model, "draft.inner": args.inner})
    read_head(out, model.spec)
    result = {
        "given": hits(trained, task, kept, words, False),
        "self_fed": hits(trained, task, kept, words, True),
    }
    print(
        json.dumps(
            {
                "out": str(out),
                "conversations": len(texts),
                "tokens": len(data.tokens),
                "steps": steps,
                **result,
            }
        )
    )


def arguments() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--out", type=Path, help="default: the name under which src/verbatim/model/heads keeps it"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--conversations", type=int, default=28_700)
    parser.add_argument("--length", type=int, default=320, help="max tokens of an answer")
    parser.add_argument("--batch", type=int, default=512, help="conversations per batch")
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument(
        "--words",
        type=int,
        default=4096,
        help="size of the head's vocabulary: the most frequent tokens",
    )
    parser.add_argument("--steps", type=int, default=25_000)
    parser.add_argument("--positions", type=int, default=16_384, help="per step")
    parser.add_argument("--seconds", type=float, default=1e9, help="time limit of the training")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
