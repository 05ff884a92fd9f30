"""Beam search: the same sequences and scores as transformers on tiny models; diverse groups against
a second implementation."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from sampling_rows import sample
from verbatim.base.params import SamplingParams
from verbatim.base.records import Drawn, Finish
from verbatim.sampling.beam import BeamSearch

VOCAB, EOS, NEW = 24, 2, 10


@pytest.fixture(scope="module")
def tiny() -> Any:
    """A llama of two layers with random weights large enough to prefer some tokens, the end token
    among them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.35,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval().to(torch.float32)
    with torch.no_grad():
        model.lm_head.weight *= 0.6  # flatter logits: beams compete and end at different lengths
    return model


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [
        [1, *(int(t) for t in rng.integers(3, VOCAB, int(rng.integers(1, 6))))] for _ in range(50)
    ]


def logits_of(model: Any, lines: list[list[int]]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return np.asarray(model(torch.tensor(lines)).logits[:, -1])


def ours(
    model: Any,
    group: list[list[int]],
    params: SamplingParams,
    ends: tuple[int, ...] = (EOS,),
    new: int = NEW,
) -> list[BeamSearch]:
    """One search per prompt (all of one length) in lockstep: one forward pass per step serves all
    live beams."""
    searches = [BeamSearch(params, end_ids=ends, max_new=new) for _ in group]
    live: list[list[list[int]]] = [[prompt] for prompt in group]
    start = len(group[0])
    while not all(search.done for search in searches):
        logits = iter(logits_of(model, [line for lines in live for line in lines]))
        for i, search in enumerate(searches):
            if search.done:
                continue
            rows = [(next(logits), line) for line in live[i]]
            drawn = [
                sample(
                    row,
                    params,
                    beam=search.needed,
                    history=tuple(line),
                    prompt_len=start,
                    position=len(line),
                )
                for row, line in rows
            ]
            live[i] = [[*live[i][parent], token] for parent, token in search.step(drawn)]
            if search.done:
                live[i] = []
                continue
            assert [tuple(line[start:]) for line in live[i]] == [b.tokens for b in search.live]
            agreed = search.agreed()
            assert all(tuple(line[start:][: len(agreed)]) == agreed for line in live[i])
    return searches


SETTINGS: list[dict[str, Any]] = [
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": False, "length_penalty": 1.0},
    {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True, "length_penalty": 0.4},
    {"num_beams": 5, "num_return_sequences": 5, "early_stopping": "never", "length_penalty": 1.6},
    {"num_beams": 2, "num_return_sequences": 1, "early_stopping": False, "length_penalty": -0.7},
    {"num_beams": 3, "num_return_sequences": 3, "early_stopping": "never", "length_penalty": -0.5},
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True, "length_penalty": -1.5},
]


@pytest.mark.torch
@pytest.mark.parametrize(
    "setting",
    [*SETTINGS[:3], *[pytest.param(s, marks=pytest.mark.soak) for s in SETTINGS[3:]]],
    ids=str,
)
def test_beams_equal_transformers_on_thirty_prompts(tiny: Any, setting: dict[str, Any]) -> None:
    import torch

    ended: Counter[str] = Counter()
    count = setting["num_return_sequences"]
    for length in (2, 4, 6):  # prompts of one length together: transformers is slow to start
        group = [p for p in prompts() if len(p) == length]
        want = tiny.generate(
            torch.tensor(group),
            attention_mask=torch.ones(len(group), length, dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **setting,
        )
        sequences, scores = want.sequences.tolist(), want.sequences_scores.tolist()
        for at, search in enumerate(ours(tiny, group, SamplingParams.from_mapping(setting))):
            found = search.results()
            assert len(found) == count
            for beam, ids, score in zip(
                found, sequences[at * count :], scores[at * count :], strict=False
            ):
                tokens = ids[length:]
                assert list(beam.tokens) == tokens[: len(beam.tokens)]
                # transformers pads the rest with EOS
                assert set(tokens[len(beam.tokens) :]) <= {EOS}
                # transformers computes in float32
                assert beam.score == pytest.approx(score, abs=1e-4, rel=1e-6)
                assert beam.finish is not None
                ended[beam.finish.reason] += 1
    assert min(ended["stop"], ended["length"]) > 5, "both finish reasons must occur"


@pytest.mark.torch
def test_several_end_tokens_equal_transformers(tiny: Any) -> None:
    """K grows with the number of end tokens, so that enough beams stay live."""
    import torch

    params = SamplingParams(num_beams=3, num_return_sequences=3)
    group = [p for p in prompts() if len(p) == 4]
    want = tiny.generate(
        torch.tensor(group),
        attention_mask=torch.ones(len(group), 4, dtype=torch.long),
        max_new_tokens=NEW,
        do_sample=False,
        num_beams=3,
        num_return_sequences=3,
        eos_token_id=[EOS, 7, 9],
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = [b.score for search in ours(tiny, group, params, (EOS, 7, 9)) for b in search.results()]
    assert found == pytest.approx(want.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.torch
def test_a_beam_without_candidates_drops_out_as_in_transformers(tiny: Any) -> None:
    import torch

    allowed, new = [5, 6, 7], 7
    params = SamplingParams(num_beams=3, allowed_token_ids=allowed, no_repeat_ngram=2)
    group = [[1, first, second] for first in range(3, 9) for second in range(3, 9)]
    stuck = 0

    def bans(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """As our sampler bans: before the log-softmax. A row without a token stays at -inf."""
        nonlocal stuck
        kept = torch.full_like(scores, -torch.inf)
        kept[:, allowed] = scores[:, allowed]
        for row, line in zip(kept, ids.tolist(), strict=True):
            row[[b for a, b in itertools.pairwise(line) if a == line[-1]]] = -torch.inf
        total = kept.logsumexp(-1, keepdim=True)
        stuck += int(total.isinf().sum())
        return torch.where(total.isinf(), kept, kept - total)

    want = tiny.generate(
        torch.tensor(group),
        attention_mask=torch.ones(len(group), 3, dtype=torch.long),
        max_new_tokens=new,
        do_sample=False,
        num_beams=3,
        logits_processor=[bans],
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert stuck > 3
    found = [search.results()[0] for search in ours(tiny, group, params, new=new)]
    assert [list(beam.tokens) for beam in found] == want.sequences[:, 3:].tolist()
    assert [b.score for b in found] == pytest.approx(want.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.torch
def test_penalties_act_on_logits_before_the_softmax(tiny: Any) -> None:
    """Documented difference: candidates are normalised after the penalties, so scores are
    log-probabilities. transformers applies processors to the log-softmax without normalising."""
    params = SamplingParams(num_beams=2, repetition_penalty=1.4)
    logits = logits_of(tiny, [prompts()[0]])[0]
    drawn = sample(logits, params, beam=VOCAB, history=tuple(prompts()[0]))
    assert sum(np.exp(v) for _, v in drawn.candidates) == pytest.approx(1.0)


# ----------------------------------------------------------------------------------- diverse groups


def diverse_reference(
    table: dict[tuple[int, ...], np.ndarray], p: SamplingParams, steps: int
) -> list[tuple[float, tuple[int, ...]]]:
    """Diverse beam search by its definition: whole rows, no candidate lists, no end tokens."""
    size = p.num_beams // p.num_beam_groups
    groups: list[list[tuple[float, tuple[int, ...]]]] = [
        [(0.0, ())] for _ in range(p.num_beam_groups)
    ]
    for _ in range(steps):
        taken = np.zeros(VOCAB)
        for g, beams in enumerate(groups):
            options = [
                (
                    score + table[line][t] - p.diversity_penalty * taken[t],
                    -i,
                    -t,
                    score + table[line][t],
                    (*line, t),
                )
                for i, (score, line) in enumerate(beams)
                for t in range(VOCAB)
            ]
            best = sorted(options, reverse=True)[:size]
            groups[g] = [(score, line) for _, _, _, score, line in best]
            for _, line in groups[g]:
                taken[line[-1]] += 1
    found = [(score / steps**p.length_penalty, line) for beams in groups for score, line in beams]
    return sorted(found, key=lambda f: -f[0])


class Table(dict[tuple[int, ...], np.ndarray]):
    """A fake model: random log-probabilities per token sequence, made on demand."""

    def __missing__(self, line: tuple[int, ...]) -> np.ndarray:
        x = np.random.default_rng([8, *line]).normal(size=VOCAB) * 2
        self[line] = x - x.max() - np.log(np.exp(x - x.max()).sum())
        return self[line]


@pytest.mark.parametrize(
    ("beams", "groups", "penalty"), [(4, 2, 0.5), (6, 3, 2.0), (4, 4, 1.0), (6, 2, 0.0)]
)
def test_diverse_groups_equal_the_reference_implementation(
    beams: int, groups: int, penalty: float
) -> None:
    table = Table()
    params = SamplingParams(
        num_beams=beams,
        num_beam_groups=groups,
        num_return_sequences=beams,
        diversity_penalty=penalty,
    )
    search = BeamSearch(params, max_new=5)
    live: list[tuple[int, ...]] = [()]
    while not search.done:
        drawn = []
        for line in live:
            order = np.argsort(-table[line], kind="stable")[: search.needed]
            drawn.append(
                Drawn(
                    int(order[0]),
                    0.0,
                    candidates=tuple((int(t), float(table[line][t])) for t in order),
                )
            )
        live = [(*live[parent], token) for parent, token in search.step(drawn)]
    want = diverse_reference(table, params, 5)
    assert [b.tokens for b in search.results()] == [line for _, line in want]
    assert [b.score for b in search.results()] == pytest.approx([score for score, _ in want])


# ------------------------------------------------------------------------------------- edge cases


def candidates(*pairs: tuple[int, float]) -> Drawn:
    return Drawn(pairs[0][0], pairs[0][1], candidates=pairs)


def test_the_engines_stop_rule_ends_a_beam() -> None:
    """`ends` sees all output tokens, so a stop string can span several; its Finish is kept."""
    stop = Finish("stop", "5 6")
    params = SamplingParams(num_beams=2, num_return_sequences=2)
    search = BeamSearch(
        params, max_new=9, ends=lambda tokens: stop if tokens[-2:] == (5, 6) else None
    )
    search.step([candidates((5, -0.1), (6, -2.5), (7, -9.0), (8, -9.5))])
    moves = search.step([candidates((6, -0.1), (1, -3.0)), candidates((6, -0.2), (1, -3.0))])
    assert moves == ((1, 6), (0, 1))
    assert search.agreed() == ()
    while not search.done:
        search.step([candidates((1, -1.0), (3, -2.0)) for _ in search.live])
    assert search.results()[0].tokens == (5, 6)
    assert search.results()[0].finish == stop


def test_beams_that_end_in_the_same_step_compete() -> None:
    """With early_stopping, the step that fills the hypotheses keeps the best of all that end in
    it."""
    params = SamplingParams(
        num_beams=2, num_return_sequences=2, early_stopping=True, length_penalty=1.0
    )
    search = BeamSearch(params, end_ids=(9,), max_new=9)
    search.step([candidates((9, -4.0), (5, -0.1), (6, -0.2), (7, -6.0))])
    search.step(
        [candidates((9, -0.1), (5, -5.0), (6, -6.0)), candidates((9, -0.1), (5, -5.0), (6, -6.0))]
    )
    assert search.done
    # not (9,), which ended first and scores -4
    assert [b.tokens for b in search.results()] == [(5, 9), (6, 9)]


def test_agreed_tokens_are_a_prefix_of_every_result() -> None:
    params = SamplingParams(num_beams=2, num_return_sequences=2)
    search = BeamSearch(params, max_new=4)
    assert search.agreed() == ()
    search.step([candidates((5, -0.1), (6, -9.0))])
    assert search.agreed() == ()
    search.step([candidates((7, -0.1), (8, -0.2)), candidates((7, -5.0), (8, -5.0))])
    assert search.agreed() == (5,)
    while not search.done:
        search.step([candidates((1, -1.0), (3, -2.0)) for _ in search.live])
    assert all(b.tokens[0] == 5 for b in search.results())


def test_a_row_without_candidates_ends_the_search() -> None:
    search = BeamSearch(SamplingParams(num_beams=2), max_new=4)
    assert search.step([Drawn(-1, 0.0)]) == ()
    assert search.done
    assert search.results() == ()
    assert search.agreed() == ()


def test_log_probabilities_and_explanations_follow_their_beam() -> None:
    params = SamplingParams(num_beams=2, logprobs=2, explain=3)
    search = BeamSearch(params, max_new=3)
    rng = np.random.default_rng(0)
    while not search.done:
        rows = rng.normal(size=(len(search.live), 12)).astype(np.float32)
        search.step([sample(row, params, beam=search.needed) for row in rows])
    (best,) = search.results()
    assert [t.token for t in best.logprobs] == list(best.tokens)
    assert [e["token"] for e in best.explain] == list(best.tokens)
    assert sum(t.logprob for t in best.logprobs) / 3 == pytest.approx(best.score)


def test_never_with_a_penalty_below_zero_looks_at_the_present_length() -> None:
    """More tokens only lower such a score, so a live beam can still win at its present length."""
    settings = {"num_beams": 2, "length_penalty": -1.0, "early_stopping": "never"}
    search = BeamSearch(SamplingParams.from_mapping(settings), end_ids=(EOS,), max_new=NEW)
    search.step([Drawn(4, -0.7, candidates=((4, -0.7), (EOS, -0.9), (5, -1.5), (6, -5.0)))])
    rows = [((7, -0.3), (EOS, -1.3), (8, -7.0)), ((7, -3.0), (8, -4.0), (9, -5.0))]
    search.step([Drawn(row[0][0], row[0][1], candidates=row) for row in rows])
    assert not search.done  # -1.0 * 2 is above the worst hypothesis, -2.0 * 2; -1.0 * 10 is not
