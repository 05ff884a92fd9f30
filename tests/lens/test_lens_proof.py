"""The proof button: what the page shows against the receipt and a replay. A saved run is edited in
one place and loaded again; the proof must name the place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lens_page import LensPage, run_of
from live_server import Live
from playwright.sync_api import expect

from eventually import becomes
from verbatim.explain.receipt import digest_of, read_receipt

pytestmark = pytest.mark.server
TOKENS = 12
SETTINGS = {"max_tokens": TOKENS, "seed": 11, "temperature": 0.8, "presence_penalty": 0.5}
Run = dict[str, Any]


def a_sixth(names: Iterable[str]) -> list[Any]:
    """Every sixth name for `make test`, the others for `make soak`."""
    return [
        pytest.param(name, marks=[pytest.mark.soak] if i % 6 else [])
        for i, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def lens(browser: Any, live: Live) -> Iterator[LensPage]:
    page = LensPage(browser, live).open()
    page.page.locator("#p-ignore_eos").evaluate("box => { box.closest('details').open = true }")
    page.page.check("#p-ignore_eos")
    yield page
    page.close()
    assert page.errors == []


@pytest.fixture(scope="module")
def raw(lens: LensPage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of raw text with every step saved."""
    lens.generate(**SETTINGS)
    return lens.save(tmp_path_factory.mktemp("saved") / "raw.html")


@pytest.fixture(scope="module")
def chat(lens: LensPage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two turns of a chat, then a branch: its first token is chosen, the others are drawn."""
    page = lens.page
    page.check("text=Chat >> nth=0")
    page.fill("[aria-label='system message']", "be kind")
    for said in ("hello", "and now?"):
        page.fill("#prompt", said)
        with lens.one_request():
            page.click("#send")
    lens.select(3)
    with lens.one_request():
        page.evaluate("() => document.querySelector('.candidates tr button').click()")
    page.fill("[aria-label='system message']", "")
    return lens.save(tmp_path_factory.mktemp("saved") / "chat.html")


def load(lens: LensPage, data: Run, path: Path) -> None:
    path.write_text(json.dumps(data))
    lens.load(path)


def signed(data: Run, change: Callable[[Run], None], place: int = 0) -> None:
    """Change a receipt and write its new digest: the page writes 1.0 as 1, the server does not."""
    receipt = read_receipt(data["segments"][place]["receipt"])
    change(receipt)
    receipt["sha256"] = digest_of(receipt)
    data["segments"][place]["receipt"] = receipt


@pytest.mark.parametrize("kind", ["raw", "chat"])
def test_a_loaded_run_is_identical(
    request: pytest.FixtureRequest, lens: LensPage, tmp_path: Path, kind: str
) -> None:
    data = run_of(request.getfixturevalue(kind))
    load(lens, data, tmp_path / "run.json")
    said = lens.prove()
    assert "Identical" in said
    numbers = int(said.split(" numbers")[0].split(" ")[-1].replace(",", ""))
    assert numbers > 1000 * TOKENS, "the steps of a saved run are compared too"


def record(data: Run, token: int = 4) -> Run:
    found: Run = data["tokens"][token]["record"]
    return found


def row(data: Run, token: int = 4) -> Run:
    found: Run = next(r for key, r in data["rows"] if key.endswith(f":0:{token}"))
    return found


def segment(data: Run) -> Run:
    found: Run = data["segments"][0]
    return found


def branch(data: Run) -> Run:
    found: Run = data["branches"][0]
    return found


def other(data: Run, token: int = 4) -> int:
    """An id that is not the one at `token`."""
    return int(data["tokens"][token]["id"]) ^ 1


def shorter(data: Run) -> None:
    data["branches"][0]["tokens"].pop()


def other_token(data: Run) -> None:
    """On the tile and in the receipt, with a digest that fits: only the replay can tell."""
    wrong = data["tokens"][4]["id"] = other(data)
    signed(data, lambda receipt: receipt["choices"][0]["token_ids"].__setitem__(4, wrong))


def other_token_without_digest(data: Run) -> None:
    wrong = data["tokens"][4]["id"] = other(data)
    data["segments"][0]["receipt"] = read_receipt(data["segments"][0]["receipt"])
    data["segments"][0]["receipt"]["choices"][0]["token_ids"][4] = wrong


def last_chosen(data: Run) -> None:
    token = data["tokens"][TOKENS - 1]
    drawn = {"id": token["id"], "record": token["record"]}
    token.update(forced=True, id=token["id"] ^ 1, drawn=drawn)


def other_end(data: Run) -> None:
    data["branches"][0]["finish"] = "stop: eos"
    signed(data, lambda receipt: receipt["choices"][0].update(finish=["stop", "eos"]))


# what is planted -> (edit, what the proof says)
PLANTED: dict[str, tuple[Callable[[Run], Any], str]] = {
    "log-probability": (lambda d: record(d).update(logprob=record(d)["logprob"] + 1e-9), "token 5"),
    "rank": (lambda d: record(d).update(rank=record(d)["rank"] + 1), "shows rank"),
    "final probability": (lambda d: record(d).update(final_prob=0.5), "shows final_prob"),
    "candidate": (lambda d: record(d)["top"][2].update(logit=1.5), "shows top[2].logit"),
    "fewer candidates": (lambda d: record(d)["top"].pop(), "shows top[63]"),
    "stage": (lambda d: record(d)["stages"][0].update(left=3), "shows stages[0].left"),
    "no numbers": (lambda d: d["tokens"][4].update(record=None), "token 5"),
    "draw": (lambda d: d["tokens"][4].update(draw=1), "shows draw 1"),
    "tile": (lambda d: d["tokens"][4].update(id=other(d)), "token 5: the page shows id"),
    "tile called chosen": (lambda d: d["tokens"][4].update(forced=True), "says that you chose it"),
    "fewer tiles": (shorter, f"shows {TOKENS - 1} tokens"),
    "candidate of a step": (lambda d: row(d)["top"][7].__setitem__(1, 0.25), "shows top[7][1]"),
    "processed logit": (lambda d: row(d)["top"][0].__setitem__(2, 99), "shows top[0][2] 99"),
    "entropy of a step": (lambda d: row(d).update(entropy=1.25), "shows entropy 1.25"),
    "sum of a step": (lambda d: row(d).update(log_total=2.5), "shows log_total 2.5"),
    "bar of a stage": (lambda d: row(d)["stages"][0]["top"][0].__setitem__(1, 0.5), "stages[0]."),
    "noise key of a step": (lambda d: row(d).update(key="0" * 16), "shows key"),
    "prompt": (lambda d: d["branches"][0]["promptIds"].__setitem__(0, 3), "prompt token[0] 3"),
    "prompt of a request": (lambda d: d["segments"][0]["promptIds"].append(3), "prompt token["),
    "place of a request": (lambda d: d["segments"][0].update({"from": 2}), "began at token 3"),
    "seed": (lambda d: d["segments"][0]["params"].update(seed=12), "shows seed 12"),
    "temperature": (lambda d: d["segments"][0]["params"].update(temperature=0.7), "shows temp"),
    "a parameter more": (lambda d: d["segments"][0]["params"].update(top_k=3), "shows top_k 3"),
    "end": (lambda d: d["branches"][0].update(finish="stop"), 'shows finish "stop"'),
    "end in the receipt": (other_end, "finish"),
    "prompt length": (lambda d: d["branches"][0]["usage"].update(prompt_tokens=7), "_tokens 7"),
    "output length": (lambda d: d["branches"][0]["usage"].update(completion_tokens=7), "_tokens 7"),
    "loop": (lambda d: d["branches"][0].update(loop=7), "shows loop 7"),
    "score": (lambda d: d["branches"][0].update(score=7), "shows score 7"),
    "end of a stopped run": (lambda d: branch(d).update(status="stopped"), "without an answer"),
    "fewer tiles of a stopped run": (
        lambda d: (shorter(d), branch(d).update(status="stopped", finish=None, usage=None)),
        f"shows {TOKENS - 1} tokens",
    ),
    "last tile called chosen": (last_chosen, f"shows {TOKENS} tokens"),
    "token in the receipt": (other_token, "the receipt has token"),
    "damaged receipt": (other_token_without_digest, "sha256"),
}


@pytest.mark.parametrize("place", a_sixth(PLANTED))
def test_what_is_planted_is_noticed(lens: LensPage, raw: Path, tmp_path: Path, place: str) -> None:
    plant, expected = PLANTED[place]
    data = run_of(raw)
    plant(data)
    load(lens, data, tmp_path / "planted.json")
    said = lens.prove()
    assert "Not identical" in said
    assert expected in said
    if place == "damaged receipt":
        lens.expect_errors(400, "/lens/api/replay")


def chosen(data: Run) -> Run:
    (token,) = (token for token in data["tokens"] if token.get("forced"))
    found: Run = token
    return found


def pad(explained: Run) -> bool:
    """One candidate more than the server explains."""
    explained["top"].append({**explained["top"][-1], "id": 7})
    return True


def ended_at_the_fork(data: Run) -> None:
    del data["branches"][1]["tokens"][4:]
    data["branches"][1].update(status="done", finish="stop", usage=None)


IN_A_CHAT: dict[str, tuple[Callable[[Run], Any], str]] = {
    "message": (lambda d: d["branches"][1]["asked"][1].update(content="bye"), "messages"),
    "system message": (lambda d: d["branches"][1]["asked"].pop(0), "messages"),
    "chosen token": (lambda d: chosen(d).update(id=chosen(d)["id"] ^ 1), "prompt token["),
    "numbers of a chosen token": (lambda d: chosen(d)["record"].update(logit=1), "shows logit 1"),
    "later fork": (lambda d: d["branches"][1].update(forkAt=4), "it differs from the one before"),
    "earlier fork": (lambda d: d["branches"][1].update(forkAt=1), "it differs from the one before"),
    "no parent": (lambda d: d["branches"][1].update(parent=None, forkAt=0), "without the one that"),
    "chosen token beside a list that is too long": (
        lambda d: (
            (pad(chosen(d)["drawn"]["record"]), pad(d["tokens"][0]["record"]))
            and chosen(d)["record"].update(logit=1)
        ),
        "shows logit 1",
    ),
    "end at a chosen token": (ended_at_the_fork, "an end that no receipt has"),
    "drawn token": (lambda d: chosen(d)["drawn"]["record"].update(logit=1), "shows logit 1"),
}


@pytest.mark.parametrize("place", a_sixth(IN_A_CHAT))
def test_what_is_planted_in_a_branch_of_a_chat_is_noticed(
    lens: LensPage, chat: Path, tmp_path: Path, place: str
) -> None:
    plant, expected = IN_A_CHAT[place]
    data = run_of(chat)
    plant(data)
    load(lens, data, tmp_path / "planted.json")
    said = lens.prove()
    assert "Not identical" in said
    assert expected in said


# what is damaged -> the edit; the page names the place by these words
DAMAGED: dict[str, Callable[[Run], Any]] = {
    "tokens is not": lambda d: d.pop("tokens"),
    "segments is not": lambda d: d.update(segments=[]),
    "segments[0].from": lambda d: segment(d).update({"from": -1000}),
    "segments[0].params.temperature": lambda d: segment(d)["params"].update(temperature="x"),
    "segments[0].receipt.params": lambda d: segment(d)["receipt"].pop("params"),
    "segments[0].receipt.choices[0] is": lambda d: segment(d)["receipt"].update(choices=[None]),
    "choices[0].finish": lambda d: segment(d)["receipt"]["choices"][0].pop("finish"),
    "branches is not": lambda d: d.update(branches=[]),
    "branches[0].parent": lambda d: branch(d).update(parent=branch(d)["id"]),
    "branches[0].tokens": lambda d: branch(d)["tokens"].append(99),
    "branches[0].usage.": lambda d: branch(d).update(usage={}),
    "branches[0].status": lambda d: branch(d).update(status="running"),
    "branches[1].id": lambda d: d["branches"].append(dict(branch(d))),
    "time after its start": lambda d: branch(d).update(started=1e15),
    "branches[0].label": lambda d: branch(d).update(label={}),
    "branches[0].score": lambda d: branch(d).update(score="abc"),
    "branches[0].loop": lambda d: branch(d).update(loop={}),
    "branches[0].warnings[0]": lambda d: branch(d).update(warnings=[None]),
    "branches[0].firstToken": lambda d: branch(d).update(firstToken="x"),
    "current is not": lambda d: d.update(current=99),
    "colour": lambda d: d.update(colour="nonsense"),
    "tokens[3].segment": lambda d: d["tokens"][3].update(segment="length"),
    "tokens[4].record.entropy": lambda d: record(d).pop("entropy"),
    "tokens[4].record.top is": lambda d: record(d).update(top=[]),
    "].row is not part of": lambda d: row(d).update(row="AAAA", row_type="f4"),
    "].tail is": lambda d: row(d).pop("tail"),
    "].top[0][2]": lambda d: row(d)["top"][0].pop(),
    "is not a step of this vocabulary": lambda d: row(d).update(vocab=2_000_000_000),
    "rows[0][0]": lambda d: d["rows"][0].__setitem__(0, "2:0:3junk"),
    "info.model": lambda d: d.update(info={}),
    "vocab is not": lambda d: d.pop("vocab"),
}


@pytest.mark.parametrize("damage", a_sixth(DAMAGED))
def test_a_damaged_file_is_refused_in_words(
    lens: LensPage, raw: Path, tmp_path: Path, damage: str
) -> None:
    data = run_of(raw)
    load(lens, data, tmp_path / "sound.json")
    DAMAGED[damage](data)
    (tmp_path / "damaged.json").write_text(json.dumps(data))
    lens.page.set_input_files("#load", tmp_path / "damaged.json")
    alert = expect(lens.page.locator("[role=alert]"))
    alert.to_contain_text("This file holds a damaged run: ")
    alert.to_contain_text(damage)
    lens.page.wait_for_selector(f"#tile-{TOKENS - 1}")  # the run before it stays
    lens.page.click("[aria-label=dismiss]")


def branch_from(lens: LensPage, rank: int) -> int:
    """Click the button of a candidate; returns its id."""
    row = lens.page.locator(f".candidates tr:nth-child({rank})")
    with lens.one_request():
        found = row.evaluate("r => { r.querySelector('button').click(); return +r.dataset.id }")
    return int(found)


def test_a_branch_back_to_the_drawn_token_is_identical(lens: LensPage) -> None:
    """Also by way of a candidate that the stream did not bring, whose numbers are not known."""
    drawn = lens.generate(**SETTINGS)
    for rank in (2, 100):
        lens.select(3)
        for shown in (64, 116):
            lens.page.click("text=Show more of")
            lens.page.wait_for_selector(f".candidates tr:nth-child({shown})")
        there = branch_from(lens, rank + (first_ids(lens)[rank - 1] == drawn[3]))
        becomes(lambda: lens.tokens()[:4], [*drawn[:3], there])
        assert "Identical" in lens.prove()
        lens.select(3)
        back = first_ids(lens).index(drawn[3]) + 1
        assert branch_from(lens, back) == drawn[3]
        becomes(lambda: lens.tokens()[:4], drawn[:4])
        expect(lens.page.locator(".candidates tr.drawn")).to_contain_text("drawn")
        assert "Identical" in lens.prove()
        lens.page.click("text=Show fewer")


def first_ids(lens: LensPage) -> list[int]:
    rows = lens.page.locator(".candidates tr")
    return [int(i) for i in rows.evaluate_all("all => all.map((r) => r.dataset.id)")]


def test_a_server_that_explains_fewer_candidates_compares_those(
    lens: LensPage, raw: Path, tmp_path: Path
) -> None:
    data = run_of(raw)
    load(lens, data, tmp_path / "run.json")
    lens.page.evaluate("() => { window.lens.info.max_logprobs = 5 }")
    said = lens.prove()
    assert "Identical" in said
    assert "Only the first 5 candidates" in said
    lens.page.evaluate("() => { window.lens.info.max_logprobs = 0 }")
    assert "Identical" in lens.prove()
    lens.page.evaluate("() => { window.lens.info.max_logprobs = 5 }")
    record(data)["top"][4]["logit"] += 1
    load(lens, data, tmp_path / "planted.json")
    assert "shows top[4].logit" in lens.prove()
    lens.page.evaluate("() => { window.lens.info.max_logprobs = 64 }")


def test_a_damaged_file_opened_by_itself_says_so(browser: Any, live: Live, raw: Path) -> None:
    page = LensPage(browser, live, offline=True)
    damaged = raw.with_name("damaged.html")
    damaged.write_text(raw.read_text().replace('"colour":"probability"', '"colour":"nonsense"'))
    page.page.goto(damaged.as_uri())
    page.page.wait_for_selector("text=This file holds a damaged run: colour is not one of")
    assert page.errors == []
    page.close()


def test_a_proof_of_a_branch_that_is_left_is_dropped(lens: LensPage, chat: Path) -> None:
    """Its steps were still being computed: the page does not stay at "computing"."""
    load(lens, run_of(chat), chat.with_name("left.json"))
    held: list[Any] = []

    def hold(route: Any) -> None:
        if held:
            route.continue_()
        held.append(route)

    lens.page.route("**/lens/api/step", hold)
    lens.page.click("#prove")
    lens.page.wait_for_selector("#proof:has-text('computing the opened steps again: 1 of')")
    lens.page.click(".branch:not(.on) button.name")
    lens.page.wait_for_selector("#proof", state="detached")
    held[0].continue_()
    assert "Identical" in lens.prove()
    lens.page.unroute("**/lens/api/step")
