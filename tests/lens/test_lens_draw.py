"""The sampler of the page against the sampler of the server: the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lens_page import MS, report
from live_server import Live

from filter_values import random_value
from sampling_rows import draw_many
from verbatim.base.params import FIELDS, FILTERS, SamplingParams
from verbatim.base.records import DrawSpec
from verbatim.sampling.draw import noise_key
from verbatim.sampling.pipeline import Row, sample_rows, state_of
from verbatim.sampling.processors import AFTER

CASES = 100


@pytest.fixture(scope="module")
def page(browser: Any, live: Live) -> Iterator[Any]:
    page = browser.new_page()
    page.set_default_timeout(MS)
    page.goto(live.url + "/lens")
    yield page
    page.close()


def random_params(random: np.random.Generator, *, xtc: bool) -> dict[str, float]:
    """Each filter is on in about a third of the cases."""
    params: dict[str, float] = {"temperature": float(random.choice([0.1, 0.3, 0.7, 1.0, 1.3, 2.0]))}
    for name in FILTERS:
        if random.random() < 0.35 and (xtc or name != "xtc_probability"):
            params[name] = random_value(name, random.random())
    if "xtc_probability" in params:
        params["xtc_threshold"] = float(np.round(random.uniform(0.001, 0.1), 3))
    return params


def logits(random: np.random.Generator, vocab: int, *, ties: bool) -> np.ndarray:
    row = (random.normal(size=vocab) * random.choice([0.5, 2.0, 4.0])).astype(np.float32)
    return np.round(row * 2) / 2 if ties else row


@pytest.mark.parametrize("per_case", [40, pytest.param(1_000, marks=pytest.mark.soak)])
def test_draws_are_equal(page: Any, per_case: int) -> None:
    random = np.random.default_rng(7)
    cases, expected = [], []
    for number in range(CASES):
        params = SamplingParams(**random_params(random, xtc=False))
        row = logits(random, 48, ties=number % 5 == 0)
        key = noise_key(int(random.integers(0, 2**62)), int(random.integers(0, 4)))
        first = int(random.choice([0, 17, 2**31, 2**33 + 5]))
        spec = DrawSpec(params, key, 1)
        state = state_of(row.astype(np.float64), Row(spec, first))
        for stage in AFTER:
            if stage.active(state):
                stage.apply(state)
        positions = np.arange(first, first + per_case)
        expected.append(draw_many(state.ids, state.d, key, positions).tolist())
        settings = {k: v for k, v in params.to_mapping().items() if k != "seed"}
        cases.append({"step": report(row, spec, first), "settings": settings})
    text = page.evaluate(
        """async ([text, count]) => {
          const cases = JSON.parse(text);
          const { Row, sample } = await import("/lens/sampler.js");
          return JSON.stringify(cases.map(({ step, settings }) => {
            const row = new Row(step);
            return Array.from({ length: count }, (_, i) => {
              Object.assign(row, { position: step.position + i, _noise: null });
              const result = sample(row, settings);
              return result.undecided ?? result.token;
            });
          }));
        }""",
        [json.dumps(cases), per_case],  # as text: Playwright wraps every single value
    )
    drawn = json.loads(text)
    assert sum(map(len, drawn)) == CASES * per_case
    assert drawn == expected


def test_stages_scores_and_leads_are_equal_also_from_256_candidates(page: Any) -> None:
    """Every filter, ties, rows of up to 2,000 ids. From the 256 best and the tail's histogram the
    page may not be able to decide; if it decides, it decides as the whole row does."""
    random = np.random.default_rng(3)
    cases, expected = [], []
    for number in range(150):
        params = SamplingParams(
            **random_params(random, xtc=True), explain=1, seed=int(random.integers(0, 2**60))
        )
        row = logits(random, int(random.choice([2, 260, 700, 2000])), ties=number % 6 == 0)
        position = int(random.integers(0, 5000))
        spec = DrawSpec(params, noise_key(params.seed or 0), 1)
        drawn = sample_rows(row[None], [Row(spec, position)])[0]
        assert drawn.explain is not None
        stages = [[s["name"], s["left"]] for s in drawn.explain["stages"]]
        expected.append([drawn.token, drawn.explain["score"], drawn.explain["lead"], stages])
        settings = {k: v for k, v in params.to_mapping().items() if k not in ("seed", "explain")}
        cases.append([report(row, spec, position), settings])
    whole, part = page.evaluate(
        """async (text) => {
          const cases = JSON.parse(text);
          const { Row, sample } = await import("/lens/sampler.js");
          const seen = (r) => [r.token, r.score, r.lead, r.stages.map((s) => [s.name, s.left])];
          const whole = [], part = [];
          for (const [step, settings] of cases) {
            const all = sample(new Row(step), settings);
            whole.push(all.undecided ?? seen(all));
            if (all.stages.some((s) => s.order.length !== s.left)) throw new Error("order");
            const few = sample(new Row({ ...step, row: undefined }), settings);
            part.push(few.undecided ? null : seen(few));
          }
          return [whole, part];
        }""",
        json.dumps(cases),
    )
    assert whole == expected
    decided = [i for i, result in enumerate(part) if result is not None]
    # A lead over an id of the tail is unknown, so leads are compared where no tail is left.
    assert [part[i][:2] for i in decided] == [expected[i][:2] for i in decided]
    assert [part[i][3] for i in decided] == [expected[i][3] for i in decided]
    assert 75 < len(decided) < 150, "both happen: decided, and sent for the whole row"


def test_the_page_knows_every_filter(page: Any) -> None:
    names, defaults = page.evaluate(
        """async () => {
          const { FILTERS, DEFAULTS } = await import("/lens/sampler.js");
          return [FILTERS, DEFAULTS];
        }"""
    )
    assert names == [stage.name for stage in AFTER[1:]]
    assert defaults == {n: FIELDS[n].default for n in ("temperature", *FILTERS, "xtc_threshold")}


def test_exp_log_and_masses_have_the_same_bits(page: Any) -> None:
    from verbatim.sampling import numerics

    random = np.random.default_rng(5)
    below = np.concatenate([-random.exponential(8, 5000), -random.uniform(0, 710, 2000), [0.0]])
    above = np.concatenate([random.uniform(0, 2, 5000), np.exp(random.uniform(-600, 600, 2000))])
    expected = [
        numerics.exp(below).tolist(),
        numerics.log(above).tolist(),
        numerics.masses(below).tolist(),
        numerics.spreads(below).tolist(),
    ]
    text = page.evaluate(
        """async (text) => {
          const [below, above] = JSON.parse(text);
          const { exp, log, massOf, spreadOf } = await import("/lens/numerics.js");
          return JSON.stringify([below.map(exp), above.map(log), below.map(massOf),
            below.map(spreadOf)]);
        }""",
        json.dumps([below.tolist(), above.tolist()]),
    )
    assert json.loads(text) == expected


def test_keys_and_xtc_chances_are_equal(page: Any) -> None:
    from verbatim.sampling.draw import chance

    seeds = [0, 1, 4, 2**31, 2**53 - 1, 2**63 - 1]
    keys = [[f"{noise_key(seed, choice):016x}" for choice in (0, 1, 1023)] for seed in seeds]
    chances = [chance(int(keys[i][0], 16), 100 + i) for i in range(len(seeds))]
    found = page.evaluate(
        """async (seeds) => {
          const { chance, keyFromHex, noiseKey } = await import("/lens/noise.js");
          const hex = (key) => key.toString(16).padStart(16, "0");
          const keys = seeds.map((seed) => [0, 1, 1023].map((c) => hex(noiseKey(BigInt(seed), c))));
          return [keys, keys.map((row, i) => chance(keyFromHex(row[0]), 100 + i))];
        }""",
        [str(seed) for seed in seeds],
    )
    assert found == [keys, chances]
