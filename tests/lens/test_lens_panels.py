"""The panels of the Lens, number by number against the API's answer to the same request."""

from __future__ import annotations

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


# ----------------------------------------------------------------------------------- other panels


def test_the_skip_link_has_a_target_on_each_view(lens: LensPage) -> None:
    for view, target in (("Engine", "steps"), ("Generate", "tiles")):
        lens.page.click(f"nav >> text={view}")
        lens.page.wait_for_selector(f".skip[href='#{target}']", state="attached")
        lens.page.focus(".skip")
        lens.page.keyboard.press("Enter")
        lens.page.wait_for_function("id => document.activeElement.id === id", arg=target)
