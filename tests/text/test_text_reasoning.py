"""Splitting reasoning from answers: independent of the pieces, and no marker leaks."""

from __future__ import annotations

import random
import re

import pytest

from verbatim.text.reasoning.harmony import HarmonySplitter
from verbatim.text.reasoning.reasoning_format import TAGS, ReasoningFormat, Splitter, find_format
from verbatim.text.reasoning.tag_splitter import Piece, TagSplitter, spellings

WORDS = (
    *("So", " 2", "+", "2", "\n", "\n\n", " <", "think", ">", "</", "</th", "é", "🙂", "<|", "["),
    "◁",
)


def split(splitter: Splitter, pieces: list[str]) -> tuple[str, str]:
    found: list[Piece] = []
    for piece in pieces:
        found += splitter.push(piece)
    found += splitter.finish()
    return tuple("".join(t for k, t in found if k == kind) for kind in ("reasoning", "answer"))  # type: ignore[return-value]


def cut(text: str, rng: random.Random) -> list[str]:
    """The text in random pieces, as a model's tokens might cut it."""
    at = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(1, 12))))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


def noise(rng: random.Random, without: tuple[str, ...]) -> str:
    text = "".join(rng.choice(WORDS) for _ in range(rng.randrange(12)))
    for marker in without:
        text = text.replace(marker, "")
    return text


@pytest.mark.parametrize(("open_tag", "close"), TAGS)
@pytest.mark.parametrize("start", ["", "open"])
def test_reasoning_and_answer_of_random_streams(open_tag: str, close: str, start: str) -> None:
    rng = random.Random(f"{open_tag}{start}")
    for _ in range(800):
        reasoning = noise(rng, (open_tag, close)).strip()
        answer = noise(rng, (open_tag, close)).strip()
        if close in reasoning + close[:-1] or close in close[1:] + answer:
            continue
        space = rng.choice(["", "\n", "\n\n"])
        opening = "" if start else rng.choice(["", "\n"]) + rng.choice(spellings(open_tag))
        for _ in range(rng.choice([0, 0, 1, 3])):  # repeated
            opening += rng.choice(["", "\n"]) + rng.choice(spellings(open_tag))
        closing = rng.choice(spellings(close))
        output = f"{opening}{space}{reasoning}{space}{closing}{space}{answer}"
        if output.find(closing, len(opening)) != len(f"{opening}{space}{reasoning}{space}"):
            continue  # the noise completed a marker by accident
        got = split(TagSplitter(open_tag, close, start), cut(output, rng))
        assert got == (reasoning, answer), output


@pytest.mark.parametrize(("open_tag", "close"), TAGS)
def test_any_text_gives_the_same_result_in_any_pieces(open_tag: str, close: str) -> None:
    rng = random.Random(close)
    tags = (*spellings(open_tag), *spellings(close))
    parts = (*WORDS, *tags, *(tag[:5] for tag in tags), *(tag[:-1] for tag in tags))
    for _ in range(400):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(10)))
        start = rng.choice(["", "open", "closed"])
        whole = split(TagSplitter(open_tag, close, start), [text])
        assert split(TagSplitter(open_tag, close, start), cut(text, rng)) == whole
        assert split(TagSplitter(open_tag, close, start), list(text)) == whole


WRAPPER = ("<response>", "</response>")


def test_the_tags_around_an_answer_are_no_part_of_it() -> None:
    """Granite 3.3: <think>…</think> <response>…</response>, in any pieces."""
    rng = random.Random(9)
    parts = (*WORDS, *WRAPPER, "</resp", "<think>", "</think>")
    for _ in range(800):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(10)))
        text = rng.choice(["", "<think>a</think>", "<think>a</think> <response>"]) + text
        text += rng.choice(["", "</response>", " </response>\n"])
        start = rng.choice(["", "open", "closed"])
        whole = split(TagSplitter("<think>", "</think>", start, WRAPPER), [text])
        assert split(TagSplitter("<think>", "</think>", start, WRAPPER), cut(text, rng)) == whole
    for text, answer in (
        ("<think>a</think> <response>Four</response>", "Four"),
        ("<think>a</think>\n<response>\nFour\n</response>\n", "Four"),
        ("<think>a</think>Four </response>", "Four </response>"),
        ("<think>a</think><response>b</response> c", "b</response> c"),
        ("<think>a</think><response>Four", "Four"),
        ("<think>a</think><respond>", "<respond>"),
    ):
        assert split(TagSplitter("<think>", "</think>", "", WRAPPER), list(text)) == ("a", answer)


@pytest.mark.parametrize("opening", ["Here is", "Here's"])
@pytest.mark.parametrize("closing", ["Here is", "Here's"])
def test_both_spellings_of_granite(opening: str, closing: str) -> None:
    """In any combination, and in the prompt too."""
    tags = ReasoningFormat("Here is my thought process:", "Here is my response:")
    text = f"{opening} my thought process:\nHere, in short: 4.\n\n{closing} my response:\nHere's 4."
    for pieces in ([text], list(text), re.split("(?=[ H:'])", text)):
        assert split(tags.splitter(), pieces) == ("Here, in short: 4.", "Here's 4.")
    assert tags.after(f"<|assistant|>{opening} my thought process:\n").start == "open"
    assert tags.after(f"<|assistant|>a {closing} my response:\n").start == "closed"


def test_an_output_without_tags_is_the_answer() -> None:
    for text in ("Paris.", " <b>", "", "  ", "</think> stays text", "<thin"):
        assert split(TagSplitter("<think>", "</think>"), list(text)) == ("", text)


def test_an_output_cut_inside_the_reasoning_has_no_answer() -> None:
    assert split(TagSplitter("<think>", "</think>"), ["<think>\nLet me", " see"]) == (
        "Let me see",
        "",
    )


def test_a_tag_inside_the_answer_is_text() -> None:
    text = "<think>a</think>Write <think>b</think>."
    assert split(TagSplitter("<think>", "</think>"), list(text)) == ("a", "Write <think>b</think>.")


def test_a_prompt_that_ends_inside_or_behind_reasoning() -> None:
    tags = ReasoningFormat("<think>", "</think>")
    assert tags.after("<|im_start|>assistant\n<think>\n").start == "open"
    assert tags.after("<|im_start|>assistant\n<think>\n\n</think>\n\n").start == "closed"
    assert tags.after("<|im_start|>assistant\n").start == ""
    assert split(tags.after("<think>").splitter(), ["So.</think>\n4"]) == ("So.", "4")
    assert split(tags.after("<think></think>").splitter(), ["4</think>"]) == ("", "4</think>")


@pytest.mark.parametrize(
    "pieces",
    [
        ["<think>\nSo.</think>4"],
        [*"\n<think>So.</think>4"],
        ["<think><think>", "\n<think> <th", "ink>So.</think>4"],
        [*"<think>\n<think><think>So.</think>4"],
    ],
)
def test_reasoning_that_starts_with_its_opening_tag_again(pieces: list[str]) -> None:
    tags = ReasoningFormat("<think>", "</think>")
    assert split(tags.after("<think>\n").splitter(), pieces) == ("So.", "4")
    assert split(tags.splitter(), ["<think>", *pieces]) == ("So.", "4")
    assert split(tags.after("<think>").splitter(), ["So <think>.</think>4"]) == ("So <think>.", "4")


@pytest.mark.parametrize("text", ["<|channel>", "<|channel>th", "<|channel>thought"])
def test_an_output_that_is_cut_inside_its_opening_tag_has_no_answer(text: str) -> None:
    gemma = find_format(["<channel|>"], OneToken({"<|channel>": 1000, "<channel|>": 1001}))
    assert gemma is not None
    splitter = gemma.splitter()
    assert split(splitter, [*text]) == ("", "")
    assert split(gemma.splitter(), ["<|chan"]) == ("", "<|chan")
    counted = gemma.splitter()
    counted.push(text)
    assert counted.in_reasoning


HARMONY = (
    "<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "One moment.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"
)


def test_harmony_channels_in_any_pieces() -> None:
    """One text; random ones are below."""
    rng = random.Random(1)
    for _ in range(200):
        assert split(HarmonySplitter(), cut(HARMONY, rng)) == ("Greet.", "One moment.Hello!")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        " to=functions.get_weather<|channel|>commentary json<|message|>",
    ],
)
def test_a_harmony_tool_call_becomes_a_tool_call(header: str) -> None:
    reasoning = "<|channel|>analysis<|message|>Call.<|end|><|start|>assistant"
    text = f'{reasoning}{header}{{"city": "Rome"}}<|call|>'
    want = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    for pieces in ([text], list(text), re.split(r"(?=<)", text)):
        assert split(HarmonySplitter(), pieces) == ("Call.", want)
    empty = split(HarmonySplitter(), [f"{header}<|call|>"])[1]
    assert empty == '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'


# Headers behind <|start|>, and what a message with this header is.
HEADERS = (
    ("assistant<|channel|>analysis<|message|>", "reasoning"),
    ("assistant<|channel|>final<|message|>", "answer"),
    ("assistant<|channel|>final <|constrain|>json<|message|>", "answer"),
    ("assistant<|channel|>commentary<|message|>", "answer"),
    ("assistantfinal<|message|>", "answer"),
    ("<|channel|>note<|message|>", "answer"),
    ("assistant<|channel|>commentary to=python <|message|>", "reasoning"),
    ("assistant<|channel|>analysis to=python code<|message|>", "reasoning"),
    ("assistant to=browser.search<|channel|>commentary <|constrain|>json<|message|>", "reasoning"),
    ("assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "call"),
    ("assistant to=functions.f<|channel|>analysis<|message|>", "call"),
    ("user<|message|>", "reasoning"),
    ("system<|message|>", "reasoning"),
    ("developer<|message|>", "reasoning"),
    ("functions.f to=assistant<|channel|>commentary<|message|>", "reasoning"),
    ("functions.f to=assistant<|channel|>final<|message|>", "reasoning"),
    ("python to=functions.f<|channel|>analysis<|message|>", "reasoning"),
)


def test_harmony_messages_of_every_role_and_recipient() -> None:
    rng = random.Random(3)
    for _ in range(600):
        want = {"reasoning": "", "answer": ""}
        text = "<|channel|>analysis<|message|><|end|>"
        for i in range(rng.randrange(1, 5)):
            header, kind = rng.choice(HEADERS)
            body = f"{{{i}: {rng.choice(['a', 'é', '<', '<|', 'to=', ' '])}}}"
            text += f"<|start|>{header}{body}{rng.choice(['<|end|>', '<|call|>', ''])}"
            if kind == "call":
                body = f'<tool_call>{{"name": "f", "arguments": {body}}}</tool_call>'
            want["reasoning" if kind == "reasoning" else "answer"] += body
        text += rng.choice(["<|return|>", "<|start|>assistant", "<|start|>user"])
        assert split(HarmonySplitter(), cut(text, rng)) == (want["reasoning"], want["answer"]), text


def test_harmony_markers_never_leak() -> None:
    rng = random.Random(2)
    parts = (
        *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"),
        *("<|return|>", " to=functions.x", " to=python", "assistant", "user"),
        *("functions.x to=assistant", "analysis", "commentary", "final", "hi"),
    )
    for _ in range(800):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(14)))
        whole = split(HarmonySplitter(), [text])
        assert split(HarmonySplitter(), cut(text, rng)) == whole
        assert "<|" not in "".join(whole), text


class OneToken:
    """A tokenizer in which some texts are control tokens, and every other character is a token."""

    def __init__(self, control: dict[str, int]) -> None:
        self._control = control

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        pattern = "|".join(map(re.escape, self._control)) or "$^"
        out: list[int] = []
        for piece in re.split(f"({pattern})", text):
            out += [self._control[piece]] if piece in self._control else map(ord, piece)
        return out

    def is_control(self, token: int) -> bool:
        return token in self._control.values()

    def token_bytes(self, token: int) -> bytes:
        names = {number: name for name, number in self._control.items()}
        return names.get(token, chr(token)).encode()


def test_the_format_comes_from_the_chat_template() -> None:
    plain = OneToken({})
    assert find_format(["{{ messages }}"], plain) is None
    found = find_format(["{% if x %}<think></think>{% endif %}"], plain)
    assert found is not None
    assert (found.open, found.open_id) == ("<think>", None)
    assert found.close_ids == tuple(b"</think>"), "a budget writes the tag in ordinary tokens"
    control = OneToken({"<think>": 1000, "</think>": 1001})
    found = find_format(["<think></think>"], control)
    assert found is not None
    assert (found.open_id, found.close_ids, found.marker_ids) == (1000, (1001,), {1000, 1001})
    gemma = find_format(["<channel|>"], OneToken({"<|channel>": 1000, "<channel|>": 1001}))
    assert gemma is not None
    assert (gemma.open_id, gemma.close_ids) == (1000, (1001,))
    olmo = find_format(["<|im_start|>assistant\n<think>"], plain)  # Olmo 3 Think
    assert olmo is not None
    assert (olmo.close, olmo.after("<|im_start|>assistant\n<think>").start) == ("</think>", "open")
    tags = {"<|START_THINKING|>": 1000, "<|END_THINKING|>": 1001}
    cohere = find_format(["".join(tags)], OneToken(tags))
    assert cohere is not None
    pieces = ["<|START_THINKING|>", "I look.", "<|END_THINKING|>", "Found."]
    assert split(cohere.splitter(), pieces) == ("I look.", "Found.")
    seed = find_format(["</seed:think>"], plain)
    assert seed is not None
    budget_0 = "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>"
    assert seed.after(budget_0).start == "open"
    tokens = {"<|start|>": 1, "<|channel|>": 2, "<|message|>": 3, "<|end|>": 4, "<|call|>": 5}
    harmony = find_format(["<|channel|>analysis<|message|>"], OneToken(tokens))
    assert harmony is not None
    assert harmony.close_ids == (4, 1, *map(ord, "assistant"), 2, *map(ord, "final"), 3)
    assert harmony.special == tokens.keys(), "the others are found in the text"
    assert harmony.marker_ids == set(tokens.values())
