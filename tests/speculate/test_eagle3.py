"""EAGLE-3 heads in the format of speculators: their drafts are those of the published mathematics,
written in PyTorch here; they change no output; one that does not fit the model is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_engine import TOLERANCE, compare_answers, engine, proposals
from draft_heads import exact, save_head, with_head

from tiny_tokenizer import train_tokenizer
from verbatim.backend import open_backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import ModelError, ParameterError, UnsupportedError
from verbatim.base.params import SamplingParams
from verbatim.base.records import SeqStep, StepPlan
from verbatim.bench.speculation import curve
from verbatim.engine.calls.llm import LLM
from verbatim.engine.loading.load_check import check_load
from verbatim.model.loading.load import Model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

H, VOCAB, LAYERS, EPS, THETA = 64, 260, 3, 1e-5, 10000.0
CAPTURED = [1, 2, 3]  # 3: the output of the last layer
LAYER = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 512,
}
# Kinds of heads: what differs in config.json, and in its layer's config.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "qwen3": (
        {"draft_vocab_size": VOCAB, "norm_before_residual": False, "norm_before_fc": True},
        {"model_type": "qwen3", "num_hidden_layers": 2},
    ),
}


def random_head(kind: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and tensors of a random head."""
    changes, layer = KINDS[kind]
    r = np.random.default_rng(seed)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"verifier": {"architectures": ["LlamaForCausalLM"]}},
        "transformer_layer_config": LAYER | layer,
        "draft_vocab_size": 96,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": CAPTURED,
        **changes,
    }
    qwen, vocab = kind == "qwen3", config["draft_vocab_size"]
    state = {"fc.weight": exact(r, H, 3 * H), "lm_head.weight": exact(r, vocab, H)}
    state["norm.weight"] = 1 + exact(r, H)
    if config.get("norm_before_fc"):
        state["input_norm.weight"] = 1 + exact(r, 3 * H)
    for i in range(config["transformer_layer_config"]["num_hidden_layers"]):
        name, read = f"layers.{i}", H if i else 2 * H
        for norm in ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"][i:])):
            state[f"{name}.{norm}.weight"] = 1 + exact(r, H)
        for part, rows in (("q", 128), ("k", 64), ("v", 64)):
            state[f"{name}.self_attn.{part}_proj.weight"] = exact(r, rows, read)
            if qwen and part != "v":
                state[f"{name}.self_attn.{part}_norm.weight"] = 1 + exact(r, 32)
        state[f"{name}.self_attn.o_proj.weight"] = exact(r, H, 128)
        for part in ("gate", "up"):
            state[f"{name}.mlp.{part}_proj.weight"] = exact(r, 96, H)
        state[f"{name}.mlp.down_proj.weight"] = exact(r, H, 96)
    if qwen:  # an embedding of its own
        state["embed_tokens.weight"] = exact(r, VOCAB, H)
    else:
        ids = torch.tensor(np.sort(r.permutation(VOCAB)[:vocab]))
        state["d2t"] = ids - torch.arange(vocab)
        state["t2d"] = torch.isin(torch.arange(VOCAB), ids)
    return config, state


def save_target(folder: Path, damping: float = 1.0) -> Any:
    """A random llama in the layout of transformers. `damping` multiplies what its layers add."""
    torch.manual_seed(0)
    sizes = {k: v for k, v in LAYER.items() if k not in ("model_type", "num_hidden_layers")}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=LAYERS, eos_token_id=1, tie_word_embeddings=False
    )
    net = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in net.named_parameters():
        size = damping if "o_proj" in name or "down_proj" in name else 1.0
        mean, deviation = (1.0, 0.1) if "norm" in name else (0.0, size * H**-0.5)
        parameter.data.normal_(mean, 0.7 if "embed" in name else deviation)
    net.save_pretrained(folder)
    return net


def states_of(net: Any, tokens: list[int]) -> Any:
    """The inputs of the captured layers and the last layer's output, [tokens, 3 H]."""
    found: list[Any] = []
    hook = net.model.norm.register_forward_pre_hook(lambda _, given: found.append(given[0][0]))
    with torch.no_grad():
        out = net(torch.tensor([tokens]), output_hidden_states=True)
    hook.remove()
    return torch.cat([out.hidden_states[1][0], out.hidden_states[2][0], found[0]], -1)


class Reference:
    """With the target's states of position p and the token t at p + 1,

    x      = fc · states                     (norm_before_fc: of their norm)
    h      = [norm(embedding(t)); norm(x)]   what the first layer's attention reads
    y      = x + attention(h), or norm(x) + attention(h) with norm_before_residual
    x'     = y + MLP(norm(y))                after further layers, x of the next draft
    logits = lm_head · norm(x')              of the tokens i + d2t[i]
    """

    def __init__(self, config: dict[str, Any], state: dict[str, Any], embed: Any) -> None:
        self.config, self.state, self.layer = config, state, config["transformer_layer_config"]
        self.embed = state.get("embed_tokens.weight", embed)
        ids = torch.arange(len(state["lm_head.weight"]))
        self.ids = ids + state["d2t"] if "d2t" in state else ids

    def drafts(self, tokens: list[int], states: Any, count: int) -> list[Any]:
        """Logits of `count` drafts after `tokens`, over all tokens, each after the best one."""
        x = states
        if self.config.get("norm_before_fc"):
            x = self.norm(x, "input_norm")
        rows, known, found = list(x @ self.state["fc.weight"].T), tokens[1:], []
        for _ in range(count):
            x = self.layers(torch.stack(rows), self.embed[torch.tensor(known)])[-1]
            logits = torch.full((VOCAB,), -torch.inf)
            logits[self.ids] = self.state["lm_head.weight"] @ self.norm(x, "norm")
            found.append(logits)
            rows, known = [*rows, x], [*known, int(logits.argmax())]
        return found

    def norm(self, x: Any, name: str) -> Any:
        scaled = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        return scaled * self.state[f"{name}.weight"]

    def layers(self, x: Any, embedding: Any) -> Any:
        for i in range(self.layer["num_hidden_layers"]):
            name = f"layers.{i}"
            h = self.norm(embedding if not i else x, f"{name}.input_layernorm")
            if not i:
                normed = self.norm(x, f"{name}.hidden_norm")
                h = torch.cat([h, normed], -1)
                x = normed if self.config["norm_before_residual"] else x
            x = x + self.attention(h, f"{name}.self_attn")
            h = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up = (h @ self.state[f"{name}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            down = self.state[f"{name}.mlp.down_proj.weight"]
            x = x + (torch.nn.functional.silu(gate) * up) @ down.T
        return x

    def attention(self, h: Any, name: str) -> Any:
        q, k, v = (self.heads(h, name, p) for p in "qkv")
        k, v = (part.repeat_interleave(2, 0) for part in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(0, 1).flatten(1) @ self.state[f"{name}.o_proj.weight"].T

    def heads(self, h: Any, name: str, part: str) -> Any:
        x = (h @ self.state[f"{name}.{part}_proj.weight"].T).unflatten(-1, (-1, 32))
        if part == "v":
            return x.transpose(0, 1)
        if f"{name}.{part}_norm.weight" in self.state:
            x = self.norm(x, f"{name}.{part}_norm")
        angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(16) / 16)
        (a, b), cos, sin = x.chunk(2, -1), angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).transpose(0, 1)


def check_drafts(kind: str, backend: str, path: Path, tokens: int = 8, quiet: int = 0) -> None:
    """Chains of drafts, while some are rejected, after a prompt in chunks and `quiet` steps without
    drafts."""
    net = save_target(path / "target")
    config, state = random_head(kind)
    model = with_head(path / "target", save_head(path / "head", config, state))
    prompt = [97 + (7 * i) % 11 for i in range(21)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with engine(model, backend, "head", step_tokens=16, kv_blocks=9) as llm:
        made = proposals(llm, "head")
        drafting: Any = llm.core.drafting
        propose, steps = drafting.propose, count()
        drafting.propose = lambda requests: propose(requests) if next(steps) >= quiet else None
        done = llm.generate(prompt, params)
    states = states_of(net, [*prompt, *done.token_ids])
    reference = Reference(config, state, net.model.embed_tokens.weight.data)
    assert len(made) >= min(3, tokens - quiet)
    for view, draft in made:
        known = list(view.tokens)
        expected = reference.drafts(known, states[: len(known) - 1], len(draft.tokens))
        odds = 1.0  # that this draft and those before it are accepted
        for depth, (logits, token) in enumerate(zip(expected, draft.tokens, strict=True)):
            spread = logits[reference.ids].max() - logits[reference.ids].min()
            assert logits[token] >= logits.max() - TOLERANCE[backend] * spread
            if token != logits.argmax():
                break  # a near tie: the chain goes on from another token
            odds *= float(logits.softmax(-1)[token])
            stated = draft.probs[depth]
            assert abs(stated - odds) <= TOLERANCE[backend] * odds


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_published_mathematics(
    kind: str, backend: str, tmp_path: Path
) -> None:
    check_drafts(kind, backend, tmp_path)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_captured_states_are_those_of_transformers(backend: str, tmp_path: Path) -> None:
    """They come with the final states and only where a step asks for them."""
    net = save_target(tmp_path / "target")
    model = with_head(tmp_path / "target", save_head(tmp_path / "head", *random_head("llama")))
    opened = open_backend(model, EngineConfig(backend=backend, threads=1))
    opened.allocate((4,))
    tokens = [[97 + (5 * i) % 9 for i in range(count)] for count in (9, 6)]
    first, second = (
        SeqStep(i, tuple(tokens[i]), 0, ((2 * i, 2 * i + 1),), hidden=bool(i)) for i in range(2)
    )
    asked, not_asked = opened.execute(StepPlan(0, (second, first))).sequences
    assert not_asked.captured is None is not_asked.hidden
    assert opened.execute(StepPlan(1, (first,))).sequences[0].captured is None
    expected = states_of(net, tokens[1]).numpy()
    assert asked.captured is not None
    assert np.abs(asked.captured - expected).max() < 2e-2 * np.abs(expected).max()
    opened.close()


def agreeing_model(path: Path) -> Model:
    """A damped target and a head that agrees with it often."""
    net = save_target(path / "target", 0.1)
    return with_head(path / "target", save_head(path / "head", *agreeing_head(net)))


def agreeing_head(net: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A head that passes on the embedding of the last token, as a damped target nearly does."""
    config, state = random_head("llama")
    state = {name: t if t.dim() < 2 else t * 0.02 for name, t in state.items()}
    turn = torch.eye(H)
    for part in "qkv":  # attention to equal tokens, which gives their embedding
        name = f"layers.0.self_attn.{part}_proj.weight"
        rows = len(state[name])
        state[name][:, :H] += (1.0 if part == "v" else 3.0) * turn.repeat(rows // H, 1)
    state["layers.0.self_attn.o_proj.weight"][:, :H] += turn
    for name in state:
        if "norm" in name:
            state[name] = torch.ones_like(state[name])
    config |= {"norm_before_residual": False, "draft_vocab_size": VOCAB}
    config["transformer_layer_config"] = LAYER | {"rope_theta": 1e9}
    del state["d2t"], state["t2d"]
    return config, state | {"lm_head.weight": net.lm_head.weight.data.clone()}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_head_never_changes_an_answer(backend: str, tmp_path: Path) -> None:
    compare_answers(agreeing_model(tmp_path), backend, "head", 32)


def changed(**values: Any) -> Callable[[Any, Any], object]:
    return lambda config, _: config.update(values)


def in_layer(**values: Any) -> Callable[[Any, Any], object]:
    return lambda config, _: config["transformer_layer_config"].update(values)


VERIFIER = {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}
DAMAGE: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "another format": (lambda c, _: c.pop("speculators_model_type"), "no speculators_model_type"),
    "another kind": (changed(speculators_model_type="eagle"), "speculators_model_type is 'eagle'"),
    "unknown key": (changed(temperature_of_heads=2), "temperature_of_heads"),
    "another model": (changed(speculators_config=VERIFIER), "a head for Qwen3ForCausalLM; the"),
    "hidden size": (changed(target_hidden_size=96), "states of 96 values; the model's have 64"),
    "vocabulary": (in_layer(vocab_size=300), "vocabulary of 300 tokens; the model has 260"),
    "layer order": (changed(eagle_aux_hidden_state_layer_ids=[2, 1, 3]), "ascending order"),
    "no such layer": (changed(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), "from 0 to 3"),
    "too few layers": (changed(eagle_aux_hidden_state_layer_ids=[1, 3]), "fc.weight has shape"),
    "another layer": (in_layer(model_type="gemma2"), "model_type 'gemma2'"),
    "no rule for the norm": (lambda c, _: c.pop("norm_before_residual"), "norm_before_residual"),
    "no token ids": (lambda _, s: s.pop("d2t"), "d2t is not a list of 96 whole numbers"),
    "an id twice": (lambda _, s: s["d2t"].__setitem__(1, s["d2t"][0] - 1), "name 96 of"),
    "two lists of ids": (lambda _, s: s.update(t2d=~s["t2d"]), "t2d and d2t name different"),
    "a missing matrix": (lambda _, s: s.pop("fc.weight"), "fc.weight is missing"),
    "an extra matrix": (lambda _, s: s.update({"extra.weight": s["norm.weight"]}), "extra.weight"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_head_that_does_not_fit_the_model_is_refused_by_name(what: str, tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    config, state = random_head("llama")
    damage, why = DAMAGE[what]
    config = json.loads(json.dumps(config))
    damage(config, state)
    head = save_head(tmp_path / "head", config, {n: t.clone() for n, t in state.items()})
    with pytest.raises(ModelError, match=why):
        with_head(tmp_path / "target", head)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_engine_opens_with_a_head(backend: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    net = save_target(target, 0.1)
    train_tokenizer(target, vocab=VOCAB)
    head = save_head(tmp_path / "head", *agreeing_head(net))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = {}
    for mode in (f"head:{head}", "off"):
        with LLM(target, speculate=mode, backend=backend, threads=1, context=256) as llm:
            llm.core.drafting.adaptive = False
            found[mode] = llm.generate("the cat sat on the mat", params)
            if mode == "off":
                with pytest.raises(UnsupportedError, match=r"opened with a draft head"):
                    llm.generate("a", SamplingParams(speculate="head", max_tokens=2))
            else:
                data = curve(llm, "head", 1, tokens=8)
    assert data["pass_seconds"][0]["break_even"] == 1.0
    assert found[f"head:{head}"].token_ids == found["off"].token_ids
    assert found[f"head:{head}"].usage.accepted_tokens > 0


def test_a_head_is_checked_before_a_load(tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_target(target)
    train_tokenizer(target, vocab=VOCAB)
    good = save_head(tmp_path / "good", *random_head("llama"))
    check_load(target, {"speculate": f"head:{good}"}, offline=True)
    config, state = random_head("llama")
    bad = save_head(tmp_path / "bad", config | {"target_hidden_size": 96}, state)
    with pytest.raises(ModelError, match="states of 96 values"):
        check_load(target, {"speculate": f"head:{bad}"}, offline=True)
    with pytest.raises(ParameterError, match="'head' needs a draft head: head:PATH"):
        LLM(target, speculate="head", backend="reference")
