"""DFlash heads: their drafts are those of the published mathematics, written in PyTorch here; they
change no output; one that does not fit the model is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_engine import compare_answers
from draft_heads import check_draft, drafts_of, exact, save_head, with_head

from verbatim.base.errors import ModelError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

H, VOCAB, LAYERS, EPS, THETA, MASK, HEAD = 64, 260, 5, 1e-6, 10000.0, 259, 32
READ = [0, 2]  # layers of the target whose outputs the head reads
TARGET: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 12,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Kinds of heads: what differs in config.json, and whether the target's output matrix is tied.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "full": ({"block_size": 8, "num_target_layers": LAYERS}, False),
    "windows": (WINDOWS, True),
}


def save_target(folder: Path, tied: bool, damping: float = 1.0) -> Any:
    """A random qwen3 in the layout of transformers. `damping` multiplies what its layers add."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**TARGET, tie_word_embeddings=tied, eos_token_id=1)
    net = transformers.Qwen3ForCausalLM(config).eval()
    for name, p in net.named_parameters():
        size = damping if "o_proj" in name or "down_proj" in name else 1.0
        mean, deviation = (1.0, 0.1) if "norm" in name else (0.0, size * H**-0.5)
        p.data.normal_(mean, 0.7 if "embed" in name else deviation)
    net.save_pretrained(folder)
    return net


def random_head(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and tensors of a random head."""
    r, changes = np.random.default_rng(0), KINDS[kind][0]
    own: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": READ}
    config = TARGET | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "head_dim": HEAD,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "dflash_config": own if "block_size" in changes else own | {"block_size": 8},
        **changes,
    }
    state = {"fc.weight": exact(r, H, 2 * H)}
    state |= {name: 1 + exact(r, H) for name in ("hidden_norm.weight", "norm.weight")}
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"layers.{i}.{norm}.weight"] = 1 + exact(r, H)
        for part, rows in (("q", 128), ("k", 64), ("v", 64)):
            state[f"layers.{i}.self_attn.{part}_proj.weight"] = exact(r, rows, H)
        for part in "qk":
            state[f"layers.{i}.self_attn.{part}_norm.weight"] = 1 + exact(r, HEAD)
        state[f"layers.{i}.self_attn.o_proj.weight"] = exact(r, H, 128)
        for part, shape in (("gate", (96, H)), ("up", (96, H)), ("down", (H, 96))):
            state[f"layers.{i}.mlp.{part}_proj.weight"] = exact(r, *shape)
    return config, state


class Reference:
    """With the target's states s of the positions before the last token t, side by side,

    c = norm(fc · s)                         of each position; the same for all layers
    x = embedding of [t, mask, mask, …]      at the position of t and those after it
    y = x + attention                        queries of norm(x); keys and values of [c; norm(x)]
    x' = y + MLP(norm(y))                    masks see each other and t, in both directions
    logits = head · norm(x')                 row i is of the token at the position of row i
    """

    def __init__(self, config: dict[str, Any], state: dict[str, Any], net: Any) -> None:
        self.config, self.state, self.net = config, state, net

    def drafts(self, tokens: list[int], count: int) -> list[Any]:
        with torch.no_grad():
            out = self.net(torch.tensor([tokens[:-1]]), output_hidden_states=True)
            states = torch.cat([out.hidden_states[i + 1][0] for i in READ], -1)
            c = self.norm(states @ self.state["fc.weight"].T, "hidden_norm")
            x = self.net.model.embed_tokens(torch.tensor([tokens[-1], *[MASK] * count]))
            for i in range(2):
                x = x + self.attention(self.norm(x, f"layers.{i}.input_layernorm"), c, i)
                h = self.norm(x, f"layers.{i}.post_attention_layernorm")
                gate, up = (self.linear(h, f"layers.{i}.mlp.{p}_proj") for p in ("gate", "up"))
                x = x + self.linear(
                    torch.nn.functional.silu(gate) * up, f"layers.{i}.mlp.down_proj"
                )
            return list(self.net.lm_head(self.norm(x, "norm"))[1:])

    def norm(self, x: Any, name: str) -> Any:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.state[f"{name}.weight"]

    def linear(self, x: Any, name: str) -> Any:
        return x @ self.state[f"{name}.weight"].T

    def attention(self, h: Any, c: Any, i: int) -> Any:
        name, rows = f"layers.{i}.self_attn", torch.cat([c, h])
        at = torch.arange(len(rows))
        q = self.heads(h, f"{name}.q", at[len(c) :])
        k = self.heads(rows, f"{name}.k", at).repeat_interleave(2, 0)
        v = self.linear(rows, f"{name}.v_proj").unflatten(-1, (-1, HEAD)).transpose(0, 1)
        window = self.config.get("layer_types", ["full_attention"] * 2)[i] == "sliding_attention"
        near = at[None] > at[len(c) :, None] - (12 if window else 1000)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v.repeat_interleave(2, 0), attn_mask=near
        )
        return self.linear(out.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def heads(self, x: Any, name: str, at: Any) -> Any:
        x = self.norm(self.linear(x, f"{name}_proj").unflatten(-1, (-1, HEAD)), f"{name}_norm")
        angles = at[:, None] * THETA ** (-torch.arange(HEAD // 2) / (HEAD // 2))
        (a, b), cos, sin = x.chunk(2, -1), angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).transpose(0, 1)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_published_mathematics(
    kind: str, backend: str, tmp_path: Path
) -> None:
    net = save_target(tmp_path / "target", KINDS[kind][1])
    config, state = random_head(kind)
    model = with_head(tmp_path / "target", save_head(tmp_path / "head", config, state))
    reference = Reference(config, state, net)
    for made in drafts_of(model, backend):
        expected = reference.drafts(made.tokens, len(made.noise))
        check_draft(made, expected, backend, chain=False)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_head_never_changes_an_answer(backend: str, tmp_path: Path) -> None:
    """It drafts the last token again, as a damped target nearly does: a mask, whose embedding is
    zero, gets a part of the one value that is not zero, which is the last token's embedding."""
    net = save_target(tmp_path / "target", True, 0.1)
    net.model.embed_tokens.weight.data[MASK] = 0.0
    net.save_pretrained(tmp_path / "target")
    config, state = random_head("full")
    state = {name: t * 0.002 if t.dim() > 1 else torch.ones_like(t) for name, t in state.items()}
    state["hidden_norm.weight"] *= 0.0
    state["layers.0.self_attn.v_proj.weight"] += torch.eye(H)
    for key_head in range(2):
        to, own = slice(HEAD * key_head, HEAD * (key_head + 1)), 2 * HEAD * key_head
        state["layers.0.self_attn.o_proj.weight"][to, own : own + HEAD] += torch.eye(HEAD)
    head = save_head(tmp_path / "head", config, state)
    compare_answers(with_head(tmp_path / "target", head), backend, "head", 32)


def changed(**values: Any) -> Callable[[Any, Any], object]:
    return lambda config, _: config.update(values)


def inside(**values: Any) -> Callable[[Any, Any], object]:
    return lambda config, _: config["dflash_config"].update(values)


DAMAGE: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "another kind": (
        changed(architectures=["DFlash2DraftModel"]),
        "DFlashDraftModel and qwen3 are",
    ),
    "another layer": (changed(model_type="llama"), "'llama'.*: DFlashDraftModel and qwen3"),
    "unknown key": (inside(selector_rank=256), "selector_rank is 256: not known for dflash"),
    "causal masks": (inside(causal=True), "causal is True: only False"),
    "another model": (changed(num_target_layers=36), "a model of 36 layers; the model has 5"),
    "hidden size": (changed(hidden_size=96), "states of 96 values; the model's have 64"),
    "vocabulary": (changed(vocab_size=300), "vocabulary of 300 tokens; the model has 260"),
    "layer order": (inside(target_layer_ids=[2, 0]), "ascending order"),
    "no such layer": (inside(target_layer_ids=[0, 4]), "from 0 to 3"),
    "no layers": (lambda c, _: c["dflash_config"].pop("target_layer_ids"), "target_layer_ids is"),
    "no mask": (lambda c, _: c["dflash_config"].pop("mask_token_id"), "mask_token_id is missing"),
    "no such mask": (inside(mask_token_id=260), "mask_token_id is 260"),
    "a missing matrix": (lambda _, s: s.pop("fc.weight"), "fc.weight is missing"),
    "another width": (inside(target_layer_ids=[0, 1, 2]), "fc.weight has shape"),
    "an extra matrix": (lambda _, s: s.update({"extra.weight": s["norm.weight"]}), "extra.weight"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_head_that_does_not_fit_the_model_is_refused_by_name(what: str, tmp_path: Path) -> None:
    save_target(tmp_path / "target", False)
    config, state = random_head("full")
    damage, why = DAMAGE[what]
    config = json.loads(json.dumps(config))
    damage(config, state)
    head = save_head(tmp_path / "head", config, {n: t.clone() for n, t in state.items()})
    with pytest.raises(ModelError, match=why):
        with_head(tmp_path / "target", head)
