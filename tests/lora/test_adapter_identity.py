"""Adapters in a batch change nothing: eight adapters and the base model in one batch give the bits
of each alone, on every backend, through prefix hits, chunks, preemption and speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_files import adapted, open_llm, write_peft

from verbatim.base.errors import ParameterError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.engine.calls.llm import LLM
from verbatim.model.loading.load import Model
from verbatim.testing.tiny_models import tiny_model

COUNT = 8
NAMES = [f"a{i}" for i in range(COUNT)]
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
PROMPTS = ["The adapters share a batch of rows", "and a prefix that is longer than one block"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Eight adapters of different ranks, scales and targets."""
    spec = tiny_model("llama", **SHAPE).spec
    folder = tmp_path_factory.mktemp("adapters")
    all_targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return {
        name: write_peft(
            folder / name,
            spec,
            seed=i,
            r=[1, 2, 3, 4, 8, 16, 20, 64][i],
            lora_alpha=[1, 4, 3, 16, 8, 16, 10, 32][i],
            targets=all_targets if i % 2 else all_targets[i // 2 : i // 2 + 3],
        )
        for i, name in enumerate(NAMES)
    }


def model_of(adapters: dict[str, Path], kind: str = "q8_0") -> Model:
    return adapted(tiny_model("llama", type=kind, **SHAPE), adapters)


def bits(done: Completion) -> tuple[Any, ...]:
    return done.token_ids, [row.logprob for row in done.logprobs], done.fingerprint


def params_of(adapter: str, **more: Any) -> SamplingParams:
    values = {"max_tokens": 10, "seed": 5, "temperature": 0.8, "logprobs": 2, **more}
    return SamplingParams(adapter=adapter, **values)


def each_alone(llm: LLM, **more: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name in ["", *NAMES]:
        found[name] = [bits(llm.generate(prompt, params_of(name, **more))) for prompt in PROMPTS]
    return found


def together(llm: LLM, **more: Any) -> dict[str, list[Any]]:
    order = [(name, prompt) for prompt in PROMPTS for name in [*NAMES, ""]]
    done = llm.generate(
        [prompt for _, prompt in order], [params_of(name, **more) for name, _ in order]
    )
    found: dict[str, list[Any]] = {}
    for (name, _), one in zip(order, done, strict=True):
        found.setdefault(name, []).append(bits(one))
    return found


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("q8_0", "reference"),
        ("q8_0", "cpu"),
        pytest.param("bf16", "reference", marks=pytest.mark.soak),
        ("bf16", "cpu"),
    ],
)
def test_eight_adapters_and_none_in_one_batch(
    adapters: dict[str, Path], backend: str, kind: str
) -> None:
    model = model_of(adapters, kind)
    with open_llm(model, backend, prefix_cache=False, speculate="off") as llm:
        alone = each_alone(llm)
    assert len({repr(found) for found in alone.values()}) == COUNT + 1, "every adapter has a say"
    with open_llm(model, backend) as llm:  # prefix cache and speculation
        assert together(llm) == alone
        assert together(llm) == alone  # now with prefix hits
    # chunks of seven tokens, and a cache so small that sequences are preempted
    with open_llm(model, backend, step_tokens=7, kv_blocks=12, speculate="ngram") as llm:
        assert together(llm) == alone
        assert llm.stats()["preemptions_total"] > 0
    with open_llm(tiny_model("llama", type=kind, **SHAPE), backend) as llm:
        base = [bits(llm.generate(prompt, params_of(""))) for prompt in PROMPTS]
        assert base == alone[""], "loaded adapters change no bit of the base model"


def test_prefix_cache_never_crosses_adapters(adapters: dict[str, Path]) -> None:
    text = "x" * 70
    with open_llm(model_of(adapters)) as llm:
        params = params_of("", max_tokens=1)
        llm.generate(text, params)
        for name in NAMES:
            first = llm.generate(text, params.with_(adapter=name))
            assert first.usage.cached_tokens == 0, name
            assert llm.generate(text, params.with_(adapter=name)).usage.cached_tokens >= 64
        assert llm.generate(text, params).usage.cached_tokens >= 64


def test_beams_choices_and_embeddings_keep_the_adapter(adapters: dict[str, Path]) -> None:
    with open_llm(model_of(adapters), pooling="mean") as llm:
        beams = SamplingParams(num_beams=3, max_tokens=6, adapter="a3")
        crowd = llm.generate([PROMPTS[0]] * 2, [beams, beams.with_(adapter="")])
        assert crowd[0].token_ids == llm.generate(PROMPTS[0], beams).token_ids
        assert crowd[0].token_ids != crowd[1].token_ids
        several = llm.generate(PROMPTS[0], params_of("a3", n=3))
        assert several.choices[0].token_ids == (llm.generate(PROMPTS[0], params_of("a3")).token_ids)
        assert (llm.embed("text", adapter="a3") != llm.embed("text")).any()
        scores = [llm.score("some text", adapter=name).perplexity for name in ("", "a3", "a4")]
        assert len(set(scores)) == 3


def test_fingerprint_and_receipt_name_the_adapter(adapters: dict[str, Path]) -> None:
    from verbatim.explain.receipt import compare, read_receipt

    with open_llm(model_of(adapters)) as llm:
        done = llm.generate(PROMPTS[0], params_of("a1", receipt=True))
        base = llm.generate(PROMPTS[0], params_of("", receipt=True))
        assert base.fingerprint == llm.fingerprint != done.fingerprint
        assert done.receipt is not None
        assert base.receipt is not None
        receipt = read_receipt(done.receipt)
        assert receipt["params"]["adapter"] == "a1"
        assert receipt["adapter"] == llm.loaded.adapters[1].digest
        assert "adapter" not in base.receipt
        verdict = compare(receipt, base.choices, {"adapter": "", "digest": receipt["digest"]})
        assert "adapter differs" in str(verdict)


def test_an_unknown_adapter_is_refused(adapters: dict[str, Path]) -> None:
    with open_llm(model_of(adapters)) as llm, pytest.raises(ParameterError, match="loaded are a0"):
        llm.generate("x", SamplingParams(adapter="sql"))
    with open_llm(tiny_model("llama")) as llm, pytest.raises(ParameterError, match="none is load"):
        llm.generate("x", SamplingParams(adapter="sql"))
