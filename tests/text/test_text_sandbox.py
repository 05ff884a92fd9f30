"""Hostile chat templates: every one raises ModelError within its time and memory budget.
Ordinary constructs still work."""

from __future__ import annotations

import itertools
import random
import resource
import threading

import pytest

from verbatim.base.errors import ModelError, RequestError
from verbatim.text.templates import template_budget
from verbatim.text.templates.chat_template import ChatTemplate
from verbatim.text.templates.sandbox import MAX_SOURCE
from verbatim.text.templates.template_budget import MAX_SECONDS

HI = [{"role": "user", "content": "hello"}]

ATTACKS = {
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ ''|attr('__class__') }}",
    "map attribute": "{{ messages|map(attribute='__class__')|list }}",
    "getitem dunder": "{{ messages['__class__'] }}",
    "globals of a global": "{{ raise_exception.__globals__ }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "globals of namespace": "{{ namespace.__init__.__globals__ }}",
    "format string attribute": "{{ '{0.__class__}'.format(messages) }}",
    "format_map attribute": "{{ '{m.__class__}'.format_map({'m': messages}) }}",
    "indirect format": "{% set f = '{0.__class__.__init__}'.format %}{{ f(messages) }}",
    "format through map": "{{ ['{0.__class__}']|map('format', messages)|list }}{{ ''.__class__ }}",
    "self context": "{{ self._TemplateReference__context }}",
    "mutation": "{{ messages.append(1) }}",
    "dict mutation": "{{ messages[0].update({'role': 'x'}) }}",
    "namespace dunder": "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "include": "{% include 'etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'x' %}",
    "undefined filter": "{{ 1|lipsum }}",
    "removed global": "{{ lipsum(n=100) }}",
    "object as text": "{{ namespace() }}",
    "generator as text": "{{ messages|map('upper') }}",
    "bytes of a number": "{{ (1).to_bytes(10**9, 'big') }}",
    "number of a float": "{{ (1.5).as_integer_ratio() }}",
    "generator internals": "{% set g = messages|map('upper') %}{{ g.gi_running }}",
    "bytes of text": "{{ 'a'.encode() }}",
    "translate": "{{ 'aaa'.translate({97: 'b' * 1000}) }}",
    "tabs": "{{ ('a' + '\\t').expandtabs(10**9) }}",
    "strftime width": "{{ strftime_now('%1000000000d') }}",
    "always raises": "{{ raise_exception('no') }}",
    "syntax": "{% if %}",
    "unclosed": "{{ 'abc",
    "unknown tag": "{% frobnicate %}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "deep unary": "{{ " + "not " * 20000 + "1 }}",
    "too long": " " * (MAX_SOURCE + 1),
    "not text": "{{ messages + 1 }}",
    "division": "{{ 1 // 0 }}",
}

BOMBS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested ranges, no output": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "nested strings": (
        "{% set s = 'a' * 90000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}"
    ),
    "filtered loop": (
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}"
    ),
    "output": "{% set s = 'a' * 100000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "repetition": "{{ 'a' * 10**9 }}",
    "repetition, reversed": "{{ 10**9 * 'a' }}",
    "list repetition": "{{ ([0] * 10**9)|length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "products": (
        "{% set ns = namespace(x=2**1000) %}{% for i in range(60) %}"
        "{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}"
    ),
    "doubling with +": (
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}{{ ns.x }}"
    ),
    "doubling with ~": (
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}{{ ns.x }}"
    ),
    "doubling lists": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}{{ ns.x }}"
    ),
    "nesting lists": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% endfor %}{{ ns.x }}"
    ),
    "nesting dicts": (
        "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
        "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x|tojson }}"
    ),
    "nesting with dict()": (
        "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
        "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}"
    ),
    "comparing nests": (
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
        "{% endfor %}{{ ns.x == ns.y }}"
    ),
    "input, many times": (
        "{% set ns = namespace(x=[messages]) %}{% for i in range(60) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}"
    ),
    "set blocks": (
        "{% set a %}{% for i in range(1000) %}{{ 'x' * 1000 }}{% endfor %}{% endset %}"
        "{% set b %}{% for i in range(1000) %}{{ a }}{% endfor %}{% endset %}{{ b }}"
    ),
    "macro recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro tree": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "join": "{{ (['a' * 10000] * 10000)|join('b' * 1000) }}",
    "join method": "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace filter": "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "replace nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "center": "{{ 'a'|center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "indent": "{{ ('a\n' * 100000)|indent(10**6) }}",
    "indent by text": "{{ ('a\n' * 100000)|indent('x' * 100000) }}",
    "json indent": "{{ ([[[[1]]]] * 1000)|tojson(indent=10**6) }}",
    "batch fill": "{{ [1]|batch(10**9, 'x')|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format nested width": "{{ '{:{}}'.format(1, 10**9) }}",
    "format by keyword": "{{ '{x:{w}}'.format(x=1, w=10**9) }}",
    "format map width": "{{ '{x:1000000000}'.format_map({'x': 1}) }}",
    "format of a nest": (
        "{% set ns = namespace(x=['a' * 1000]) %}{% for i in range(40) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ '{}'.format(ns.x) }}"
    ),
    "round": "{{ 1.5|round(10**9, 'ceil') }}",
    "sum of lists": "{{ ([[1] * 1000] * 1000)|sum(start=[]) }}",
    "map of sums": "{{ ([range(99999)] * 99999)|map('sum')|list }}",
    "select in": "{% set r = range(99999)|list %}{{ r|map('string')|select('in', r)|list }}",
    "sorting": (
        "{% for i in range(99999) %}{% set x = range(99999)|list|sort(reverse=true) %}{% endfor %}"
    ),
    "slices kept": (
        "{% set s = 'a' * 10000000 %}{% set ns = namespace(x=[]) %}{% for i in range(1000) %}"
        "{% set ns.x = ns.x + [s[i:]] %}{% endfor %}"
    ),
    "upper kept": (
        "{% set s = 'a' * 10000000 %}{% set ns = namespace(x=[]) %}{% for i in range(1000) %}"
        "{% set ns.x = ns.x + [s.upper()] %}{% endfor %}"
    ),
    "split kept": (
        "{% set s = 'a ' * 1000000 %}{% set ns = namespace(x=[]) %}{% for i in range(1000) %}"
        "{% set ns.x = ns.x + [s.split()] %}{% endfor %}"
    ),
    "constant, folded while compiling": (
        "{{ 'a'|center(10**9) }}{{ ('x' * 10**6)|replace('x', 'y' * 10**6) }}"
    ),
    "call block": (
        "{% macro m() %}{% for i in range(99999) %}{{ caller() }}{% endfor %}{% endmacro %}"
        "{% call m() %}{{ 'x' * 10000 }}{% endcall %}"
    ),
    "filter block": (
        "{% filter upper %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endfilter %}"
    ),
    "groupby": (
        "{% for i in range(99999) %}"
        "{% set x = (range(99999)|map('string')|list)|groupby('x') %}{% endfor %}"
    ),
    "unique": "{% for i in range(99999) %}{% set x = range(99999)|unique|list %}{% endfor %}",
    "big int text": (
        "{% set x = 2 ** 4000 %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% set y = x|string %}{% endfor %}{% endfor %}"
    ),
    "urlencode": "{% for i in range(99999) %}{% set x = ('é' * 100000)|urlencode %}{% endfor %}",
    "list of a text": "{{ ('a' * 8000000)|list|length }}",
    "split of a text": "{{ ('a ' * 4000000).split()|length }}",
    "split by a letter": "{{ ('ab' * 4000000).split('a')|length }}",
    "lines of a text": "{{ ('\\n' * 8000000).splitlines()|length }}",
    "join of a text": "{{ '-'.join('a' * 8000000) }}",
    "title of a text": "{{ ('a ' * 4000000)|title }}",
    "words of a text": "{{ ('a ' * 4000000)|wordcount }}",
    "emoji kept": (
        "{% set s = '🤯' * 4000000 %}{% set ns = namespace(x=[]) %}{% for i in range(1000) %}"
        "{% set ns.x = ns.x + [s.upper()] %}{% endfor %}"
    ),
    "striptags": "{% for i in range(99999) %}{% set x = ('<' * 100000)|striptags %}{% endfor %}",
    "wordcount": "{% for i in range(99999) %}{% set x = ('a ' * 100000)|wordcount %}{% endfor %}",
    "many attributes": ("{{ " + "a" + ".b" * 30000 + " }}"),
    "many operators": "{{ 1" + " + 1" * 15000 + " }}",
}


@pytest.mark.parametrize("speed", [4, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", [*ATTACKS, *BOMBS])
def test_a_hostile_template_is_a_model_error(
    name: str, speed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`speed`: CPU seconds of the budget's clock per second; most of these end by time."""
    real, source = template_budget.clock, {**ATTACKS, **BOMBS}[name]
    monkeypatch.setattr(template_budget, "clock", lambda: speed * real())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError) as error:
        ChatTemplate(source).render(HI)
    assert len(str(error.value)) < 600
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 512, f"{grown:.0f} MiB"


HONEST = {
    (
        "{% for m in messages %}{{ loop.index }}{{ m.role|upper }}{% if not loop.last %}"
        ",{% endif %}{% endfor %}"
    ): "1USER",
    (
        "{% set ns = namespace(found=false) %}{% for m in messages %}"
        "{% set ns.found = true %}{% endfor %}{{ ns.found }}"
    ): "True",
    "{{ messages[0].content[:2] ~ '|' ~ messages[0]['content'][-2:] ~ 1 ~ none }}": "he|lo1None",
    "{{ ['a', messages[0].role]|join(', ') }}": "a, user",
    "{{ {'a': 'é<', 'b': [1, 2.5, none, true]}|tojson }}": '{"a": "é<", "b": [1, 2.5, null, true]}',
    "{{ {'b': 1, 'a': 2}|tojson(indent=2, sort_keys=true) }}": '{\n  "a": 2,\n  "b": 1\n}',
    (
        "{{ 'a,b'.split(',')|reverse|list }}{{ '%s-%d' % ('x', 3) }}{{ '{}:{:>3}'.format(1, 2) }}"
    ): "['b', 'a']x-31:  2",
    "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{{ m(m('b')) }}": "<a><<b>>",
    (
        "{% for i in range(10) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}"
        "{% endif %}{{ i }}{% endfor %}"
    ): "013",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}": "hello",
    "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|first }}": "hello",
    "{{ dict(a=1).items()|list }}{{ dict(a=1).get('b', 'd') }}": "[('a', 1)]d",
    "{{ messages|length * 2 + 7 // 2 - 2 ** 3 % 5 }}": "2",
    "{{ undefined_thing }}|{{ messages[9] }}|{{ x is defined }}": "||False",
    (
        "{{ 'x'|indent(4, true) }}{{ 'ab'|replace('a', 'c') }}{{ 3|string }}{{ '5'|int + 1 }}"
    ): "    xcb36",
    "  {%- if true %}\nyes\n  {%- endif %}\n": "yes",
    "{{ strftime_now('%Y')|length }}": "4",
    (
        "{{ messages is iterable }}{{ 'a' is string }}{{ {} is mapping }}{{ 2 is even }}"
    ): "TrueTrueTrueTrue",
}


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
    sources = [*HONEST, *(b for b in [*ATTACKS.values(), *BOMBS.values()] if len(b) < 400)]
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
