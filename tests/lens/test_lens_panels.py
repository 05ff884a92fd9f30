"""The panels of the Lens, number by number against the API's answer to the same request."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lens_page import LensPage, api, prompt_ids, report
from live_server import Live

from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec
from verbatim.sampling.draw import noise_key
from verbatim.sampling.pipeline import Row, sample_rows

pytestmark = pytest.mark.server
FIVE: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
}


@pytest.fixture(scope="module")
def lens(browser: Any, live: Live) -> Iterator[LensPage]:
    page = LensPage(browser, live).open()
    yield page
    page.close()
    assert page.errors == []


def generate(lens: LensPage, **params: Any) -> list[int]:
    """A new run under these parameters alone, without the controls."""
    lens.page.evaluate(
        """async (params) => {
          const { changed, state } = await import("/lens/store.js");
          state.params = params;
          changed();
        }""",
        params,
    )
    return lens.generate()


def percent(share: float) -> str:
    """As format.js writes it."""
    value = 100 * share
    if 99.995 <= value < 100:
        return "> 99.99 %"
    return f"{value:.2f} %" if value >= 0.01 else f"{value:.1e} %".replace("e-0", "e-")


def words(lens: LensPage, selector: str) -> list[str]:
    return [" ".join(text.split()) for text in lens.page.locator(selector).all_text_contents()]


# ------------------------------------------------------------------------------------ side by side


def five(lens: LensPage) -> dict[str, tuple[int, str]]:
    """Sampler -> (drawn id, ids left), once all five have decided."""
    lens.page.wait_for_selector(".five .out[data-token='']", state="detached")
    shown = lens.page.locator(".five figure").evaluate_all(
        """all => all.map((figure) => [figure.dataset.sampler,
          figure.querySelector(".out").dataset.token, figure.querySelector(".out").textContent])"""
    )
    return {name: (int(token), text.split(" ")[0]) for name, token, text in shown}


def test_side_by_side_is_what_five_requests_draw(lens: LensPage) -> None:
    ids = generate(lens, max_tokens=4, seed=9, temperature=0.9)
    lens.select(3)
    shown = five(lens)
    for name, params in FIVE.items():
        settings = {"seed": 9, "max_tokens": 1, "temperature": 0.9, **params}
        direct = api(lens.live, prompt_ids(lens.live) + ids[:3], **settings)
        stages = direct["explain"][0]["stages"]
        left = 1 if name == "greedy" else stages[-1]["left"]
        assert shown[name] == (direct["ids"][0], str(left)), name
        top = [c["final_prob"] for c in direct["explain"][0]["top"] if c["final_prob"] is not None]
        bars = lens.page.locator(f"[data-sampler={name}] .mini i").evaluate_all(
            "all => all.map((bar) => parseFloat(bar.style.width))"
        )
        expected = [100.0] if name == "greedy" else [100 * p for p in top[: len(bars)]]
        assert bars == pytest.approx(expected, abs=0.006), name


def test_side_by_side_requests_the_whole_row_where_256_candidates_cannot_decide(
    lens: LensPage,
) -> None:
    """A flat distribution: every cut lies among equal logits, and the noise draws an id that is
    not among the candidates. The sliders, at temperature 0, need no more than the candidates."""
    row, vocab = np.zeros(260, np.float32), 260
    generate(lens, max_tokens=2, temperature=0)
    position = len(prompt_ids(lens.live))

    def drawn(key: int, **params: Any) -> Any:
        spec = DrawSpec(SamplingParams(explain=1, **params), key, 1)
        return sample_rows(row[None], [Row(spec, position)])[0]

    key = next(k for k in map(noise_key, range(1000)) if drawn(k).token >= 256)
    planted = report(row, DrawSpec(SamplingParams(), key, 1), position)
    asked = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json["rest"])
        route.fulfill(json=planted if asked[-1] else {**planted, "row": None})

    lens.page.route("**/lens/api/step", answer)
    lens.page.click("#tile-0")
    expected = {name: drawn(key, **params) for name, params in FIVE.items()}
    stages = {name: e.explain["stages"] for name, e in expected.items()}
    assert five(lens) == {
        name: (e.token, str(stages[name][-1]["left"] if name != "greedy" else 1))
        for name, e in expected.items()
    }
    assert asked == [False, True], "the whole row is requested once"
    assert five(lens)["min-p"][1] == str(vocab)
    lens.page.unroute("**/lens/api/step")


# ------------------------------------------------------------------------------------------- trees


def rows_of_tree(
    answers: list[dict[str, Any]], start: int = 0, level: int = 1
) -> list[tuple[int, list[str]]]:
    """(level, what the line says) of every line: what answers share once, then each fork."""

    def total(answer: dict[str, Any], end: int) -> str:
        return f"log-probability {sum(answer['logprobs'][:end]):.3f}"

    def leaf(answer: dict[str, Any]) -> tuple[int, list[str]]:
        said = [answer["label"], total(answer, len(answer["ids"]))]
        said += [f"at token {start + 1}"] if start else []
        return level, said + ([f"score {answer['score']:.3f}"] if answer["score"] else [])

    if len(answers) == 1:
        return [leaf(answers[0])]
    first = answers[0]["ids"]
    end = start
    while end < len(first) and all(a["ids"][: end + 1] == first[: end + 1] for a in answers):
        end += 1
    if end > start:
        said = [f"tokens {start + 1} to {end}", f"shared by {len(answers)} answers"]
        line = (level, [*said, total(answers[0], end)])
        return [line, *rows_of_tree(answers, end, level + 1)]
    groups: dict[int | None, list[dict[str, Any]]] = {}
    for answer in answers:
        key = answer["ids"][start] if start < len(answer["ids"]) else None
        groups.setdefault(key, []).append(answer)
    found = []
    for key, group in groups.items():
        found += [leaf(a) for a in group] if key is None else rows_of_tree(group, start, level)
    return found


@pytest.mark.parametrize(
    "params",
    [
        {"n": 5, "regex": "abc[xy](12|13)", "seed": 3},
        {"n": 3, "best_of": 6, "regex": "a[b-d]c[xy]", "seed": 3},
        {"num_beams": 4, "num_return_sequences": 4},
    ],
    ids=["n", "best_of", "beams"],
)
def test_answers_are_a_tree_of_shared_prefixes(lens: LensPage, params: dict[str, Any]) -> None:
    settings = {"max_tokens": 6, **params}
    generate(lens, **settings)
    direct = api(lens.live, prompt_ids(lens.live), **settings)
    answers = [
        {
            "label": f"answer {i + 1}",
            "ids": known["token_ids"],
            "logprobs": [record["logprob"] for record in choice["explain"]],
            "score": choice.get("score"),
        }
        for i, (choice, known) in enumerate(
            zip(direct["choices"], direct["receipt"]["choices"], strict=True)
        )
    ]
    expected = rows_of_tree(answers)
    assert any("shared by" in said for _, line in expected for said in line)
    lines = lens.page.locator(".tree li")
    shown = list(zip(lines.all(), words(lens, ".tree li"), strict=True))
    assert len(shown) == len(expected)
    for (line, text), (level, said) in zip(shown, expected, strict=True):
        assert int(str(line.get_attribute("aria-level"))) == level
        assert all(part in text for part in said), (text, said)
    lens.page.click(f".tree button:has-text('answer {len(answers)}')")
    assert lens.tokens() == answers[-1]["ids"]
    if "num_beams" not in params:  # the noise of this answer, not of the first one
        lens.select(3)
        assert lens.page.get_attribute("#outcome", "data-token") == str(answers[-1]["ids"][3])
        assert lens.page.locator(".alarm").count() == 0


# -------------------------------------------------------------------------------- bars of a funnel


def bars(lens: LensPage, stage: str) -> tuple[dict[int, float], float, float]:
    """({id: share}, share of the other ids left, share cut) as the bar of a stage draws them."""
    found = lens.page.locator(f"[data-stage={stage}] .bar i").evaluate_all(
        "all => all.map((i) => [i.dataset.id ?? i.className, parseFloat(i.style.flexBasis) / 100])"
    )
    wide = {int(name): share for name, share in found if name.isdigit()}
    named = {name: share for name, share in found if not name.isdigit()}
    return wide, named["rest"], named.get("cut", 0.0)


def check_bar(lens: LensPage, stage: str, shares: list[tuple[int, float]], mass: float) -> None:
    """`shares` of the ids that are left, the most likely first; a bar draws 24 of them."""
    expected = {i: share for i, share in shares[:24] if share > 0.004}
    wide, rest, cut = bars(lens, stage)
    assert wide == pytest.approx(expected, abs=1e-5), stage
    assert rest == pytest.approx(max(0.0, mass - sum(expected.values())), abs=1e-5), stage
    assert cut == pytest.approx(1 - mass if mass < 0.99995 else 0.0, abs=1e-5), stage
    [shown] = words(lens, f"[data-stage={stage}] .mass")
    assert shown.removeprefix("≈ ") == percent(mass), stage


FILTERS = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability")
LIKELY = [203, 62, 238]  # of the first step after lens_page.PROMPT


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_k": 30, "top_p": 0.8, "min_p": 0.1},
        {"temperature": 1.3, "min_p": 0.2},
        {"temperature": 0.4, "top_p": 0.6},
        {"temperature": 0.9, "typical_p": 0.5, "top_n_sigma": 1.5},
        {"xtc_probability": 1, "xtc_threshold": 0.02, "top_k": 50},
        {"temperature": 0.8, "top_k": 9, "banned_token_ids": LIKELY, "logit_bias": {"100": 6.0}},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "top_p": 0.7},
    ],
    ids=str,
)
def test_every_bar_of_every_stage_is_a_number_of_the_api(
    lens: LensPage, settings: dict[str, Any]
) -> None:
    """The record of a request with the first filters only has the probabilities after them."""
    common = {"seed": 21, "max_tokens": 1, **settings}
    ids = generate(lens, **common)
    lens.select(0)
    known = prompt_ids(lens.live)
    used = [name for name in FILTERS if name in settings]
    without = {k: v for k, v in common.items() if k not in FILTERS}
    records = {}
    for count in range(len(used) + 1):
        some = {name: settings[name] for name in used[:count]}
        direct = api(lens.live, known, **{**without, **some, "explain": 64})
        records[used[count - 1] if count else "temperature"] = direct["explain"][0]
    last = records[used[-1]]
    assert ids == [last["token"]]
    assert [stage["name"] for stage in last["stages"]] == lens.page.locator(
        ".stage:not([data-stage=raw])"
    ).evaluate_all("all => all.map((stage) => stage.dataset.stage)")
    for stage in last["stages"]:
        [left] = words(lens, f"[data-stage={stage['name']}] .left")
        assert left == str(stage["left"])
        note = words(lens, f"[data-stage={stage['name']}] .note")[0]
        assert (f"cuts {stage['removed']} id" in note) == bool(stage["removed"])

    raw = [(c["id"], math.exp(c["logprob"]), c["removed_by"]) for c in last["top"]]
    check_bar(lens, "raw", [(i, share) for i, share, _ in raw], 1.0)
    gone: set[str] = set()
    for name in [s["name"] for s in last["stages"] if s["name"] not in records]:
        gone.add(name)
        kept = [(i, share) for i, share, by in raw[:24] if by not in gone]
        removed = sum(share for _, share, by in raw if by in gone)
        check_bar(lens, name, kept, 1 - removed)

    whole = {c["id"]: c["final_prob"] for c in records["temperature"]["top"]}
    order = sorted((i for i in whole if whole[i] is not None), key=lambda i: (-whole[i], i))
    for name, record in records.items():
        after = {c["id"]: c["final_prob"] for c in record["top"] if c["final_prob"] is not None}
        alive = [i for i in order if i in after]
        check_bar(lens, name, [(i, whole[i]) for i in alive], whole[alive[0]] / after[alive[0]])

    leaders = {
        (percent(c["final_prob"]), f"{c['noise']:+.2f}", f"{c['score']:.2f}"): c["id"]
        for c in last["top"]
        if c["noise"] is not None
    }
    texts = lens.page.locator(".draw tbody tr").all_inner_texts()
    shown = [tuple(text.split("\t")[1:4]) for text in texts if text.strip()]
    assert set(shown) <= set(leaders)
    assert leaders[shown[0]] == ids[0]
    meters = lens.page.locator(".candidates tr").evaluate_all(
        "all => all.map((row) => [Number(row.dataset.id),"
        " parseFloat(row.querySelector('.meter i').style.width) / 100])"
    )
    assert dict(meters) == pytest.approx({i: share for i, share, _ in raw[:12]}, abs=6e-5)


# ----------------------------------------------------------------------------------- other panels


def test_the_skip_link_has_a_target_on_each_view(lens: LensPage) -> None:
    for view, target in (("Engine", "steps"), ("Generate", "tiles")):
        lens.page.click(f"nav >> text={view}")
        lens.page.wait_for_selector(f".skip[href='#{target}']", state="attached")
        lens.page.focus(".skip")
        lens.page.keyboard.press("Enter")
        lens.page.wait_for_function("id => document.activeElement.id === id", arg=target)
