"""Hostile chat templates: every one raises ModelError within its time and memory budget.
Ordinary constructs still work."""

from __future__ import annotations

import itertools
import json
import random
import resource
import threading
from pathlib import Path

import pytest

from verbatim.base.errors import ModelError, RequestError
from verbatim.text.templates import template_budget
from verbatim.text.templates.chat_template import ChatTemplate
from verbatim.text.templates.sandbox import MAX_SOURCE
from verbatim.text.templates.template_budget import MAX_SECONDS

HI = [{"role": "user", "content": "hello"}]

_FILE = Path(__file__).parents[1] / "data" / "templates.json"
_TEMPLATES: dict[str, dict[str, str]] = json.loads(_FILE.read_text("utf-8"))
HONEST = _TEMPLATES["sound"]  # constructs of real templates -> what they render
HOSTILE = _TEMPLATES["hostile"] | {  # what it attacks or how it grows -> the template
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "deep unary": "{{ " + "not " * 20000 + "1 }}",
    "too long": " " * (MAX_SOURCE + 1),
    "many attributes": "{{ a" + ".b" * 30000 + " }}",
    "many operators": "{{ 1" + " + 1" * 15000 + " }}",
}


@pytest.mark.parametrize("speed", [4, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_a_model_error(
    name: str, speed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`speed`: CPU seconds of the budget's clock per second; most of these end by time."""
    real, source = template_budget.clock, HOSTILE[name]
    monkeypatch.setattr(template_budget, "clock", lambda: speed * real())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError) as error:
        ChatTemplate(source).render(HI)
    assert len(str(error.value)) < 600
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 512, f"{grown:.0f} MiB"


@pytest.mark.parametrize("source", sorted(HONEST))
def test_constructs_of_real_templates_work(source: str) -> None:
    assert ChatTemplate(source).render(HI) == HONEST[source]


@pytest.mark.usefixtures("stopped_clock")
def test_a_long_conversation_fits_the_budget() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == messages|length - 1 %}last{% endif %}"
        "{{ '<' + m.role + '>' + m.content|trim ~ '\n' }}"
        "{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 2000  # two million characters
    assert len(ChatTemplate(source).render(messages)) > 1_900_000
    rest = "{% for m in messages %}{{ messages[loop.index:]|length }},{% endfor %}"
    assert ChatTemplate(rest).render(messages[:200]).endswith(",1,0,")


def test_compiling_the_longest_source_checks_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the time check it would compile for minutes. Here each check advances 10 ms, so 40
    checks are the whole budget."""
    looks = itertools.count()
    monkeypatch.setattr("verbatim.text.templates.template_budget.clock", lambda: next(looks) / 100)
    with pytest.raises(ModelError, match="more time"):
        ChatTemplate("{{ a }}" * (MAX_SOURCE // 7)).render(HI)


def test_a_budget_error_of_a_sound_template_is_a_request_error() -> None:
    source = "{% for m in messages %}{{ (m.content * 1000) }}{% endfor %}"
    template = ChatTemplate(source)
    assert len(template.render(HI)) == 5000
    with pytest.raises(RequestError, match="more text than a chat can need") as error:
        template.render([{"role": "user", "content": "x" * 100_000}])
    assert error.value.param == "messages"


def test_a_template_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By time alone: this loop is small enough to render, and is rejected after 0.4 s."""
    source = "{% for i in range(1000) %}{{ i }}{% endfor %}"
    now = [0.0]

    def clock() -> float:
        now[0] += step
        return now[0]

    monkeypatch.setattr("verbatim.text.templates.template_budget.clock", clock)
    step = 0.0
    assert ChatTemplate(source).render(HI).endswith("999")
    step = MAX_SECONDS
    with pytest.raises(ModelError, match="takes more time than a chat can need"):
        ChatTemplate(source).render(HI)


@pytest.mark.usefixtures("stopped_clock")
def test_renderings_in_threads_do_not_share_a_budget() -> None:
    template = ChatTemplate("{% for i in range(20000) %}{{ messages[0].content }}{% endfor %}")
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda: results.append(len(template.render(HI)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [100_000] * 4


def mutated(rng: random.Random, sources: list[str]) -> str:
    """A template with pieces cut, doubled, swapped or taken from others."""
    text = rng.choice(sources)
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(text) + 1), rng.randint(0, 12)
        other = rng.choice(sources)
        begin = rng.randrange(len(other) + 1)
        insert = rng.choice(
            [
                "",
                other[begin : begin + size],
                rng.choice("{}%#'\"|.()[]~*+-=0 \n"),
                "range(99999)",
                "__class__",
                "* 10**8",
            ]
        )
        text = text[:at] + insert + text[at + size * rng.randint(0, 1) :]
    return text


def render_mutated(count: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    sources = [*HONEST, *(text for text in HOSTILE.values() if len(text) < 400)]
    outcome = {"rendered": 0, "refused": 0}
    for _ in range(count):
        source = mutated(rng, sources)
        try:
            ChatTemplate(source).render(HI)
            outcome["rendered"] += 1
        except ModelError:
            outcome["refused"] += 1
    return outcome


def test_mutated_templates_render_or_are_model_errors() -> None:
    outcome = render_mutated(100, seed=7)
    assert min(outcome.values()) > 10


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_mutated_templates() -> None:
    render_mutated(50_000, seed=8)


def test_values_of_the_request_cannot_be_objects() -> None:
    class Rich:
        secret = "s"

    with pytest.raises(RequestError, match="not JSON"):
        ChatTemplate("{{ thing.secret }}").render(HI, thing=Rich())


def test_plain_subclasses_lose_their_methods() -> None:
    class Loud(str):
        def shout(self) -> str:
            return "!"

    with pytest.raises(RequestError):
        ChatTemplate("{% if thing is defined %}{{ thing.shout() }}{% endif %}").render(
            HI, thing=Loud("a")
        )
