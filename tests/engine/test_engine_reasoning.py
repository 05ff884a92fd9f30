"""Reasoning models in the engine: the reasoning is split off, and grammars apply to the answer."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from verbatim import LLM, SamplingParams
from verbatim.base.errors import UnsupportedError
from verbatim.base.records import Drawn, Finish
from verbatim.engine.reasoning_matcher import ReasoningMatcher, check_supported
from verbatim.engine.reasoning_tracker import make_tracker
from verbatim.engine.stream import ChoiceStream
from verbatim.grammar.compiler import compile_structure
from verbatim.testing.fakes import (
    ByteTokenizer,
    FakeBackend,
    ThinkByteTokenizer,
    fake_parts,
    fake_spec,
)
from verbatim.text.reasoning.reasoning_format import ReasoningFormat, find_format
from verbatim.text.templates.chat_template import ChatTemplate

OPEN, CLOSE, VOCAB = 260, 261, 262
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}},
    "required": ["n"],
    "additionalProperties": False,
}


def reasoning_format() -> ReasoningFormat:
    found = find_format([TEMPLATE], ThinkByteTokenizer())
    assert found is not None
    return found


def make_matcher(
    inner: Any, reasoning: ReasoningFormat, budget: int | None = None
) -> ReasoningMatcher:
    tracker, ends = make_tracker(reasoning, ThinkByteTokenizer()), (ByteTokenizer.EOS,)
    return ReasoningMatcher(inner, tracker, VOCAB, ends, budget, reasoning.close_ids)


def open_llm(source: str = TEMPLATE, **options: Any) -> LLM:
    backend = FakeBackend(fake_spec(vocab=VOCAB), pipeline=True)
    template = ChatTemplate(source, "<s>", "</s>")
    loaded = replace(fake_parts(backend), tokenizer=ThinkByteTokenizer(), template=template)
    return LLM.from_loaded(loaded, **options)


def test_streamed_deltas_concatenate_to_the_reasoning_and_the_answer() -> None:
    tokenizer, rng = ThinkByteTokenizer(), random.Random(3)
    output = [OPEN, *b"\nTwo and two.\n", CLOSE, *"\n\nFour é.".encode()]
    for _ in range(200):
        stream = ChoiceStream("r", 0, SamplingParams(), tokenizer, reasoning_format())
        deltas = []
        for token in output:
            stream.push(Drawn(token, 0.0), None)
            if rng.random() < 0.4:
                deltas.append(stream.take())
        stream.push(Drawn(ByteTokenizer.EOS, 0.0), Finish("stop", "eos"))
        deltas.append(stream.take())
        choice = stream.choice(0)
        assert (choice.reasoning, choice.text) == ("Two and two.", "Four é.")
        assert "".join(d.reasoning for d in deltas if d) == choice.reasoning
        assert "".join(d.text for d in deltas if d) == choice.text
        assert stream.reasoning_tokens == 1 + len("\nTwo and two.\n") + 1


def test_stop_strings_apply_to_the_answer_only() -> None:
    stream = ChoiceStream(
        "r", 0, SamplingParams(stop="x"), ThinkByteTokenizer(), reasoning_format()
    )
    finish = None
    for token in [OPEN, *b"a x b", CLOSE, *b"yes x no"]:
        finish = finish or stream.push(Drawn(token, 0.0), None)
    assert finish == Finish("stop", "x")
    assert (stream.choice(0).reasoning, stream.choice(0).text) == ("a x b", "yes ")


def allowed(mask: bytes | None, token: int) -> bool:
    return mask is None or bool(mask[token // 8] >> token % 8 & 1)


def test_a_grammar_binds_the_answer_and_not_the_reasoning() -> None:
    """Random tokens under the masks of 120 sequences: every answer is valid."""
    tokenizer, rng = ThinkByteTokenizer(), random.Random(4)
    structure = compile_structure(SamplingParams(json_schema=SCHEMA), tokenizer)
    assert structure is not None
    for start in ("", "open", "closed"):
        for _ in range(40):
            reasoning = reasoning_format().after(
                {"open": "<think>", "closed": "</think>"}.get(start, "")
            )
            budget = rng.choice([None, 1, 7])
            matcher = make_matcher(structure.start(), reasoning, budget)
            tokens: list[int] = []
            while not matcher.finished:
                mask = matcher.mask()
                # The model likes to close its reasoning, so that each sequence ends soon.
                wish = [CLOSE] * 40 if rng.random() < 0.2 else []
                choices = [t for t in [*range(VOCAB), *wish] if allowed(mask, t)]
                tokens.append(rng.choice(choices))
                matcher.advance(tokens[-1])
            stream = ChoiceStream("r", 0, SamplingParams(), tokenizer, reasoning)
            for token in tokens:
                stream.push(Drawn(token, 0.0), None)
            stream.end(Finish("stop", "json_schema"))
            assert json.loads(stream.choice(0).text)["n"] in (1, 2, 3)
            reasoning = tokens.index(CLOSE) if CLOSE in tokens else 0
            assert budget is None or reasoning <= budget + 1
            assert ByteTokenizer.EOS not in tokens[:reasoning]


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_a_structured_chat_has_a_valid_answer_and_reasoning_within_its_budget(
    speculate: str,
) -> None:
    opening = TEMPLATE + "<think>"
    with open_llm(opening) as llm:
        params = SamplingParams(
            json_schema=SCHEMA, thinking_budget=9, max_tokens=200, seed=5, speculate=speculate
        )
        done = llm.chat([{"role": "user", "content": "hi"}], params)
    assert json.loads(done.text)["n"] in (1, 2, 3)
    assert done.token_ids[9] == CLOSE
    assert done.usage.reasoning_tokens == 10
    assert "<think>" not in done.text + done.reasoning


def test_thinking_switched_off_in_the_template_leaves_only_an_answer() -> None:
    with open_llm() as llm:
        params = SamplingParams(json_schema=SCHEMA, max_tokens=200, seed=1)
        done = llm.chat([{"role": "user", "content": "hi"}], params, enable_thinking=False)
        assert json.loads(done.text)
        assert done.reasoning == ""


def test_a_budget_without_reasoning_is_refused_by_name() -> None:
    with open_llm("{{ messages[0].content }}<|assistant|>") as llm:
        params = SamplingParams(thinking_budget=4)
        for ask in (llm.generate, lambda p, s: llm.chat([{"role": "user", "content": p}], s)):
            with pytest.raises(UnsupportedError, match="thinking_budget"):
                ask("hi", params)  # type: ignore[operator]


def test_a_grammar_is_the_whole_output_where_the_prompt_mentions_no_reasoning() -> None:
    """An opening tag of ordinary text; with the tag in the prompt, see test_engine_text_tags.py."""
    source = TEMPLATE.replace("<think></think>", "<thought></thought>")
    with open_llm(source) as llm:
        params = SamplingParams(json_schema=SCHEMA, max_tokens=60)
        done = llm.chat([{"role": "user", "content": "hi"}], params)
        assert done.reasoning == ""
        assert isinstance(json.loads(done.text)["n"], int)


def test_a_budget_is_refused_where_no_tokens_spell_the_end_of_reasoning() -> None:
    unwritable = replace(reasoning_format(), close_ids=())
    with pytest.raises(UnsupportedError, match=r"thinking_budget.*</think>"):
        check_supported(unwritable, "thinking_budget")
    check_supported(unwritable, "json_schema")
    check_supported(replace(unwritable, start="closed"), "thinking_budget")


def test_white_space_before_reasoning_escapes_neither_budget_nor_grammar() -> None:
    """The splitter drops white space before the opening tag, so the matcher must not take it for
    the start of the answer."""
    only_budget = make_matcher(None, reasoning_format(), 2)
    for token in (*b"\n ", OPEN, *b"a"):
        only_budget.advance(token)
    mask = only_budget.mask()
    assert [t for t in range(VOCAB) if allowed(mask, t)] == [CLOSE]

    structure = compile_structure(SamplingParams(regex=r"\n?(yes|no)"), ThinkByteTokenizer())
    assert structure is not None
    matcher = make_matcher(structure.start(), reasoning_format())
    matcher.advance(ord("\n"))
    assert allowed(matcher.mask(), OPEN), "white space switched the reasoning off"
    for each in (matcher, matcher.copy()):
        for token in (OPEN, *b"x {", CLOSE):
            each.advance(token)
        first = [t for t in range(VOCAB) if allowed(each.mask(), t)]
        assert first == [ord("\n"), ord("n"), ord("y")]  # the whole grammar, white space included
        for token in b"no":
            each.advance(token)
        assert each.finished
    for start in ("\n", "\n\n  "):  # an answer behind white space, without reasoning
        loose = make_matcher(None, reasoning_format(), 2)
        for token in (*start.encode(), *b"abc", OPEN):
            loose.advance(token)
        assert loose.mask() is None


def test_a_grammar_of_white_space_alone_ends_behind_it() -> None:
    structure = compile_structure(SamplingParams(regex=r"\n"), ThinkByteTokenizer())
    assert structure is not None
    matcher = make_matcher(structure.start(), reasoning_format())
    matcher.advance(ord("\n"))
    assert matcher.finished


# ------------------------------------------------ reports about vLLM, each as a test (issue number)


def split_in(pieces: list[str], reasoning: ReasoningFormat) -> tuple[str, str]:
    splitter = reasoning.splitter()
    found = [piece for text in pieces for piece in splitter.push(text)] + splitter.finish()
    return tuple("".join(t for k, t in found if k == kind) for kind in ("reasoning", "answer"))  # type: ignore[return-value]


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 1000])
def test_vllm_46042_and_45687_the_tags_of_minimax_m3_do_not_leak(cut: int) -> None:
    """`<mm:think>` and `</mm:think>` were streamed as content."""
    template = "{{ messages }}{% if x %}<mm:think></mm:think>{% endif %}"
    reasoning = find_format([template], ByteTokenizer())
    assert reasoning is not None
    text = "<mm:think>reasoning text</mm:think>final answer"
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
    assert split_in(pieces, reasoning) == ("reasoning text", "final answer")


def test_vllm_39885_reasoning_after_tool_results_is_reasoning() -> None:
    """Earlier turns with closed reasoning and tool results do not decide about the next output."""
    template = "{{ messages }}<|channel>thought\n<channel|>"
    reasoning = find_format([template], ByteTokenizer())
    assert reasoning is not None
    prompt = "<|channel>thought\nold<channel|>call<|tool>result<tool|><|turn>model\n"
    output = ["<|chan", "nel>tho", "ught\nnew", "<chan", "nel|>It is 20 degrees."]
    assert split_in(output, reasoning.after(prompt)) == ("new", "It is 20 degrees.")


@pytest.mark.parametrize("size", range(1, 12))
def test_vllm_55195_markers_in_deltas_of_several_tokens(size: int) -> None:
    """One delta may hold a whole reasoning, both markers and the start of the answer."""
    tokens = [OPEN, *b"So.", CLOSE, *b"\n\nYes </think> no"]
    stream = ChoiceStream("r", 0, SamplingParams(), ThinkByteTokenizer(), reasoning_format())
    deltas = []
    for at in range(0, len(tokens), size):
        for token in tokens[at : at + size]:
            stream.push(Drawn(token, 0.0), None)
        deltas.append(stream.take())
    stream.end(Finish("stop", "eos"))
    deltas.append(stream.take())
    assert "".join(d.reasoning for d in deltas if d) == "So."
    assert "".join(d.text for d in deltas if d) == "Yes </think> no"


@pytest.mark.parametrize("source", [TEMPLATE, TEMPLATE + "<think>"])
def test_vllm_47027_a_json_schema_does_not_switch_thinking_off(source: str) -> None:
    """The opening tag stays allowed, or the prompt has opened the reasoning; only the budget ends
    it."""
    with open_llm(source) as llm:
        params = SamplingParams(
            json_schema=SCHEMA, thinking_budget=6, max_tokens=200, seed=3, logit_bias={OPEN: 100.0}
        )
        done = llm.chat([{"role": "user", "content": "hi"}], params)
    assert done.usage.reasoning_tokens >= 6
    assert json.loads(done.text)["n"] in (1, 2, 3)


def test_vllm_50948_constrained_json_is_the_answer_and_not_the_reasoning() -> None:
    """A model that writes the document at once, without reasoning, has an answer."""
    with open_llm() as llm:
        params = SamplingParams(json_schema=SCHEMA, max_tokens=200, seed=3, logit_bias={OPEN: -100})
        done = llm.chat([{"role": "user", "content": "hi"}], params)
    assert done.reasoning == ""
    assert json.loads(done.text)["n"] in (1, 2, 3)


@pytest.mark.parametrize("seed", range(4))
def test_vllm_53469_a_free_reasoning_then_the_document_in_one_stream(seed: int) -> None:
    """The text of this report was not found. Reports of its group say: tags leak into the content,
    tags are split over deltas, a schema switches the reasoning off or constrains it. Here is one
    streamed answer with a schema that shows none of these."""
    ask = [{"role": "user", "content": "hi"}]
    params = SamplingParams(
        json_schema=SCHEMA,
        thinking_budget=12,
        max_tokens=200,
        seed=seed,
        logit_bias={OPEN: -100.0, CLOSE: -100.0},  # only the budget ends the reasoning
    )
    with open_llm(TEMPLATE + "<think>") as llm:
        with llm.chat_stream(ask, params) as stream:
            deltas = list(stream)
        whole = llm.chat(ask, params)
    reasoning = "".join(delta.reasoning for delta in deltas)
    assert (reasoning, "".join(delta.text for delta in deltas)) == (whole.reasoning, whole.text)
    assert whole.usage.reasoning_tokens >= 12, "the schema does not switch the reasoning off"
    assert not reasoning.startswith("{"), "nor does it constrain the reasoning"
    assert len(set(reasoning)) > 4
    assert json.loads(whole.text)["n"] in (1, 2, 3)
    for delta in deltas:
        assert "think>" not in delta.text + delta.reasoning
        assert not (delta.reasoning and delta.text) or delta.text.startswith("{")


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ALWAYS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"


@pytest.mark.parametrize(
    ("source", "switch", "why"),
    [
        (PLAIN, {"enable_thinking": False}, "does not reason"),
        (PLAIN, {"thinking": False}, "does not reason"),
        (PLAIN, {"reasoning_effort": "low"}, "does not reason"),
        (ALWAYS, {"enable_thinking": True}, "always reasons"),
        (PLAIN, {"enable_thinking": True}, None),
        (ALWAYS, {"enable_thinking": False}, None),
        (PLAIN, {"enable_thinkin": False}, None),
    ],
)
def test_a_switch_that_says_what_holds_anyway_is_a_warning(
    source: str, switch: dict[str, Any], why: str | None
) -> None:
    """One that asks for something else is an error."""
    llm, short = open_llm(source), SamplingParams(max_tokens=2, seed=1)
    messages = [{"role": "user", "content": "hi"}]
    (name,) = switch
    if why is None:
        with pytest.raises(UnsupportedError, match=f"never reads '{name}'"):
            llm.chat(messages, short, **switch)
        return
    line = f"{name}: has no effect; this model {why}"
    assert llm.chat(messages, short, **switch).warnings == (line,)
    stream = llm.chat_stream(messages, short, **switch)
    assert list(stream)
    assert stream.completion.warnings == (line,)
    assert llm.chat(messages, short).warnings == ()


def test_a_key_of_a_text_part_is_a_warning_or_an_error() -> None:
    llm, short = open_llm(PLAIN), SamplingParams(max_tokens=2, seed=1)

    def chat(**keys: Any) -> Any:
        parts = [{"type": "text", "text": "hi", **keys}]
        return llm.chat([{"role": "user", "content": parts}], short)

    assert chat().warnings == ()
    assert chat(cache_control={"type": "ephemeral"}).warnings == (
        "messages[0].content[0].cache_control: has no effect; prefixes are cached without being "
        "marked",
    )
    with pytest.raises(
        UnsupportedError, match=r"messages\[0\].content\[0\] has the key 'citation'"
    ):
        chat(citation=1)
