"""Gemma 4 assistants: their drafts are those of transformers' code; they change no output; one that
does not fit the model is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_engine import compare_answers
from draft_heads import check_draft, drafts_of, exact, save_head, with_head

from tiny_tokenizer import train_tokenizer
from verbatim.backend.reference.backend import ReferenceBackend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import ModelError, ParameterError
from verbatim.base.params import SamplingParams
from verbatim.bench.speculation import curve
from verbatim.convert.export_model import model_metadata, model_tensors
from verbatim.engine.calls.llm import LLM
from verbatim.engine.loading.load_engine import _open_layer
from verbatim.files.gguf_write import write_gguf
from verbatim.model.loading.load import load_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

H, VOCAB, WINDOW = 64, 260, 12
SLIDING, FULL = "sliding_attention", "full_attention"
TARGET = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL] * 3,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LAYERS = TARGET | {
    "model_type": "gemma4_text",
    "layer_types": [SLIDING, SLIDING, FULL],
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "one head": {},
    "clusters": {
        "use_ordered_embeddings": True,
        "num_centroids": 20,
        "centroid_intermediate_top_k": 5,
    },
}


def save_target(folder: Path, damping: float = 1.0) -> Any:
    """A random Gemma 4 in the layout of transformers. `damping` multiplies what its layers add."""
    torch.manual_seed(0)
    net = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**TARGET)).eval()
    for name, p in net.named_parameters():
        if "norm" in name:
            p.data.normal_(1.0, 0.1)
            p.data.mul_(damping if "post_" in name else 1.0)
        else:
            p.data.normal_(0.0, 0.25 if "embed" in name else H**-0.5)
    net.save_pretrained(folder)
    return net


def random_assistant(kind: str, hidden: int = 32) -> tuple[dict[str, Any], Any]:
    """config.json and the network of a random assistant, narrower than its target."""
    config = transformers.Gemma4AssistantConfig(
        text_config=LAYERS | {"hidden_size": hidden}, backbone_hidden_size=H, **KINDS[kind]
    )
    r, net = np.random.default_rng(0), transformers.Gemma4AssistantForCausalLM(config).eval()
    for name, values in net.state_dict().items():
        if values.dtype == torch.long:
            values.copy_(torch.tensor(r.permutation(VOCAB)))
        elif values.ndim > 1:
            values.copy_(exact(r, *values.shape, bits=8))
        else:
            values.copy_(torch.tensor(r.uniform(0.5, 1.5, values.shape)))
            if name.endswith("layer_scalar"):
                values.fill_(0.75)
    return json.loads(config.to_json_string(use_diff=False)), net


def tensors_of(net: Any) -> dict[str, Any]:
    """What transformers saves: the output matrix is the embedding."""
    return {n: t.clone() for n, t in net.state_dict().items() if n != "lm_head.weight"}


def expected_drafts(net: Any, assistant: Any, tokens: list[int], noise: list[Any]) -> list[Any]:
    """Logits of the drafts after `tokens`, each after the best with its noise, of transformers.

    A query at the position of the last token, whose key is not computed yet, sees the window before
    it. (transformers' own loop cuts two positions later: it counts from the last key.)"""
    with torch.no_grad():
        known = torch.tensor([tokens[:-1]])
        out = net(known, output_hidden_states=True, return_shared_kv_states=True)
        shared = dict(out.shared_kv_states)
        shared[SLIDING] = tuple(part[:, :, 1 - WINDOW :] for part in shared[SLIDING])
        state, token, found = out.hidden_states[-1][:, -1:], tokens[-1], []
        for each in noise:
            embedding = net.get_input_embeddings()(torch.tensor([[token]]))
            done = assistant(
                inputs_embeds=torch.cat([embedding, state], -1),
                position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=shared,
            )
            logits = done.logits[0, 0]
            found.append(logits.masked_fill(logits == logits.min(), -1e30))
            state, token = done.last_hidden_state, int((found[-1] + each).argmax())
    return found


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_transformers(kind: str, backend: str, tmp_path: Path) -> None:
    net = save_target(tmp_path / "target")
    config, assistant = random_assistant(kind)
    head = save_head(tmp_path / "head", config, tensors_of(assistant))
    for made in drafts_of(with_head(tmp_path / "target", head), backend):
        expected = expected_drafts(net, assistant, made.tokens, made.noise)
        check_draft(made, expected, backend, chain=True)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_assistant_never_changes_an_answer(kind: str, backend: str, tmp_path: Path) -> None:
    """It passes on the embedding of the last token, as a damped target nearly does."""
    net = save_target(tmp_path / "target", 0.02)
    config, assistant = random_assistant(kind, hidden=H)
    for name, values in assistant.state_dict().items():
        if "post_" in name and "norm" in name:
            values.fill_(0.02)
        elif "norm" in name or "layer_scalar" in name:
            values.fill_(1.0)
    assistant.lm_head.weight.data.copy_(net.lm_head.weight.data)
    assistant.pre_projection.weight.data.copy_(torch.eye(H, 2 * H))
    assistant.post_projection.weight.data.copy_(torch.eye(H))
    if assistant.masked_embedding is not None:  # the mean of a cluster finds its tokens
        order = assistant.masked_embedding.token_ordering
        means = net.lm_head.weight.data[order].unflatten(0, (20, -1)).mean(1)
        assistant.masked_embedding.centroids.weight.data.copy_(means)
    head = save_head(tmp_path / "head", config, tensors_of(assistant))
    compare_answers(with_head(tmp_path / "target", head), backend, "head", 32)


def changed(**values: Any) -> Callable[[Any, Any], object]:
    return lambda config, _: config.update(values)


def in_layers(**values: Any) -> Callable[[Any, Any], object]:
    return lambda config, _: config["text_config"].update(values)


ORDER = "masked_embedding.token_ordering"
DAMAGE: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "another kind": (
        changed(model_type="gemma4_unified_assistant"),
        "only .gemma4_assistant. is supported",
    ),
    "unknown key": (changed(temperature_of_heads=2), "temperature_of_heads"),
    "hidden size": (changed(backbone_hidden_size=96), "states of 96 values; the model's have 64"),
    "vocabulary": (in_layers(vocab_size=300), "vocabulary of 300 tokens; the model has 260"),
    "window": (in_layers(sliding_window=16), "layer 0 is sliding_attention with another window"),
    "layer types": (in_layers(layer_types=[FULL] * 3), "layer 0|per_layer_config"),
    "no output matrix": (changed(tie_word_embeddings=False), "tie_word_embeddings is False"),
    "layer inputs": (
        in_layers(hidden_size_per_layer_input=8, vocab_size_per_layer_input=260),
        "gemma4 without layer inputs",
    ),
    "centroids": (changed(num_centroids=7), "num_centroids is 7: a divisor of 260"),
    "no token ids": (lambda _, s: s.pop(ORDER), f"{ORDER} is not a list of 260 whole numbers"),
    "an id twice": (lambda _, s: s[ORDER].fill_(3), f"{ORDER} does not name every token once"),
    "a missing matrix": (lambda _, s: s.pop("pre_projection.weight"), "pre_projection.weight is"),
    "an extra matrix": (lambda _, s: s.update({"x.weight": s["model.norm.weight"]}), "x.weight"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_an_assistant_that_does_not_fit_is_refused_by_name(what: str, tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    config, assistant = random_assistant("clusters")
    state, (damage, why) = tensors_of(assistant), DAMAGE[what]
    damage(config, state)
    head = save_head(tmp_path / "head", config, {n: t.clone() for n, t in state.items()})
    with pytest.raises(ModelError, match=why):
        with_head(tmp_path / "target", head)


def test_the_engine_and_the_benchmark_open_an_assistant(tmp_path: Path) -> None:
    """The benchmark's sequence is none of the scheduler's."""
    target = tmp_path / "target"
    save_target(target)
    train_tokenizer(target, vocab=VOCAB)
    config, assistant = random_assistant("one head")
    head = save_head(tmp_path / "head", config, tensors_of(assistant))
    with LLM(target, speculate=f"head:{head}", backend="reference", context=256) as llm:
        data = curve(llm, "head", 1, tokens=4)
        llm.core.drafting.adaptive = False
        done = llm.generate("the cat", SamplingParams(max_tokens=8, ignore_eos=True))
    assert all(rows[-1]["drafted"] > 0 for rows in data["tasks"].values())
    assert done.usage.drafted_tokens > 0


def test_a_backend_without_assistants_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_target(tmp_path / "target")
    config, assistant = random_assistant("one head")
    head = save_head(tmp_path / "head", config, tensors_of(assistant))
    monkeypatch.setattr(ReferenceBackend, "draft_layer", lambda self, model: None)
    model = with_head(tmp_path / "target", head)
    with pytest.raises(ParameterError, match="the reference backend runs no Gemma 4 assistants"):
        _open_layer(EngineConfig(speculate="head:x"), model, ReferenceBackend(model))


def test_it_is_refused_for_another_family_and_fits_the_gguf_file(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    config, assistant = random_assistant("one head")
    head = save_head(tmp_path / "head", config, tensors_of(assistant))
    model = load_model(tmp_path / "target")
    metadata, extra = model_metadata(model, "tiny")
    write_gguf(tmp_path / "target.gguf", metadata, [*extra, *model_tensors(model)])
    opened = with_head(tmp_path / "target.gguf", head)
    assert opened.draft is not None
    assert [layer.kv_layer for layer in opened.draft.spec.layers] == [2, 2, 3]
    layer = ReferenceBackend(opened, EngineConfig()).draft_layer(opened.draft)
    assert layer.block_bytes() == (), "it has no cache of its own"
    llama = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=H,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    transformers.LlamaForCausalLM(llama).save_pretrained(tmp_path / "llama")
    with pytest.raises(ModelError, match="an assistant for gemma4; the model is llama"):
        with_head(tmp_path / "llama", head)
