"""The parameter `grammar`: GBNF as llama.cpp's parser reads it, and Lark."""

from __future__ import annotations

import pytest

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.grammar.matcher import LIMITS
from verbatim.grammar.translate import byte_tokenizer, parser_limits, try_compile, try_translate

# A grammar, the texts in its language and texts that are not, as llama.cpp reads it.
LANGUAGES = [
    ('root ::= name "z"\nname ::= [a-z]*', ["z", "az", "zz"], ["", "a"]),
    ('root ::= "ab" "c" | "a" "b" "d"', ["abc", "abd"], ["ab"]),
    ("root ::= .", ["a", "\n", "é"], ["", "ab"]),
    (r'root ::= "\u00e9\x41\U0001F600\u0000"', ["éA😀\0"], []),
    (r"root ::= [\u00e9\U0001F600-\U0001F602]", ["é", "😁"], ["e"]),
    (r'root ::= "\[a\]\-\"\\" "' + "\t\n" + '"', ['[a]-"\\\t\n'], []),
    ("root ::= [a&&b]", ["a", "&", "b"], ["c"]),
    ("root ::= [a~~b]", ["a", "~", "b"], ["c"]),
    ("root ::= [+--]", ["+", ",", "-"], ["."]),
    (r"root ::= [^a\]-]", ["b", "\n", "^"], ["a", "]", "-"]),
    ('root ::= start\nstart ::= "a"', ["a"], []),
    ('root ::= aB a-b 1x\naB ::= "a"\na-b ::= "b"\n1x ::= "c"', ["abc"], []),
    ('root ::= "a"{0} "b"{2} ("c"+)+ "d"?*', ["bbc", "bbccdd"], ["abbc", "bb"]),
    ('root ::= ( # one\n "a" |\n "b" )\r\n# two\r\nother ::= "c"', ["a", "b"], ["c"]),
    ('root ::= "[temperature=1] %json {} ::="', ["[temperature=1] %json {} ::="], []),
    ('root ::= "(" root ")" | [a-z]+ "z"', ["az", "((zz))"], ["z", "(az"]),
    ('start: "a ::= b"', ["a ::= b"], []),  # Lark
    ('start: "[temperature=1]" // [temperature=1]', ["[temperature=1]"], []),
    ("start: /[temperature=]+/", ["ear="], ["x"]),
]


@pytest.mark.parametrize(("grammar", "inside", "outside"), LANGUAGES, ids=[g[0] for g in LANGUAGES])
def test_a_grammar_has_its_documented_language(
    grammar: str, inside: list[str], outside: list[str]
) -> None:
    from llguidance import LLMatcher

    tokenizer = byte_tokenizer()
    compiled = try_compile("grammar", grammar, tokenizer, parser_limits(LIMITS))
    assert "error" not in compiled, compiled
    for text in inside + outside:
        matcher = LLMatcher(tokenizer, compiled["grammar"], log_level=0)
        tokens = list(text.encode())
        taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert taken == (text in inside), text


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('main ::= "a"', "no rule `root`"),
        ("root ::= item", "uses the rule item, which is missing"),
        ('root ::= "a', "is not closed"),
        (r"root ::= [\d]", r"does not have, in line 1 at '\\\\d\]'"),
        (r'root ::= "\ud800"', "no character of Unicode"),
        ("root ::= []", "class is empty"),
        ("root ::= [b-a]", "range b-a is empty"),
        ('root ::= "a"{2,1}', "allows no number of repetitions"),
        ('root ::= "a" )', "end of the line expected"),
        ('root ::= "a"\n  | "b"', "name of a rule expected, in line 2"),
        ('root ::= "a"\nx = "b"', "`::=` expected, in line 2"),
        ('root ::= ("a"', r"`\)` expected"),
    ],
)
def test_a_fault_in_gbnf_is_named_with_its_line(grammar: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        try_translate("grammar", grammar, lambda text: None)


@pytest.mark.parametrize("token", ["<think>", "<[12]>", "!</think>"])
def test_a_token_reference_in_gbnf_is_refused_by_name(token: str) -> None:
    with pytest.raises(UnsupportedError, match="token references are not supported"):
        try_translate("grammar", f'root ::= {token} "a"', lambda text: None)


@pytest.mark.parametrize(
    "attributes", ["temperature=0", 'suffix="]", temperature = 0.5', "stop=/]/, temperature=1"]
)
def test_a_temperature_inside_a_lark_grammar_is_refused(attributes: str) -> None:
    """llguidance accepts it, and the sampler would ignore it."""
    with pytest.raises(UnsupportedError, match="`temperature` inside a grammar"):
        try_translate("grammar", f"start: word\nword[{attributes}]: /a+/", lambda text: None)
