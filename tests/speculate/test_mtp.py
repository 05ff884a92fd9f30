"""Draft layers (multi-token prediction): their drafts are those of the published mathematics, and
they change no output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_checkpoints import GLM_OWN, KINDS, State, directory, gguf, random_state
from draft_engine import TOLERANCE, compare_answers, engine, proposals
from draft_reference import DraftReference

from tiny_tokenizer import train_tokenizer
from verbatim.backend.reference import ReferenceBackend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.base.params import SamplingParams
from verbatim.base.records import SeqResult, SeqStep, StepPlan, StepResult
from verbatim.bench.speculation import curve, walk
from verbatim.bench.speculation import final_states as final_states_of
from verbatim.diagnose import needle
from verbatim.engine.calls.llm import LLM
from verbatim.engine.loading.load_engine import _open_layer
from verbatim.model.loading.load import Model, load_model
from verbatim.speculate.draft_policy import Speculator
from verbatim.speculate.layer_proposer import FEW, WINDOW, LayerProposer
from verbatim.speculate.proposer import Draft, SeqView
from verbatim.speculate.step_cost import DEFAULT_ROW_COST


def damped(state: State) -> State:
    """A model whose layers add little, so that the next token depends on the last one mostly, and a
    draft layer that passes its token on: most of its drafts are right."""
    result = dict(state)
    for name, values in state.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            result[name] = values * np.float32(0.2)
        if "norm" in name:
            result[name] = np.full_like(values, np.round(values.mean()))
        if name.endswith((".fc.weight", "eh_proj.weight")):
            own = np.eye(*values.shape, dtype=np.float32)
            result[name] = own + np.float32(0.02) * values
    return result


def checkpoint(path: Path, kind: str, form: str, state: State) -> Model:
    source = directory(path / kind, kind, state)
    if form == "gguf":
        return load_model(gguf(path / f"{kind}.gguf", source, kind, state))
    return load_model(source)


def final_states(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """The target's states of all tokens, by the reference backend in one step."""
    backend = ReferenceBackend(model)
    blocks = -(-len(tokens) // backend.block_size)
    backend.allocate((blocks,) * len(backend.spec.groups))
    tables = (tuple(range(blocks)),) * len(backend.spec.groups)
    plan = StepPlan(0, (SeqStep(0, tuple(tokens), 0, tables, hidden=True),))
    states = backend.execute(plan).sequences[0].hidden
    assert states is not None
    return states


def check_drafts(kind: str, form: str, backend: str, path: Path, tokens: int = 8) -> None:
    """Chains of drafts, while some are accepted and others rejected, after a prompt in chunks."""
    state = random_state(kind, seed=1)
    model = checkpoint(path, kind, form, state)
    reference = DraftReference(kind, state)
    prompt = [97 + (7 * i) % 11 for i in range(21)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with engine(model, backend, "mtp", step_tokens=16, kv_blocks=9) as llm:
        made = proposals(llm, "mtp")
        done = llm.generate(prompt, params)
    states = final_states(model, [*prompt, *done.token_ids])
    assert len(made) >= 3
    for view, draft in made:
        known = len(view.tokens)
        expected = reference.drafts(list(view.tokens), states[: known - 1], len(draft.tokens))
        for logits, token in zip(expected, draft.tokens, strict=True):
            assert logits[token] > logits.max() - TOLERANCE[backend] * np.ptp(logits)
            if token != logits.argmax():
                break  # a near tie: the chain goes on from another token


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_published_mathematics(
    kind: str, form: str, backend: str, tmp_path: Path
) -> None:
    check_drafts(kind, form, backend, tmp_path)


@pytest.mark.parametrize(("kind", "backend"), [("qwen3_next", "reference"), ("glm4_moe", "cpu")])
def test_a_draft_layer_never_changes_an_answer(kind: str, backend: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path, kind, "gguf", damped(random_state(kind)))
    compare_answers(model, backend, "mtp", 24 if backend == "reference" else 48)


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_a_draft_layer_with_its_own_embedding_and_head_uses_them(form: str, tmp_path: Path) -> None:
    """Equal copies, which GLM's files have, are shared with the model."""
    state, own = random_state("glm4_moe"), random_state("glm4_moe", seed=5)
    for tensor, name in {"embed_tokens": "embed_tokens", "shared_head.head": "lm_head"}.items():
        source = own if tensor == "shared_head.head" else state
        whole = f"model.{name}.weight" if name == "embed_tokens" else f"{name}.weight"
        state[f"model.layers.2.{tensor}.weight"] = source[whole].copy()
    if form == "gguf":
        GLM_OWN.update(
            {
                "model.layers.2.embed_tokens.weight": "nextn.embed_tokens.weight",
                "model.layers.2.shared_head.head.weight": "nextn.shared_head_head.weight",
            }
        )
    try:
        model = checkpoint(tmp_path, "glm4_moe", form, state)
    finally:
        for name in list(GLM_OWN)[4:]:
            del GLM_OWN[name]
    assert model.draft is not None
    assert model.draft.weights["embed"] is model.weights["embed"]
    assert np.array_equal(model.draft.weights["head"].to_f32(), own["lm_head.weight"])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda s: s.pop("mtp.norm.weight"), None),  # the model's own norm, as in llama.cpp
        (lambda s: s.pop("mtp.layers.0.mlp.up_proj.weight"), "mlp.up_proj.weight is missing"),
        (lambda s: s.update({"mtp.fc.weight": s["lm_head.weight"]}), "has shape"),
        (lambda s: [s.pop(n) for n in list(s) if n.startswith("mtp.")], "has no draft layer"),
    ],
)
def test_a_draft_layer_that_cannot_be_used_is_refused_by_name(
    damage: Callable[[State], object], why: str | None, tmp_path: Path
) -> None:
    """The model itself loads, and says so; --speculate mtp does not."""
    state = random_state("qwen3_5")
    damage(state)
    model = checkpoint(tmp_path, "qwen3_5", "safetensors", state)
    assert (model.draft is None) == (why is not None)
    backend = ReferenceBackend(model)
    for mode in ("auto", "off"):
        layer = _open_layer(EngineConfig(speculate=mode), model, backend)
        assert (layer is not None) == (why is None and mode == "auto")
    if why is None:
        return
    if "no draft" not in why:
        assert any("draft layer is not used" in text and why in text for text in model.warnings)
    with pytest.raises(ParameterError, match=rf"speculate: 'mtp' is not possible: .*{why}"):
        _open_layer(EngineConfig(speculate="mtp"), model, backend)


def test_a_request_for_a_draft_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "qwen3_5", "safetensors", random_state("qwen3_5"))
    with (
        engine(model, "reference", "suffix") as llm,
        pytest.raises(UnsupportedError, match="'mtp' needs a model whose file has a draft layer"),
    ):
        llm.generate("a", SamplingParams(speculate="mtp", max_tokens=2))


def layer_of(tmp_path: Path, blocks: int = 64) -> tuple[LayerProposer, np.ndarray]:
    """A proposer alone, and states of its model."""
    model = checkpoint(tmp_path, "qwen3_5", "safetensors", random_state("qwen3_5"))
    assert model.draft is not None
    states = final_states(model, [97 + i % 7 for i in range(60)])
    return LayerProposer("mtp", ReferenceBackend(model.draft), blocks), states


def observe(layer: LayerProposer, start: int, states: np.ndarray, seq_id: int = 0) -> None:
    step = SeqStep(seq_id, (97,) * len(states), start, ())
    result = SeqResult(seq_id, hidden=states)
    layer.observe(StepPlan(0, (step,)), StepResult(0, (result,)))


def draft(
    layer: LayerProposer, known: int, seq_id: int = 0, *, probe: bool = False
) -> tuple[int, ...]:
    tokens = [97 + i % 7 for i in range(known)]
    view = SeqView(seq_id, tokens, 8, SamplingParams(temperature=0), 0, 3, probe=probe)
    found = layer.propose([view], 3)
    return found[seq_id].tokens if found else ()


def test_the_cache_of_a_draft_layer_follows_its_sequence(tmp_path: Path) -> None:
    layer, states = layer_of(tmp_path)
    observe(layer, 0, states[:20])
    first = draft(layer, 21)
    assert len(first) == 3
    assert draft(layer, 21) == (), "no state is new"
    observe(layer, 20, states[20:25])  # of which the last three were rejected drafts
    assert len(draft(layer, 23)) == 3
    assert layer._positions[0].cached == 22
    observe(layer, 0, states[:20])  # preempted: the same states again
    assert draft(layer, 21) == first
    observe(layer, 40, states[40:50])  # a gap: the positions between came from the prefix cache
    after_gap = draft(layer, 51)
    assert (layer._positions[0].first, layer._positions[0].cached) == (40, 10)
    observe(layer, 40, states[40:50], seq_id=1)
    assert draft(layer, 51, seq_id=1) == after_gap
    layer.finish(SeqView(0, [], 0, SamplingParams(), 0, 0))
    assert list(layer._positions) == list(layer._tables) == [1]


def test_a_draft_layer_keeps_the_last_states_only(tmp_path: Path) -> None:
    layer, states = layer_of(tmp_path)
    for start in range(0, 3 * WINDOW, 60):
        observe(layer, start, states)
    held = layer._positions[0]
    assert len(held.waiting) == WINDOW
    assert held.first + WINDOW == -(-3 * WINDOW // 60) * 60


def test_what_a_sequence_computes_once_is_no_cost_of_a_draft(tmp_path: Path) -> None:
    """A long prompt is computed before the first draw, and for a mere probe it is not."""
    layer, states = layer_of(tmp_path)
    computed: list[int] = []
    execute = layer._execute

    def watched(steps: Sequence[SeqStep]) -> tuple[SeqResult, ...]:
        computed.append(sum(len(step.tokens) for step in steps))
        return execute(steps)

    layer._execute = watched  # type: ignore[method-assign]
    for seq_id, probe in enumerate((False, True)):
        observe(layer, 0, states[:50], seq_id)
        draft(layer, 51, seq_id, probe=probe)
    assert computed == [49, 1, 1, 1, FEW, 1, 1]
    assert (layer._positions[1].first, layer._positions[1].cached) == (50 - FEW, FEW)


def test_sequences_give_their_blocks_of_a_draft_layer_to_others(tmp_path: Path) -> None:
    layer, states = layer_of(tmp_path, blocks=3)
    observe(layer, 0, states[:20])
    observe(layer, 0, states[:20], seq_id=1)
    first = draft(layer, 21)
    assert draft(layer, 21, seq_id=1) == first, "two blocks each: the first sequence lost its own"
    observe(layer, 20, states[20:21])
    assert len(draft(layer, 22)) == 3
    assert (layer._positions[0].first, layer._positions[0].cached) == (20, 1)


def test_poor_drafts_switch_their_proposer_off(caplog: pytest.LogCaptureFixture) -> None:
    """A layer of random weights is tried on a few tokens, and then costs nothing more."""
    asked: list[int] = []

    class Poor:
        name, token_cost, states_probs = "mtp", 1e-4, False

        def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> Any:
            asked.extend(view.max_drafts for view in views)
            return {v.seq_id: Draft((7,) * v.max_drafts, self.name, 0) for v in views}

        def finish(self, view: SeqView) -> None: ...

        def close(self) -> None: ...

    speculator = Speculator([Poor()])
    speculator.cost.learn(1, 1e-3)
    steps = rows = 0
    for seq_id in range(60):
        tokens = [1]
        for _ in range(96):
            drafts = speculator.drafts([SeqView(seq_id, tokens, 1, SamplingParams(), 0, 15)], 1)
            rows += len(drafts.get(seq_id, ()))
            steps += 1
            tokens.append(5)
        speculator.finish(SeqView(seq_id, tokens, 1, SamplingParams(), 0, 0))
    assert speculator.off == {"mtp"}
    assert [r.getMessage() for r in caplog.records] == [
        "speculate: mtp is switched off: fewer than 5 % of its drafts were accepted"
    ]
    # A draft costs a tenth of a step here, a row 0.15 of one.
    assert (0.1 * sum(asked) + DEFAULT_ROW_COST * rows) / steps < 0.02


def test_a_batch_whose_drafts_do_not_pay_computes_no_states(tmp_path: Path) -> None:
    """A row costs less than a certain draft gains, and more than these drafts do."""
    model = checkpoint(tmp_path, "qwen3_5", "safetensors", random_state("qwen3_5"))
    with engine(model, "reference", "mtp") as llm:
        drafting: Any = llm.core.drafting
        drafting.adaptive = True
        for rows in (1, 2, 4, 8, 16) * 20:
            drafting.cost.learn(rows, 0.9 + 0.1 * rows)
        drafting.learn = lambda *_: None
        asked: list[bool] = []
        with_states = drafting.with_states

        def watched(plan: StepPlan) -> StepPlan:
            found: StepPlan = with_states(plan)
            asked.append(any(step.hidden for step in found.sequences))
            return found

        drafting.with_states = watched
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        llm.generate([[97 + i, 98, 99, 100] for i in range(4)], params)
    assert asked[0]
    assert not any(asked[12:])


def test_the_bench_counts_the_drafts_of_a_real_run(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "qwen3_5", "safetensors", damped(random_state("qwen3_5")))
    with engine(model, "reference", "mtp") as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        done = llm.generate([97 + i % 5 for i in range(30)], params)
        # The step that computes the prompt draws the first token, without drafts.
        prompt, output = [*done.prompt_ids, done.token_ids[0]], done.token_ids[1:]
        states = final_states_of(llm, [*prompt, *output])
        layer = llm.core.drafting.proposers("mtp")[-1]
        for _ in range(2):  # nothing is left of the first walk
            found = walk(layer, prompt, output, 4, states)
            assert found.drafted == done.usage.drafted_tokens
            assert 0 < found.accepted == done.usage.accepted_tokens < found.drafted
        data = curve(llm, "mtp", 1, tokens=8)
    first, *rest = data["pass_seconds"]
    assert first["break_even"] == 1.0
    assert all(row["break_even"] > row["seconds"] / first["seconds"] for row in rest)


def test_a_backend_without_draft_layers_falls_back_to_other_proposers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = checkpoint(tmp_path, "qwen3_5", "safetensors", random_state("qwen3_5"))
    backend = ReferenceBackend(model)
    monkeypatch.setattr(ReferenceBackend, "draft_layer", lambda self, model: None)
    assert _open_layer(EngineConfig(), model, backend) is None
    why = "the reference backend runs no draft layers"
    assert [r.getMessage() for r in caplog.records] == [
        f"speculate: the file's draft layer is not used: {why}"
    ]
    with pytest.raises(ParameterError, match=why):
        _open_layer(EngineConfig(speculate="mtp"), model, backend)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_default_finds_the_draft_layer_by_itself(backend: str, tmp_path: Path) -> None:
    state = damped(random_state("qwen3_5"))
    source = directory(tmp_path / "model", "qwen3_5", state)
    train_tokenizer(source, vocab=260)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = {}
    for mode in ("auto", "mtp", "off"):
        with LLM(source, speculate=mode, backend=backend, threads=1, context=128) as llm:
            llm.core.drafting.adaptive = False
            found[mode] = llm.generate("the cat sat on the mat", params)
    assert found["auto"].token_ids == found["mtp"].token_ids == found["off"].token_ids
    assert found["mtp"].usage.accepted_tokens > 0
    assert found["auto"].usage.drafted_tokens > 0


def test_verify_tries_the_draft_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = directory(tmp_path / "model", "qwen3_5", damped(random_state("qwen3_5")))
    train_tokenizer(source, vocab=260)
    every = needle.circumstances
    monkeypatch.setattr(
        needle, "circumstances", lambda *of: [c for c in every(*of) if c.group == "speculation"]
    )
    found = list(needle.verify(lambda settings: LLM(source, threads=1, **settings), "reference"))
    assert [(one.detail, one.same) for one in found] == [
        (mode, True) for mode in ("ngram", "suffix", "mtp")
    ]
    assert "drafts accepted" in found[-1].evidence
