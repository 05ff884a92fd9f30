"""The panels of the Lens, number by number against the API's answer to the same request."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lens_page import LensPage, api, prompt_ids, report
from live_server import Live
from playwright.sync_api import expect

from eventually import becomes
from filter_values import WEAK
from verbatim.base.params import FILTERS, SamplingParams
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
    shown = lens.page.wait_for_function(
        """() => {
          const all = [...document.querySelectorAll(".five figure")].map((figure) => {
            const out = figure.querySelector(".out");
            return [figure.dataset.sampler, out.dataset.token, out.textContent];
          });
          return all.length === 5 && all.every(([, token]) => token !== "") && all;
        }"""
    )
    return {name: (int(token), text.split(" ")[0]) for name, token, text in shown.json_value()}


@pytest.mark.soak
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
    decided = {
        name: (e.token, str(stages[name][-1]["left"] if name != "greedy" else 1))
        for name, e in expected.items()
    }
    becomes(lambda: five(lens), decided)
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
        where = f"at token {start + 1}" if start < len(answer["ids"]) else "ends here"
        said += [where] if start else []
        return level, said + ([f"score {answer['score']:.3f}"] if answer["score"] else [])

    if len(answers) == 1:
        return [leaf(answers[0])]
    first = answers[0]["ids"]
    end = start
    while end < len(first) and all(a["ids"][: end + 1] == first[: end + 1] for a in answers):
        end += 1
    if end > start:
        name = f"tokens {start + 1} to {end}" if end > start + 1 else f"token {end}"
        said = [name, f"shared by {len(answers)} answers"]
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
        {"n": 8, "regex": "ab[u-z]c[d-h]f", "seed": 1, "temperature": 2},
        {"n": 3, "best_of": 6, "regex": "a[bc]d[ -~]{3}", "seed": 3},
        {"num_beams": 8, "num_return_sequences": 8},
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
    levels = [level for level, line in expected if any("shared by" in said for said in line)]
    assert levels
    assert "best_of" in params or max(levels) > 1, "a prefix that some share, after one that all do"
    lines = lens.page.locator(".tree li")
    expect(lines).to_have_count(len(expected))
    for line, (level, said) in zip(lines.all(), expected, strict=True):
        expect(line).to_have_attribute("aria-level", str(level))
        for part in said:
            expect(line).to_contain_text(part)
    lens.page.click(f".tree button:has-text('answer {len(answers)}')")
    chosen = answers[-1]["ids"]
    lens.shows(chosen)
    if "num_beams" not in params:  # the noise of this answer, not of the first one
        lens.select(3)
        token = f"#outcome[data-token='{chosen[3]}']"
        lens.page.wait_for_selector(token)
        expect(lens.page.locator(".alarm")).to_have_count(0)


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


LIKELY = [203, 62, 238]  # of the first step after lens_page.PROMPT


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_k": 30, "top_p": 0.8, "min_p": 0.1},
        pytest.param({"temperature": 1.3, "min_p": 0.2}, marks=pytest.mark.soak),
        pytest.param({"temperature": 0.4, "top_p": 0.6}, marks=pytest.mark.soak),
        {"temperature": 0.9, **WEAK, "top_k": 40},
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
    drawn = lens.page.locator(".stage:not([data-stage=raw])")
    names = [stage["name"] for stage in last["stages"]]
    becomes(lambda: drawn.evaluate_all("all => all.map((stage) => stage.dataset.stage)"), names)
    for stage in last["stages"]:
        part = lens.page.locator(f"[data-stage={stage['name']}]")
        expect(part.locator(".left")).to_have_text(str(stage["left"]))
        note = expect(part.locator(".note").first)
        cuts = f"cuts {stage['removed']} id"
        (note.to_contain_text if stage["removed"] else note.not_to_contain_text)(cuts)

    raw = [(c["id"], math.exp(c["logprob"]), c["removed_by"]) for c in last["top"]]
    check_bar(lens, "raw", [(i, share) for i, share, _ in raw], 1.0)
    # before the temperature: a request with the first stages only, at temperature 1, has the
    # probabilities after them
    before, mass = {i: share for i, share, _ in raw}, 1.0
    plain: dict[str, Any] = {"seed": 21, "max_tokens": 1, "temperature": 1, "explain": 64}
    for name in [s["name"] for s in last["stages"] if s["name"] not in records]:
        plain[name] = settings[name]
        top = api(lens.live, known, **plain)["explain"][0]["top"]
        after = {c["id"]: c["final_prob"] for c in top if c["final_prob"] is not None}
        mass *= 1 - sum(share for i, share in before.items() if i not in after)
        order = sorted(after, key=lambda i: (-after[i], i))
        check_bar(lens, name, [(i, after[i] * mass) for i in order], mass)
        before = after

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


def test_the_running_loop_shows_each_step_of_the_api(lens: LensPage) -> None:
    # top_k: the 64 candidates of the stream hold the largest scores, as those of the step do
    settings = {"max_tokens": 5, "seed": 4, "temperature": 1.2, "top_k": 40}
    generate(lens, **settings)
    known = prompt_ids(lens.live)
    direct = api(lens.live, known, **{**settings, "explain": 64})
    assert max(record["rank"] for record in direct["explain"]) > 5, "not among the most likely"
    lens.select(0)
    lens.page.evaluate("() => { window.setInterval = (tick) => { window.tick = tick; return 1; } }")
    lens.page.click("text=Play")
    for index, record in enumerate(direct["explain"]):
        lens.page.wait_for_selector(f"#tile-{index}[aria-selected=true]")
        lens.page.wait_for_selector(f".steps >> text=token {index + 1} of 5")
        expect(lens.page.locator("text=Pause")).to_have_attribute("aria-pressed", "true")
        context, logits, softmax, sample, append = lens.page.locator(".loop li").all()
        expect(context).to_contain_text(f"{len(known) + index} tokens")
        top = record["top"][:5]
        kept = [c for c in record["top"] if c["score"] is not None]
        scores = sorted(kept, key=lambda c: (-c["score"], c["id"]))[:5]
        for part, expected in (
            (logits, [f"{c['logit']:.1f}" for c in top]),
            (softmax, [percent(math.exp(c["logprob"])) for c in top]),
            (sample, [f"{c['noise']:+.1f}" for c in scores]),
        ):
            unlikely = part != sample and record["rank"] > 5
            more = [re.compile(".")] if unlikely else []
            expect(part.locator(".mini span")).to_have_text(expected + more)
            expect(part.locator(".mini.drawn"), "the drawn token is among them").to_have_count(1)
        widths = "all => all.map((bar) => parseFloat(bar.style.width))"
        assert softmax.locator(".mini i").evaluate_all(widths)[:5] == pytest.approx(
            [100 * math.exp(c["logprob"]) for c in top], abs=0.06
        )
        expect(softmax).to_contain_text(f"entropy {record['entropy']:.2f} nats")
        expect(append).to_contain_text(f"id {record['token']}, position {record['position']}")
        lens.page.evaluate("() => window.tick()")
    lens.page.wait_for_selector(".steps button[aria-pressed=false]:has-text('Play')")
    lens.page.evaluate("() => { delete window.setInterval }")


def test_an_unlikely_token_is_in_the_loop_before_its_step_is_there(lens: LensPage) -> None:
    """As while the text grows: the stream brings 64 candidates, and the drawn token is none."""
    known, settings = prompt_ids(lens.live), {"temperature": 30, "max_tokens": 1}
    seeds = range(1, 100)
    first = (api(lens.live, known, seed=seed, **settings)["explain"] for seed in seeds)
    seed = next(s for s, records in zip(seeds, first, strict=False) if records[0]["rank"] > 64)
    held: list[Any] = []
    lens.page.route("**/lens/api/step", lambda route: held.append(route))
    generate(lens, seed=seed, **settings)
    lens.page.click("#tile-0")
    for name, count in (("logits", 6), ("softmax", 6), ("sample", 5)):
        part = lens.page.locator(f".loop li:has(h3:has-text('{name}'))")
        part.locator(".mini.drawn").wait_for(state="attached")
        expect(part.locator(".mini")).to_have_count(count)
    (route,) = held
    route.continue_()
    lens.page.unroute("**/lens/api/step")
    lens.page.wait_for_selector(".draw tr.winner")


def test_ids_and_bytes_are_shown_on_demand(lens: LensPage) -> None:
    settings = {"max_tokens": 6, "seed": 5, "temperature": 0.9}
    ids = generate(lens, **settings)
    lens.select(2)
    small = lens.page.locator(".tile small")
    expect(small.first).to_be_hidden()
    lens.page.check("#bytes")
    small.first.wait_for(state="visible")
    raw = lens.live.client.get("/lens/api/vocab").json()
    assert raw["lengths"][:256] == [1] * 256, "ids below 256 are bytes"
    expect(small).to_have_text([f"{i} · {i:02x}" for i in ids])
    top = api(lens.live, prompt_ids(lens.live), **settings)["explain"][2]["top"]
    shown = words(lens, ".candidates .word small")
    assert shown == [f"{c['id']} · {c['id']:02x}" for c in top[: len(shown)]]
    lens.page.uncheck("#bytes")
    small.first.wait_for(state="hidden")


def test_effective_parameters_are_those_of_the_receipt(lens: LensPage) -> None:
    mine = {"temperature": 0.7, "top_p": 0.9, "seed": 6, "repetition_penalty": 1.1}
    generate(lens, **mine)
    receipt = api(lens.live, prompt_ids(lens.live), max_tokens=-1, **mine)["receipt"]
    rows = lens.page.locator(".group:has-text('Effective parameters') tr").evaluate_all(
        "all => all.map((row) => [...row.children].map((cell) => cell.textContent.trim()))"
    )
    shown = {name: (value, origin) for name, value, origin in rows}
    assert set(shown) == set(lens.live.client.get("/lens/api/info").json()["parameters"])
    for name, value in receipt["params"].items():
        if name == "explain":
            continue
        origin = "you" if name in mine else receipt["origins"].get(name, "the Lens")
        assert shown[name][1] == origin, name
        written = shown[name][0]
        assert written == str(value) or float(written) == value, name
    assert shown["explain"] == ("64", "the Lens")
    assert shown["receipt"] == ("true", "the Lens")


def test_warnings_and_loops_are_shown_in_place(lens: LensPage) -> None:
    settings = {"regex": "(ab){60}", "max_tokens": 120, "seed": 1, "repetition_penalty": 1.4}
    generate(lens, **settings)
    direct = api(lens.live, prompt_ids(lens.live), **settings)
    assert len(direct["warnings"]) == 3, "two of the settings, one of the loop"
    loop = f"The end repeats itself: {direct['loop']} tokens."
    expect(lens.page.locator(".sequence .warn")).to_have_text([loop, *direct["warnings"]])


def test_a_branch_inside_reasoning_continues_it(lens: LensPage) -> None:
    settings = {"regex": "<think>[a-z]{8}</think>[0-9]{3}", "seed": 2, "max_tokens": 40}
    before, known = generate(lens, **settings), prompt_ids(lens.live)
    lens.select(9)
    row = lens.page.locator(".candidates tr:has(button)").first
    candidate = int(str(row.get_attribute("data-id")))
    with lens.one_request():
        row.locator("button").click()
    prefix = [*before[:9], candidate]
    direct = api(lens.live, known + prefix, output_prefix=10, **settings)
    lens.shows(prefix + direct["ids"])
    assert bytes(i for i in lens.tokens() if i < 256).decode().count("</think>") == 1
    lines = lens.page.locator(".tree li")
    expect(lines).to_have_count(2)
    parent, branch = expect(lines.nth(0)), expect(lines.nth(1))
    branch.to_contain_text("at token 10")
    total = sum(record["logprob"] for record in direct["explain"])
    first = api(lens.live, known, **settings)["explain"]
    total += sum(record["logprob"] for record in first[:9])
    total += next(c["logprob"] for c in first[9]["top"] if c["id"] == candidate)
    branch.to_contain_text(f"log-probability {total:.3f}")
    parent.to_contain_text(f"log-probability {sum(r['logprob'] for r in first):.3f}")


def test_accepted_and_rejected_drafts_are_marked(browser: Any, live: Live) -> None:
    """Whether the engine drafts depends on measured times: the numbers are planted, in a page that
    has read no step of the tests before."""

    def usage(route: Any) -> None:
        text = route.fetch().text()
        for name, planted in (("accepted", 7), ("rejected", 2)):
            field = f'"{name}_prediction_tokens":'
            text = re.sub(rf"{field}\d+", f"{field}{planted}", text)
        route.fulfill(body=text, content_type="text/event-stream")

    drafts = [(4, 3, "ngram"), (5, 0, "ngram"), (4, 4, "suffix"), (0, 0, "")]
    part = {"request": "req-0123456789", "tokens": 1, "start": 9, "kind": "decode"}
    part |= {"arrival": 0.5, "preemptions": 0}
    steps = [
        {"step": 10**6 + i, "at": 1.0 + i, "seconds": 0.1, "others": 0}
        | {"parts": [part | {"drafts": made, "accepted": won, "source": source}]}
        for i, (made, won, source) in enumerate(drafts)
    ]

    def engine(route: Any) -> None:
        report = route.fetch().json()
        new = "after=0" in route.request.url or not route.request.url.endswith(str(10**6 + 3))
        route.fulfill(json={**report, "steps": steps if new else []})

    lens = LensPage(browser, live)
    lens.page.route("**/v1/completions", usage)
    lens.page.route("**/lens/api/engine*", engine)
    lens.open()
    generate(lens, max_tokens=4, seed=1)
    facts = lens.page.locator(".sequence .facts")
    expect(facts).to_contain_text("drafts: 7 accepted, 2 rejected")
    lens.page.click("nav >> text=Engine")
    lens.page.wait_for_selector(".timeline i[title*='step 1000003']")
    shown = lens.page.locator(".timeline i").evaluate_all(
        "all => all.slice(-4).map((i) => [i.className, i.title.split(', ').slice(2).join(', '),"
        " i.querySelector('b')?.style.height ?? ''])"
    )
    assert shown == [
        ["draft", "3 of 4 drafts accepted (ngram)", "75%"],
        ["draft", "0 of 5 drafts accepted (ngram)", "0%"],
        ["draft", "4 of 4 drafts accepted (suffix)", "100%"],
        ["decode", "", ""],
    ]
    facts = lens.page.locator("[aria-label=timeline] .facts")
    expect(facts).to_contain_text("ngram: 3 of 9 drafts accepted")
    expect(facts).to_contain_text("suffix: 4 of 4 drafts accepted")
    assert lens.errors == []
    lens.page.unroute_all(behavior="ignoreErrors")  # a poll may be on its way
    lens.close()
