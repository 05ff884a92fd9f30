"""Tool calls: how the prompt presents tools, how a grammar forces calls, and how calls are parsed
from the output, whole or in pieces."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verbatim.base.params import SamplingParams
from verbatim.base.records import Drawn, Finish
from verbatim.engine.stream import ChoiceStream
from verbatim.server.api.anthropic.anthropic import MessagesReply
from verbatim.server.api.anthropic.anthropic import as_chat as message_fields
from verbatim.server.api.common.chat_request import ChatRequest
from verbatim.server.api.common.field_rules import rules_of
from verbatim.server.api.common.tool_errors import name_tool
from verbatim.server.api.common.validate import check
from verbatim.server.api.openai.openai_fields import ChatCompletions, Responses
from verbatim.server.api.openai.responses_input import NAMES as RESPONSES_NAMES
from verbatim.server.api.openai.responses_input import as_chat as response_fields
from verbatim.server.api.routes import BODIES
from verbatim.server.problem import Problem
from verbatim.server.process.message_codec import decode_to_engine, encode
from verbatim.server.process.messages import Generate, ModelFacts, WireFinish
from verbatim.server.settings import Limits, Settings
from verbatim.testing.fakes import ByteTokenizer
from verbatim.text.tools.call_formats import CALL_FORMATS, typed_value
from verbatim.text.tools.call_values import read_gemma, read_python
from verbatim.text.tools.tool_format import detect_format
from verbatim.text.tools.tool_grammar import call_or_text, forced_schema
from verbatim.text.tools.tool_messages import template_messages
from verbatim.text.tools.tool_parser import ToolParser, read_calls

NAMES: dict[str, Any] = {"get_weather": None, "add": None}  # name -> schema of the parameters
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</x>"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

ALL_TOOLS = ModelFacts(
    name="m",
    digest="",
    fingerprint="",
    context=64,
    vocab=8,
    hidden=4,
    has_template=True,
    template_tools=True,
    template_calls=True,
    tool_format="hermes",
    control=frozenset(),
    space_prefix=False,
    longest_token=1,
)
BOTH = {"takes_tools": True, "takes_calls": True}
NEITHER = dict.fromkeys(BOTH, False)

# (format, output, calls as (name, arguments), remaining text)
CASES: list[tuple[str, str, list[tuple[str, dict[str, Any]]], str]] = [
    ("hermes", "just text", [], "just text"),
    ("hermes", CALL, [("add", {"a": 1, "b": "</x>"})], ""),
    ("hermes", f"Let me see. {CALL}\n{CALL}", [("add", {"a": 1, "b": "</x>"})] * 2, "Let me see. "),
    ("hermes", "<tool_call>\nnot json\n</tool_call>", [], "<tool_call>\nnot json\n</tool_call>"),
    ("hermes", ('<tool_call>{"name": "unknown", "arguments": '
               '{}}</tool_call>'), [], ('<tool_call>{"name": "unknown", "arguments": '
                                       '{}}</tool_call>')),
    ("hermes", ('<tool_call>\n{"name": "add", "arguments": {"a": '
               '1}}'), [("add", {"a": 1})], ""),  # ended by a limit, but complete
    ("hermes", '<tool_call>\n{"name": "add", "argu', [], '<tool_call>\n{"name": "add", "argu'),
    ("hermes", "a < b and <tool", [], "a < b and <tool"),
    ("hermes", '{"name": {"a": 1}, "arguments": {}}', [], '{"name": {"a": 1}, "arguments": {}}'),
    ("hermes", ('<tool_call>{"name": '
               '["add"]}</tool_call>'), [], '<tool_call>{"name": ["add"]}</tool_call>'),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})], ""),
    ("llama3", '{"answer": 42}', [], '{"answer": 42}'),
    ("json", ('[{"name": "add", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": '
             '"{\\"city\\": \\"Rome\\"}"}]'),
     [("add", {"a": 1}), ("get_weather", {"city": "Rome"})], ""),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})], ""),
    ("mistral", ('Sure. [TOOL_CALLS][{"name": "add", "arguments": {"a": '
                '1}}]'), [("add", {"a": 1})], "Sure. "),
    ("mistral", "[TOOL_CALLS] nonsense", [], "[TOOL_CALLS] nonsense"),
    ("mistral", "[1, 2]", [], "[1, 2]"),
    ("hermes", f" \n{CALL} \n{CALL} ", [("add", {"a": 1, "b": "</x>"})] * 2, ""),
    ("hermes", f"\n{CALL} two", [("add", {"a": 1, "b": "</x>"})], " two"),
    ("hermes", " <tool_call>x</tool_call> ", [], " <tool_call>x</tool_call> "),
    ("mistral", '\n[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})], ""),
    ("hermes", "  \n", [], "  \n"),
    ("hermes", "", [], ""),
]  # fmt: skip


def parse(form: str, pieces: list[str], **more: Any) -> tuple[list[tuple[str, Any]], str]:
    parser = ToolParser(form, more.pop("tools", NAMES), **more)
    found = [item for piece in pieces for item in parser.push(piece)] + parser.finish()
    calls = [(v.name, json.loads(v.arguments)) for kind, v in found if kind == "call"]
    assert parser.calls == len(calls)
    return calls, "".join(v for kind, v in found if kind == "text")


@pytest.mark.parametrize(("form", "text", "calls", "left"), CASES)
def test_calls_are_parsed_whole_and_character_by_character(
    form: str, text: str, calls: Any, left: str
) -> None:
    assert parse(form, [text]) == (calls, left)
    assert parse(form, list(text)) == (calls, left)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=8))
def test_calls_are_the_same_for_any_split_of_the_text(case: Any, cuts: list[int]) -> None:
    form, text, calls, left = case
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    assert parse(form, [text[a:b] for a, b in pairwise(edges)]) == (calls, left)


EDIT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer"},
        "all": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object"},
        "id": {"type": ["string", "null"]},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "mode": {"$ref": "#/$defs/Mode"},
        "level": {"enum": ["1", "2"]},
        "free": {"description": "anything"},
    },
    "$defs": {"Mode": {"type": "string", "enum": ["1", "fast"]}},
}
TYPED: dict[str, Any] = {"edit": EDIT, "list-all": None}
CODE = "if a < b:\n    print(\"<x>\", 'y')\n</parameter> </arg_value>\n\n# end"

# (value as the model writes it, parameter, value of the call)
VALUES: list[tuple[str, str, Any]] = [
    ("12", "path", "12"),  # a string that looks like a number
    ('"quoted"', "path", '"quoted"'),
    (" two spaces ", "path", " two spaces "),
    ("", "path", ""),
    (CODE, "path", CODE),
    ("12", "line", 12),
    ("123456789012345678901", "line", 123456789012345678901),
    ("twelve", "line", "twelve"),
    ("true", "all", True),
    ("False", "all", False),
    ("None", "all", "None"),
    ("None", "id", None),
    ("null", "id", None),
    ("12", "id", "12"),
    ('["a", "b"]', "tags", ["a", "b"]),
    ("['a']", "tags", "['a']"),
    ('{"a": {"b": [1, null]}}', "options", {"a": {"b": [1, None]}}),
    ("12", "limit", 12),
    ("1.5", "limit", "1.5"),
    ("many", "limit", "many"),
    ("1", "mode", "1"),
    ("1", "level", "1"),
    ("1", "free", 1),
    ("one", "free", "one"),
    ("[1]", "unknown", [1]),
    ("True", "unknown", "True"),
]


def qwen(name: str, *pairs: tuple[str, str]) -> str:
    """As the chat template of Qwen3-Coder and Qwen3.5 writes a call."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, *pairs: tuple[str, str], end: str = "\n") -> str:
    """As the chat template of GLM 4.5 writes a call; GLM 4.7 writes no line ends."""
    inner = "".join(
        f"<arg_key>{key}</arg_key>{end}<arg_value>{value}</arg_value>{end}" for key, value in pairs
    )
    return f"<tool_call>{name}{end}{inner}</tool_call>"


def glm_dense(name: str, *pairs: tuple[str, str]) -> str:
    return glm(name, *pairs, end="")


def cut_everywhere(form: str, text: str, **more: Any) -> tuple[list[tuple[str, Any]], str]:
    """The calls and the remaining text, which are the same for each cut in two."""
    whole = parse(form, [text], tools=TYPED, **more)
    for at in range(1, len(text)):
        assert parse(form, [text[:at], text[at:]], tools=TYPED, **more) == whole
    assert parse(form, list(text), tools=TYPED, **more) == whole
    return whole


@pytest.mark.parametrize("write", [qwen, glm, glm_dense])
def test_xml_calls_are_parsed_at_every_cut(write: Any) -> None:
    first = write("edit", ("path", CODE), ("line", "3"), ("all", "true"))
    made = ("edit", {"path": CODE, "line": 3, "all": True})
    assert cut_everywhere("hermes", first) == ([made], "")
    two = f"I look.\n\n{first}\n{write('list-all')}\n"
    assert cut_everywhere("hermes", two) == ([made, ("list-all", {})], "I look.\n\n")
    hermes = '<tool_call>\n{"name": "list-all", "arguments": {}}\n</tool_call>'
    assert cut_everywhere("hermes", f"{hermes}\n{first}") == ([("list-all", {}), made], "")
    unknown = write("remove", ("path", "x"))
    assert cut_everywhere("hermes", f"{unknown}\n{first}") == ([made], f"{unknown}\n")
    assert parse("hermes", [first, first], tools=TYPED, single=True) == ([made], first)
    for end in range(1, len(first)):
        assert parse("hermes", [first[:end]], tools=TYPED) == ([], first[:end])


@pytest.mark.parametrize("write", [qwen, glm, glm_dense])
def test_values_of_xml_calls_get_the_types_of_the_schema(write: Any) -> None:
    for text, key, value in VALUES:
        for more in ([], [("other", "x")]):
            calls, left = parse("hermes", [write("edit", (key, text), *more)], tools=TYPED)
            assert (calls, left) == ([("edit", {key: value, **dict(more)})], ""), (text, key)
    for schema in (None, {}, {"properties": None}, {"properties": {"a": True}}, {"type": "object"}):
        calls, _ = parse("hermes", [write("f", ("a", "1"), ("b", "x"))], tools={"f": schema})
        assert calls == [("f", {"a": 1, "b": "x"})]
    endless = {"properties": {"a": {"$ref": "#/properties/a"}}}
    assert parse("hermes", [write("f", ("a", "1"))], tools={"f": endless})[0] == [("f", {"a": 1})]


BROKEN = [
    "<tool_call>\n<function=edit>\n<parameter=path>\nx\n</function>\n</tool_call>",
    "<tool_call>\n<function=edit>\ntext\n</function>\n</tool_call>",
    "<tool_call>\n<function=edit>\n</function>\nmore</tool_call>",
    "<tool_call>edit\n<arg_key>path</arg_key></tool_call>",
    "<tool_call>edit and more\n<arg_key>path</arg_key>\n<arg_value>x</arg_value></tool_call>",
    "<tool_call>edit<arg_key>path</arg_key><arg_value>x</arg_value>more</tool_call>",
    "<tool_call></tool_call>",
    "[TOOL_CALLS]edit",
    "[TOOL_CALLS]edit[ARGS]",
    '[TOOL_CALLS]edit[ARGS]{"line": 1',
    "[TOOL_CALLS]edit[ARGS][1]",
    '[TOOL_CALLS]edit[ARGS]{"line": NaN}',
    '[TOOL_CALLS]edit[ARGS]{"line": 1} and text',
    '[TOOL_CALLS]edit[ARGS]{"line": 1}[TOOL_CALLS]remove[ARGS]{}',
    "[TOOL_CALLS]edit[ARGS]" + '{"a":' * 5000,
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_call_stays_text(text: str) -> None:
    form = "mistral" if text.startswith("[") else "hermes"
    assert parse(form, [text], tools=TYPED) == ([], text)


def test_a_repeated_parameter_is_kept() -> None:
    for write in (qwen, glm):
        parser = ToolParser("hermes", TYPED)
        ((_, call),) = parser.push(write("edit", ("line", "1"), ("line", "2")))
        assert call.arguments == '{"line": 1, "line": 2}'


def test_mistrals_calls_are_parsed_at_every_cut() -> None:
    made = ("edit", {"path": 'a "[ARGS]" [TOOL_CALLS]{', "line": 3})
    first = f"[TOOL_CALLS]edit[ARGS]{json.dumps(made[1])}"
    assert cut_everywhere("mistral", first) == ([made], "")
    two = f"I look. {first}[TOOL_CALLS]list-all[CALL_ID]a1B2c3D4e[ARGS]{{}}"
    assert cut_everywhere("mistral", two) == ([made, ("list-all", {})], "I look. ")
    assert cut_everywhere("mistral", two, single=True) == (
        [made],
        'I look. {"name": "list-all", "arguments": {}}',
    )
    for end in range(1, len(first)):
        assert parse("mistral", [first[:end]], tools=TYPED) == ([], first[:end])


def gemma_value(value: Any, quote: str) -> str:
    """As the chat template of Gemma 4 writes an argument: strings between two quote tokens."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(v, quote) for v in value) + "]"
    return json.dumps(value)


def gemma4(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call>call:{name}{gemma_value(arguments, f'<|{chr(34)}|>')}<tool_call|>"


def function_gemma(name: str, arguments: dict[str, Any]) -> str:
    inner = gemma_value(arguments, "<escape>")
    return f"<start_function_call>call:{name}{inner}<end_function_call>"


def lfm2(name: str, arguments: dict[str, Any]) -> str:
    inner = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"<|tool_call_start|>[{name}({inner})]<|tool_call_end|>"


def seed(name: str, arguments: dict[str, Any]) -> str:
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    inner = "".join(f"<parameter={k}>{v}</parameter>\n" for k, v in texts.items())
    return f"<seed:tool_call>\n<function={name}>\n{inner}</function>\n</seed:tool_call>"


OWN_NOTATION = {"gemma4": gemma4, "functiongemma": function_gemma, "lfm2": lfm2, "seed": seed}


@pytest.mark.parametrize("form", OWN_NOTATION)
def test_calls_in_the_notation_of_the_model_are_parsed_at_every_cut(form: str) -> None:
    write = OWN_NOTATION[form]
    made = ("edit", {"path": CODE, "line": 3, "all": True, "tags": ["a", "b, c"],
                     "options": {"x": {"y": [1.5, None]}}})  # fmt: skip
    first = write(*made)
    assert cut_everywhere(form, first) == ([made], "")
    two = f"I look.\n{first}\n{write('list-all', {})}"
    assert cut_everywhere(form, two) == ([made, ("list-all", {})], "I look.\n")
    unknown = write("remove", {"path": "x"})
    assert cut_everywhere(form, f"{unknown}{first}") == ([made], unknown)
    assert parse(form, [first, first], tools=TYPED, single=True) == ([made], first)
    for cut in range(1, len(first)):
        assert parse(form, [first[:cut]], tools=TYPED) in (([], first[:cut]), ([made], "")), cut


def test_json_between_the_tags_of_another_notation_is_a_call() -> None:
    listed = '[{"name": "list-all", "arguments": {}}]'
    for text in (
        f"<|tool_call>{listed}<tool_call|>",
        f"<|tool_call_start|>{listed}<|tool_call_end|>",
    ):
        form = "gemma4" if text.startswith("<|tool_call>") else "lfm2"
        assert cut_everywhere(form, text) == ([("list-all", {})], "")


def test_granites_calls_are_a_list_behind_a_marker() -> None:
    made = [("edit", {"path": CODE}), ("list-all", {})]
    listed = json.dumps([{"name": name, "arguments": arguments} for name, arguments in made])
    assert cut_everywhere("granite", f"<|tool_call|>{listed}") == (made, "")
    assert cut_everywhere("granite", f"I look. <|tool_call|> {listed}") == (made, "I look. ")
    assert parse("granite", ["<|tool_call|>[1]"], tools=TYPED) == ([], "<|tool_call|>[1]")


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(
        st.characters(codec="utf-8"), max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), VALUE, max_size=3))
def test_values_of_python_and_json_are_read_as_python_and_json_read_them(arguments: Any) -> None:
    """repr() is Python's writer; json.dumps() another notation of the same values."""
    for write in (repr, json.dumps):
        inner = ",".join(f"{key}={write(value)}" for key, value in arguments.items())
        assert read_python(f"[f({inner})]", {"f"}) == [("f", arguments)]


@given(st.text(alphabet="f()=[]{}'\"\\:,<|>1ex \n", max_size=40))
def test_a_broken_call_of_any_kind_raises_nothing(text: str) -> None:
    for call in (read_python(text, {"f"}), read_gemma(f"call:f{text}", {"f"}, '<|"|>')):
        assert all(name == "f" for name, _ in call)


@pytest.mark.parametrize(
    "text",
    [
        "f(" + "[" * 5000,
        "f(a=" + "{'a':" * 5000,
        "f(a='" + "\\" * 5001,
        "f(1)",
        "f(a=1 b=2)",
        "f(a=b)",
        "f(a=1_0)",
        "f(a=NaN)",
        "f(a=1e999)",
        "f(a='\\ud800')",
        "f(a='\\U00ffffff')",
        "f(a='x' 'y')",
        "f(a=1)]",
        "[f(a=1)",
        "g(a=1)",
    ],
)
def test_what_is_no_call_of_python_is_none(text: str) -> None:
    assert read_python(text, {"f"}) == []


@pytest.mark.parametrize(
    "text",
    [
        'call:f{a:<|"|>x}',
        "call:f{a:x}",
        "call:f{a 1}",
        "call:f{a:1",
        "call:f{a:1}}",
        "call:f",
        "f{a:1}",
        "call:g{a:1}",
        "call:f" + "{a:" * 5000,
    ],
)
def test_what_is_no_call_of_gemma_is_none(text: str) -> None:
    assert read_gemma(text, {"f"}, '<|"|>') == []


class MarkerByteTokenizer(ByteTokenizer):
    """Bytes, and the tags of tool calls as control tokens."""

    NAMES = (*ByteTokenizer.NAMES, "[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>",
             '<|"|>')  # fmt: skip
    vocab_size = 265


@pytest.mark.parametrize(
    ("form", "written"),
    [
        ("mistral", 'Yes. [TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}</s>'),
        (
            "mistral",
            'Yes. [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}]</s>',
        ),
        ("gemma4", 'Yes. <|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|></s>'),
    ],
)
def test_tags_that_are_control_tokens_reach_the_parser(form: str, written: str) -> None:
    """From the request's parameters over the engine's detokenizer to the parser. Requests without
    tools, and those with a forced call, leave control tokens out."""
    tokenizer = MarkerByteTokenizer()
    control = frozenset(range(256, 265))
    facts = replace(ALL_TOOLS, tool_format=form, vocab=265, control=control)

    def output(**body: Any) -> tuple[ChatRequest, str]:
        state = SimpleNamespace(facts=facts, limits=Limits(), settings=Settings())
        call: Any = SimpleNamespace(state=state, aliases={}, notices=[])
        ask = ChatRequest(
            call,
            {"messages": [{"role": "user", "content": "x"}], **body},
            rules_of(ChatCompletions),
        )
        params = SamplingParams.from_mapping(ask.params)
        stream = ChoiceStream("r", 0, params, tokenizer)
        for token in tokenizer.encode(written, special=True):
            stream.push(Drawn(token, 0.0), Finish("stop", "") if token == tokenizer.EOS else None)
        return ask, stream.choice(0).text

    ask, text = output(tools=[TOOL])
    left, (call,) = ask.read(text)
    assert (left, call.name) == ("Yes. ", "get_weather")
    assert json.loads(call.arguments) == {"city": "Rome"}
    hidden = tokenizer.decode(tokenizer.encode(written, special=True))
    for body in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        assert output(**body)[1] == hidden
    assert output(tools=[TOOL], tool_choice="required")[0].params.get("skip_special", True)
    assert output(tools=[TOOL], skip_special=True)[1] == hidden


@given(st.text(alphabet='<>tol_cal/{}[]"ab \n', max_size=80), st.sampled_from(sorted(CALL_FORMATS)))
def test_text_without_a_call_is_unchanged(text: str, form: str) -> None:
    if not read_calls(text.strip(), NAMES):
        assert parse(form, list(text)) == ([], text)


def test_parallel_tool_calls_false_allows_one_call() -> None:
    calls, text = parse("hermes", [CALL, CALL], single=True)
    assert len(calls) == 1
    assert text == CALL  # the second call stays text: nothing is lost
    both = (
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "get_weather", "arguments": {"city": "Rome"}}',
    )
    for listed in (f"[{', '.join(both)}]", f"<tool_call>[{', '.join(both)}]</tool_call>"):
        assert parse("hermes", list(listed), single=True) == ([("add", {"a": 1})], both[1])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }}<tool_call>", "hermes"),
        ("[TOOL_CALLS]{{ tools }}", "mistral"),
        ("{{ tools }}<|python_tag|>", "llama3"),
        ("{{ '<|tool_call>call:' }}{{ tools }}", "gemma4"),
        ("{{ tools }}<start_function_call>call:", "functiongemma"),
        ("List of tools: <|tool_list_start|>[{{ tools }}", "lfm2"),
        ("respond with <|tool_call|> followed by a JSON list{{ tools }}", "granite"),
        ("{%- set toolcall_begin_token = '<seed:tool_call>' %}{{ tools }}", "seed"),
        ("{{ tools }}", "hermes"),
        ("{{ messages }}", "json"),
    ],
)
def test_tool_formats_are_detected_from_the_template(template: str, form: str) -> None:
    assert detect_format(template) == form


def test_a_template_without_tools_gets_them_in_a_system_message() -> None:
    history = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}],
        },
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    rendered = template_messages(history, [TOOL], **NEITHER)
    assert rendered[0]["role"] == "system"
    assert rendered[0]["content"].startswith("Be brief.")
    assert "get_weather" in rendered[0]["content"]
    assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in rendered[2]["content"]
    native = template_messages(history, [TOOL], **BOTH)
    assert native[0] == {"role": "system", "content": "Be brief."}
    assert native[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert native[2]["content"] is None  # a template may distinguish a call from an answer by that
    assert native[3]["tool_call_id"] == "c1"
    half = template_messages(history, [TOOL], takes_tools=True, takes_calls=False)
    assert half[0] == native[0]
    assert half[2] == rendered[2]  # a call that the template would drop becomes text


def test_reasoning_and_names_reach_the_template() -> None:
    from verbatim.server.api.ollama.ollama import messages_of

    said = [{"role": "assistant", "content": "yes", "reasoning_content": "hm", "name": "Ada"}]
    assert template_messages(said, [], **BOTH) == said
    (row,) = messages_of([{"role": "assistant", "content": "yes", "thinking": "hm"}])
    assert template_messages([row], [], **NEITHER) == [
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    ]


def test_no_part_of_a_message_is_dropped() -> None:
    from verbatim.server.api.anthropic.anthropic import chat_messages

    def rendered(**message: Any) -> Any:
        return template_messages([{"role": "assistant", **message}], [], **NEITHER)[0]["content"]

    assert (
        rendered(refusal="no")
        == rendered(content="", refusal="no")
        == rendered(content=[{"type": "refusal", "refusal": "no"}])
        == "no"
    )
    assert rendered(content="I must say ", refusal="no") == "I must say no"
    for failed, text in ((True, "Error: boom"), (False, "boom"), (None, "boom")):
        result = {"type": "tool_result", "tool_use_id": "t", "content": "boom", "is_error": failed}
        made, places = chat_messages({"messages": [{"role": "user", "content": [result]}]})
        assert (made[0]["content"], places) == (text, ["messages[0].content"])
    call, text = (
        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
        {"type": "text", "text": "x"},
    )
    for blocks, wanted in (
        ([text, call, call], [("x", 2)]),
        ([call, text, text], [("", 1), ("xx", 0)]),
        ([text, call, text, call], [("x", 1), ("x", 1)]),
        ([], [("", 0)]),
    ):
        turns, places = chat_messages({"messages": [{"role": "assistant", "content": blocks}]})
        assert places == ["messages[0].content"] * len(turns)
        assert [
            (turn["content"], len(turn.get("tool_calls", ()))) for turn in turns
        ] == wanted  # in their order


@pytest.mark.parametrize(
    ("role", "kinds", "wrong"),
    [
        ("user", ("tool_result", "text"), None),
        ("user", ("text", "tool_result"), 1),
        ("user", ("tool_use",), 0),
        ("assistant", ("text", "tool_use"), None),
        ("assistant", ("tool_use", "text"), None),
        ("assistant", ("text", "tool_result"), 1),
    ],
)
def test_blocks_that_would_be_moved_or_dropped_are_rejected(
    fake: Any, role: str, kinds: tuple[str, ...], wrong: int | None
) -> None:
    blocks = {
        "text": {"type": "text", "text": "x"},
        "tool_use": {"type": "tool_use", "id": "t", "name": "f", "input": {}},
        "tool_result": {"type": "tool_result", "tool_use_id": "t", "content": "y"},
    }
    message = {"role": role, "content": [blocks[kind] for kind in kinds]}
    answer = fake.post(
        "/v1/messages", {"messages": [message, {"role": "user", "content": "z"}], "max_tokens": 1}
    )
    assert answer.status_code == (200 if wrong is None else 400)
    if wrong is not None:
        assert answer.json()["error"]["param"] == f"messages[0].content[{wrong}]"


def test_the_name_of_a_tool_result_repeats_that_of_its_call_or_gets_a_warning(fake: Any) -> None:
    """Ollama's clients link a result to its call by name; OpenAI's older examples send the name
    beside the id."""
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    talk = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    ask = {"model": "m", "stream": False, "options": {"num_predict": 2}}

    def answer(name: str) -> Any:
        return fake.client.post(
            "/api/chat",
            json={**ask, "messages": [*talk, {"role": "tool", "content": "20", "tool_name": name}]},
        )

    assert "warnings" not in answer("get_weather").json()
    (warning,) = answer("get_news").json()["warnings"]
    assert warning.endswith("chat template does not read the name of tool messages")
    reasoning = fake.client.post(
        "/api/chat",
        json={**ask, "messages": [{"role": "assistant", "content": "a", "thinking": "b"}]},
    )
    assert reasoning.json()["error"].startswith("messages[0].thinking: ")
    spelled = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": "{}"},
    }
    said = [talk[0], {"role": "assistant", "tool_calls": [spelled]}]
    result = {"role": "tool", "tool_call_id": "c1", "content": "20"}
    for name, warned in (("get_weather", False), ("get_news", True)):
        body = {"messages": [*said, {**result, "name": name}], "max_tokens": 1}
        assert ("warnings" in fake.post("/v1/chat/completions", body).json()) is warned


def test_the_names_of_many_tool_results_are_compared_in_linear_time() -> None:
    """A scan of all earlier calls for each result blocked the server for a minute."""
    reads = 0

    class Counted(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal reads
            reads += key in ("tool_calls", "id")
            return super().get(key, default)

    calls = [Counted(id=f"c{i}", function={"name": "f", "arguments": "{}"}) for i in range(128)]
    talk = [Counted(role="assistant", content="", tool_calls=calls) for _ in range(2)]
    results = [
        Counted(role="tool", content="", tool_call_id=f"c{i}", name=name)
        for i in range(128)
        for name in ("f", "g")
    ]
    made = template_messages([*talk, *results], [], **NEITHER)
    assert [message.get("name") for message in made[2:]] == [None, "g"] * 128
    messages = len(talk) + len(results)
    assert reads <= 2 * messages + len(talk) * len(calls)


def test_an_error_counts_messages_as_the_client_sent_them() -> None:
    from verbatim.server.api.common.to_params import with_client_names
    from verbatim.server.problem import Problem

    problem = Problem("unsupported_parameter", "messages[2].name: why", "messages[2].name")
    assert (with_client_names(problem, {}, 1).param, with_client_names(problem, {}, 1).message) == (
        "messages[1].name",
        "messages[1].name: why",
    )
    assert (
        with_client_names(problem, {"messages.name": "tool_name"}).param == "messages[2].tool_name"
    )


@pytest.mark.parametrize(
    "schema",
    [{"type": 5}, {"anyOf": 7}, {"oneOf": {"a": 1}}, {"enum": 3}, {"type": []}, 5],
    ids=str,
)
def test_a_schema_of_wrong_form_gives_the_value_no_type(schema: Any) -> None:
    assert typed_value("12", {"properties": {"a": schema}}, "a") == 12


def test_references_of_a_schema_are_followed_once() -> None:
    """With 200 references from each level to the next there would be more than a billion."""
    many = [{"$ref": "#/properties/a"}] * 200
    a = {"anyOf": [*many, {"type": "string"}]}
    assert typed_value("12", {"properties": {"a": a}}, "a") == "12"


def test_a_forced_schema_admits_only_the_named_tool() -> None:
    import jsonschema

    other = {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "$ref": "#/$defs/P",
                "$defs": {"P": {"type": "object", "required": ["a"]}},
            },
        },
    }
    both = forced_schema([TOOL, other], None)
    for good in (
        {"name": "get_weather", "arguments": {"city": "Rome"}},
        {"name": "add", "arguments": {"a": 1}},
    ):
        jsonschema.validate(good, both)
    for bad in (
        {"name": "get_weather", "arguments": {}},
        {"name": "x", "arguments": {}},
        {"name": "add", "arguments": {}},
        {"name": "add"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, both)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {"name": "add", "arguments": {"a": 1}}, forced_schema([TOOL, other], "get_weather")
        )


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# Tools with self-references: two under the same name, to the root, to the older `definitions`, to a
# property.
REFERRING = {
    "set_address": {
        **closed(item={"$ref": "#/$defs/Item"}),
        "$defs": {"Item": closed(street={"enum": ["A", "B"]})},
    },
    "set_price": {**closed(item={"$ref": "#/$defs/Item"}), "$defs": {"Item": closed(price=DIGIT)}},
    "grow": closed(v=DIGIT, next={"anyOf": [{"type": "null"}, {"$ref": "#"}]}),
    "older": {
        **closed(item={"$ref": "#/definitions/Item"}),
        "definitions": {"Item": closed(price=DIGIT)},
    },
    "twice": closed(v=DIGIT, w={"$ref": "#/properties/v"}),
    "literal": closed(const={"$ref": "#/properties/enum"}, enum={"const": {"$ref": "#"}}),
}


def test_references_in_a_tool_resolve_in_its_own_schema() -> None:
    import jsonschema

    tools = [
        {"type": "function", "function": {"name": n, "parameters": p}} for n, p in REFERRING.items()
    ]
    good = {
        "set_address": {"item": {"street": "A"}},
        "set_price": {"item": {"price": 3}},
        "grow": {"v": 1, "next": {"v": 2, "next": None}},
        "older": {"item": {"price": 3}},
        "twice": {"v": 1, "w": 2},
        "literal": {"const": {"$ref": "#"}, "enum": {"$ref": "#"}},
    }
    for name in REFERRING:
        for schema in (forced_schema(tools, None), forced_schema(tools, name)):
            for other, arguments in good.items():
                call = {"name": name, "arguments": arguments}
                fits = jsonschema.Draft202012Validator(schema).is_valid(call)
                assert fits is jsonschema.Draft202012Validator(REFERRING[name]).is_valid(
                    arguments
                ), (name, other)


@pytest.mark.server
@pytest.mark.parametrize("strict", [False, True])
def test_forced_and_strict_calls_with_references_are_valid(fake: Any, strict: bool) -> None:
    import jsonschema

    tools = [
        {"type": "function", "function": {"name": n, "parameters": p, "strict": strict}}
        for n, p in REFERRING.items()
    ]
    ask = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": tools,
        "max_tokens": 400,
        "parallel_tool_calls": False,
    }
    # "n": null rather than one more level; "<": a call where there may be text
    bias = {"110": 50, "60": 100}
    named = [{"type": "function", "function": {"name": name}} for name in REFERRING]
    for seed, choice in enumerate(["auto"] * 6 if strict else ["required", "required", *named]):
        answer = fake.post(
            "/v1/chat/completions", {**ask, "tool_choice": choice, "seed": seed, "logit_bias": bias}
        )
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert isinstance(choice, str) or call["function"]["name"] == choice["function"]["name"]
        jsonschema.validate(
            json.loads(call["function"]["arguments"]), REFERRING[call["function"]["name"]]
        )


@pytest.mark.server
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_forced_call_is_always_valid(fake: Any, stream: bool, choice: Any) -> None:
    """Even from a random model, because the grammar masks every other token."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 400,
        "seed": 5,
    }
    if stream:
        events = fake.events("/v1/chat/completions", body)
        deltas = [c for e in events[:-1] for c in e["choices"]]
        (call,) = [d["delta"]["tool_calls"][0] for d in deltas if d["delta"].get("tool_calls")]
        assert deltas[-1]["finish_reason"] == "tool_calls"
    else:
        (made,) = fake.post("/v1/chat/completions", body).json()["choices"]
        (call,) = made["message"]["tool_calls"]
        assert made["message"]["content"] is None
        assert made["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


# Arguments as a model writes them, or a client sends them back -> as they must arrive. None: not
# JSON, so they stay text.
ODD = {
    '{"x": "\\ud800"}': '{"x": "\\ud800"}',
    '{"x": 1, "x": 2}': '{"x": 1, "x": 2}',
    '{"x": {"y": 1, "y": "\\ud800é"}}': '{"x": {"y": 1, "y": "\\ud800\\u00e9"}}',
    '{"x": "é\\u00e9"}': '{"x": "éé"}',
    '{"x": 1000000000000000000000000}': '{"x": 1000000000000000000000000}',
    '{"x": NaN}': None,
    '{"x": -Infinity}': None,
    '{"x": 1e999}': None,
    '{"x": ' + "[" * 100 + "]" * 100 + "}": None,
}


@pytest.mark.server
@pytest.mark.parametrize("arguments", ODD)
def test_odd_arguments_lose_nothing_and_cost_no_5xx(fake: Any, arguments: str) -> None:
    """A `choice` makes the random model generate exactly this."""
    text = '<tool_call>\n{"name": "f", "arguments": ' + arguments + "}\n</tool_call>"
    tool = {"name": "f", "parameters": {"type": "object"}}
    talk = [{"role": "user", "content": "x"}]
    ask = {
        "choice": [text],
        "messages": talk,
        "tools": [{"type": "function", "function": tool}],
        "max_tokens": 400,
    }
    whole = fake.post("/v1/chat/completions", ask)
    assert whole.status_code == 200
    message = whole.json()["choices"][0]["message"]
    deltas = [
        c["delta"] for e in fake.events("/v1/chat/completions", ask)[:-1] for c in e["choices"]
    ]
    streamed = [call["function"]["arguments"] for d in deltas for call in d.get("tool_calls", ())]
    if ODD[arguments] is None:
        assert message["content"] == "".join(d.get("content", "") for d in deltas) == text
        assert not streamed
    else:
        assert (
            [call["function"]["arguments"] for call in message["tool_calls"]]
            == streamed
            == [ODD[arguments]]
        )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    back = fake.post(
        "/v1/chat/completions",
        {"messages": [*talk, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1},
    )
    assert back.status_code == 200


@pytest.mark.parametrize("arguments", ODD)
def test_odd_arguments_reach_the_engine_whole(arguments: str) -> None:
    from verbatim.server.api.anthropic import anthropic

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    talk = [{"role": "assistant", "tool_calls": [call]}]
    (made,) = template_messages(talk, [], **BOTH)
    (spelled,) = template_messages(talk, [], **NEITHER)
    sent_message = Generate("r", "t", {}, stream=False, messages=[made, spelled])
    sent = made["tool_calls"][0]["function"]["arguments"]
    assert decode_to_engine(encode(sent_message)) == sent_message
    assert sent == arguments or json.loads(arguments) == sent
    read = read_calls('{"name": "f", "arguments": ' + arguments + "}", {"f"})
    assert [c.arguments for c in read] == ([] if ODD[arguments] is None else [ODD[arguments]])
    for c in read:
        assert json.dumps(anthropic.loads_lossless(c.arguments)) == ODD[arguments].replace(
            "é", "\\u00e9"
        )  # type: ignore[union-attr]


SHOWN = [  # what the random model is made to generate -> the text of its messages
    ('{"hello": 1}', '{"hello": 1}'),  # held back to its end, and then no call
    (("A <tool_call>no json</tool_call> and <tool_call>x</tool_call> "
     "end"), "A <tool_call>no json</tool_call> and <tool_call>x</tool_call> end"),
    ("plain é text", "plain é text"),
    (f"Let me see. {CALL}", "Let me see. "),
    (f"One {CALL}\n{CALL} two", "One  two"),
    (CALL, ""),
    (f"\n{CALL}", ""),
]  # fmt: skip


@pytest.mark.server
@pytest.mark.parametrize(("written", "shown"), SHOWN)
def test_a_response_has_one_logprob_per_token_of_its_text(
    fake: Any, written: str, shown: str
) -> None:
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
    ask = {
        "input": "x",
        "tools": tools,
        "choice": [written],
        "include": ["message.output_text.logprobs"],
        "seed": 1,
    }
    whole = fake.post("/v1/responses", ask).json()
    events = fake.events("/v1/responses", ask)

    def parts(response: Any) -> list[Any]:
        return [
            p for item in response["output"] if item["type"] == "message" for p in item["content"]
        ]

    items = [  # in the order of the output
        [(item["type"], item["status"]) for item in response["output"]]
        for response in (whole, events[-1]["response"])
    ]
    assert items[0] == items[1]
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    for rendered in (
        parts(whole),
        parts(events[-1]["response"]),
        [{**e, "text": e["delta"]} for e in deltas],
    ):
        assert "".join(p["text"] for p in rendered) == shown
        raw = bytes(b for p in rendered for token in p["logprobs"] for b in token["bytes"])
        assert raw.decode().removesuffix("</s>") == shown


def test_anthropics_blocks_are_in_the_order_of_the_output() -> None:
    """Streamed and whole; an empty output is one empty text block."""
    from verbatim.server.api.anthropic import anthropic

    for text in (f"One {CALL}\n{CALL} two", "plain", ""):
        parser = ToolParser("hermes", NAMES)
        found = [*parser.push(text), *parser.finish()]
        whole = anthropic.content_blocks(found) or [{"type": "text", "text": ""}]
        blocks = anthropic.BlockEvents()
        made = [e for kind, v in found for e in getattr(blocks, kind)(v)] + blocks.end()
        events = [json.loads(event.partition(b"data: ")[2]) for event in made]
        started = [e for e in events if e["type"] == "content_block_start"]
        assert [e["content_block"]["type"] for e in started] == [b["type"] for b in whole]
        assert [e["index"] for e in started] == list(range(len(whole)))
        texts = [e["delta"]["text"] for e in events if "text" in e.get("delta", {})]
        assert "".join(texts) == "".join(b.get("text", "") for b in whole)


@pytest.mark.server
def test_forced_calls_in_the_other_protocols(fake: Any) -> None:
    ask = [{"role": "user", "content": "x"}]
    parameters = TOOL["function"]["parameters"]  # type: ignore[index]
    tool = {"name": "get_weather", "input_schema": parameters}
    claude = fake.post(
        "/v1/messages",
        {
            "messages": ask,
            "tools": [tool],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 400,
        },
    ).json()
    assert claude["stop_reason"] == "tool_use"
    assert claude["content"][-1]["input"]["city"] in ("Paris", "Rome")
    flat = {"type": "function", "name": "get_weather", "parameters": parameters}
    forced = {
        "input": "x",
        "tools": [flat],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 400,
    }
    answer = fake.post("/v1/responses", forced).json()
    assert answer["output"][-1]["type"] == "function_call"
    follow = [
        *ask,
        *answer["output"],
        {
            "type": "function_call_output",
            "call_id": answer["output"][-1]["call_id"],
            "output": "sunny",
        },
    ]
    assert (
        fake.post(
            "/v1/responses", {"input": follow, "tools": [flat], "max_output_tokens": 4}
        ).status_code
        == 200
    )
    counted = [
        fake.post("/v1/responses/input_tokens", {"input": part, "tools": [flat]}).json()[
            "input_tokens"
        ]
        for part in (follow, [*ask, follow[-1]])
    ]
    # the prompt contains the call
    assert counted[0] - counted[1] > len(answer["output"][-1]["arguments"])
    events = fake.events("/v1/responses", forced)
    assert [e["type"] for e in events if "function_call_arguments" in e["type"]] == [
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    ]


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "true"),
    ],
)
def test_a_schema_of_null_is_a_missing_schema(form: dict[str, Any], schema: str) -> None:
    """It gave unconstrained text."""
    state = SimpleNamespace(limits=Limits(), facts=ALL_TOOLS, settings=Settings())
    call: Any = SimpleNamespace(state=state, aliases={}, notices=[])
    null = {**form, "schema": None}
    if "json_schema" in form:
        null = {**form, "json_schema": {**form["json_schema"], "schema": None}}
    for sent in (form, null):
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        checked = check(BODIES["/v1/chat/completions"], {**body, "response_format": sent})[0]
        assert ChatRequest(call, checked, rules_of(ChatCompletions)).params["json_schema"] == schema
    if "json_schema" not in form:  # Responses: the schema of a json_schema is required
        checked = check(
            BODIES["/v1/responses"], {"model": "m", "input": "x", "text": {"format": null}}
        )[0]
        request = ChatRequest(
            call, asyncio.run(response_fields(call, checked)), rules_of(Responses), RESPONSES_NAMES
        )
        assert request.params["json_schema"] == schema


def test_a_tool_name_of_null_is_a_missing_name() -> None:
    def chosen(kind: str) -> Any:
        body = {
            "model": "m",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "x"}],
            "tool_choice": {"type": kind, "name": None},
        }
        call: Any = SimpleNamespace()
        return message_fields(call, check(BODIES["/v1/messages"], body)[0])["tool_choice"]

    assert (chosen("auto"), chosen("any")) == ("auto", "required")
    with pytest.raises(Problem) as error:  # it allowed every tool
        chosen("tool")
    assert (error.value.code, error.value.param) == ("missing_parameter", "tool_choice.name")


@pytest.mark.server
@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {
                    "type": "object",
                    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
                    "required": ["n"],
                    "additionalProperties": False,
                },
            },
        },
    ],
)
def test_structured_answers_are_valid_json(fake: Any, form: dict[str, Any]) -> None:
    for seed in range(4):
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": form,
            "max_tokens": 500,
            "seed": seed,
        }
        choice = fake.post("/v1/chat/completions", body).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        else:
            # a free-form object may exceed the limit; the schema's cannot
            assert form["type"] == "json_object"


@pytest.mark.server
def test_strict_tools_leave_a_choice_between_valid_calls_and_text(fake: Any) -> None:
    """A random model that is biased to begin with "<" generates valid calls only; without the bias,
    text without a call."""
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [strict],
        "max_tokens": 500,
        "seed": 3,
    }
    plain = fake.post("/v1/chat/completions", body).json()["choices"][0]
    assert "tool_calls" not in plain["message"]
    assert "<tool_call>" not in plain["message"]["content"]
    nudged = {**body, "logit_bias": {"60": 100}, "parallel_tool_calls": False}
    called = fake.post("/v1/chat/completions", nudged).json()["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    (call,) = called["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


@pytest.mark.server
def test_a_response_format_beside_tools_is_kept_unless_a_tool_is_called(fake: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for bias, called in (({"123": 100}, False), ({"60": 100}, True)):
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [TOOL],
            "response_format": form,
            "max_tokens": 500,
            "seed": 3,
            "logit_bias": bias,
        }
        message = fake.post("/v1/chat/completions", {**body, "parallel_tool_calls": False}).json()[
            "choices"
        ][0]["message"]
        assert bool(message.get("tool_calls")) is called
        if not called:
            assert json.loads(message["content"])["yes"] in (True, False)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ],
)
def test_a_built_in_tool_is_rejected_by_its_type(
    fake: Any, route: str, body: dict[str, Any]
) -> None:
    for tool in (
        {"type": "web_search"},
        {"type": "web_search", "name": "web_search", "max_uses": 2},
    ):
        answer = fake.post(route, {**body, "tools": [tool]})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (
            400,
            "unsupported_parameter",
            "tools[0].type",
        )
        assert "'web_search' tools are not supported" in error["message"]


def test_a_cut_off_answer_of_anthropic_is_no_finished_tool_use() -> None:
    """A call and max_tokens: the client must not take the list of calls for complete."""
    for reason, stop_reason in (("stop", "tool_use"), ("length", "max_tokens")):
        found = MessagesReply.stop(Any, WireFinish(reason, ""), True)  # type: ignore[arg-type]
        assert found == {"stop_reason": stop_reason, "stop_sequence": None}


def test_retry_after_is_whole_seconds_rounded_up() -> None:
    found = [Problem("overloaded", "", retry_after=s).headers() for s in (0.2, 1.2, 3)]
    assert [header["retry-after"] for header in found] == ["1", "2", "3"]


# ------------------------------------------------------------------ several calls, strict or forced

TAGS = {
    "type": "object",
    "properties": {
        "tags": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "minItems": 2,
            "maxItems": 4,
            "uniqueItems": True,
        }
    },
    "required": ["tags"],
    "additionalProperties": False,
}


def strict_tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters, "strict": True},
    }


def calls_of(answer: Any) -> list[Any]:
    assert answer.status_code == 200, answer.text
    made = answer.json()["choices"][0]["message"].get("tool_calls", [])
    return [json.loads(call["function"]["arguments"]) for call in made]


@pytest.mark.server
@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "tag"}}]
)
@pytest.mark.parametrize("single", [True, False])
def test_every_tool_choice_checks_what_no_grammar_enforces(
    fake: Any, choice: Any, single: bool
) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [strict_tool("tag", TAGS), strict_tool("other", TAGS)],
        "tool_choice": choice,
        "parallel_tool_calls": not single,
        "max_tokens": 500,
        # "<": a call where there may be text; then the list of tags is mostly "1,1,1,1"
        "logit_bias": {"60": 100, "49": 8, "44": 9},
    }
    for seed in range(4):
        found = calls_of(fake.post("/v1/chat/completions", {**body, "seed": seed}))
        assert found or not single
        for tags in (arguments["tags"] for arguments in found):
            assert len(set(tags)) == len(tags) >= 2


@pytest.mark.server
def test_a_response_format_beside_strict_tools_is_checked(fake: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": TAGS}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [strict_tool("tag", TAGS)],
        "response_format": form,
        "max_tokens": 400,
        "logit_bias": {"123": 100, "49": 8, "44": 9},
    }
    for seed in range(4):
        answer = fake.post("/v1/chat/completions", {**body, "seed": seed}).json()
        tags = json.loads(answer["choices"][0]["message"]["content"])["tags"]
        assert len(set(tags)) == len(tags) >= 2


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.server
@pytest.mark.parametrize("choice", ["auto", "required", named("tag"), named("lost")], ids=str)
@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"$ref": "#/$defs/B"}, "$ref '#/$defs/B' (at #/properties/a)"),
        (False, "no document satisfies it: the schema is false (at #/properties/a)"),
        (
            {"type": "integer", "minimum": 5, "maximum": 3},
            "no document satisfies it: minimum (5) is greater than maximum (3) (at #/properties/a)",
        ),
        (
            {"$ref": "#/$defs/A"},
            "no document satisfies it: anyOf is empty (at #/$defs/A/properties/b)",
        ),
    ],
    ids=str,
)
def test_an_error_about_a_schema_names_the_tool(
    fake: Any, choice: Any, part: Any, why: str
) -> None:
    """The strict tool that cannot be called is refused under each tool_choice."""
    bad = {"type": "object", "properties": {"a": part}, "required": ["a"],
           "$defs": {"A": closed(b={"enum": []})}}  # fmt: skip
    for tools in ([strict_tool("tag", TAGS), strict_tool("lost", bad)], [strict_tool("lost", bad)]):
        if choice == named("tag") and len(tools) == 1:
            continue
        body = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
        answer = fake.post("/v1/chat/completions", {**body, "tool_choice": choice})
        assert answer.status_code == 400
        error = answer.json()["error"]
        where = f"tools[{len(tools) - 1}].function.parameters"
        assert error["param"] == where
        assert error["message"].startswith(f"{where}: of the tool 'lost', {why}")


@pytest.mark.server
@pytest.mark.parametrize("choice", ["auto", "required", named("tag")], ids=str)
def test_a_warning_about_a_schema_names_the_tool(fake: Any, choice: Any) -> None:
    field = {"type": "string", "x-order": 1, "format": "path"}
    tools = [strict_tool("tag", {**TAGS, "x-a": 1}), strict_tool("other", closed(p=field))]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 2}
    answer = fake.post("/v1/chat/completions", {**body, "tool_choice": choice}).json()
    why = "these keywords assert nothing and were ignored"
    assert answer["warnings"] == [
        f"tools[0].function.parameters: of the tool 'tag', {why}: x-a (at #)",
        f"tools[1].function.parameters: of the tool 'other', {why}: "
        "x-order (at #/properties/p), format: path (at #/properties/p)",
    ]


@pytest.mark.server
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_without_a_valid_end_is_an_error_that_names_the_tool(
    fake: Any, stream: bool
) -> None:
    """With a format for a text beside, or several tools, the error names the field alone."""
    tool = strict_tool("lost", {**closed(a={"type": "boolean"}), "not": closed(a={})})
    ask = {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required",
           "max_tokens": 400, "stream": stream, "parallel_tool_calls": False}  # fmt: skip
    where = "tools[0].function.parameters"
    for tools, start in (
        ([tool], f"{where}: of the tool 'lost', the text so far cannot become"),
        ([tool, {**tool, "function": {**tool["function"], "name": "two"}}], "tools: the text so"),
    ):
        body = {**ask, "tools": tools}
        if stream:
            error = fake.events("/v1/chat/completions", body)[-2]["error"]
        else:
            error = fake.post("/v1/chat/completions", body).json()["error"]
        assert error["message"].startswith(start)
        assert "(not: not met at 'arguments')" in error["message"]


@pytest.mark.server
def test_an_error_about_a_response_format_beside_tools_names_that(fake: Any) -> None:
    schema = {"type": "object", "properties": {"arguments": False}, "required": ["arguments"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [strict_tool("tag", TAGS)]}
    error = fake.post("/v1/chat/completions", {**body, "response_format": form}).json()["error"]
    assert error["message"] == (
        "response_format: no document satisfies it: the schema is false (at #/properties/arguments)"
    )
    assert error["param"] == "response_format"


@pytest.mark.parametrize("form", ["hermes", "llama3"])
@pytest.mark.parametrize("bad", ["tag", "other", "text"])
def test_the_grammar_of_each_format_names_the_part_without_documents(form: str, bad: str) -> None:
    from verbatim.base.errors import ParameterError
    from verbatim.grammar.compiler import compile_structure

    def schema(name: str) -> Any:
        return closed(a=False) if name == bad else TAGS

    tools = [strict_tool("tag", schema("tag")), strict_tool("other", schema("other"))]
    grammar = call_or_text(tools, form, single=False, text=schema("text"))
    with pytest.raises(ParameterError) as caught:
        compile_structure(SamplingParams(grammar=grammar), ByteTokenizer())
    why = str(caught.value).removeprefix("json_schema: ")
    placed = [{**tool, "place": i} for i, tool in enumerate(tools)]
    found = name_tool(Problem("invalid_parameter", f"tools: {why}", "tools"), placed, {})
    where = {"tag": "tools[0].function.parameters", "other": "tools[1].function.parameters"}
    assert found.param == where.get(bad, "response_format")
    assert found.message.endswith("the schema is false (at #/properties/a)")


@pytest.mark.server
@pytest.mark.parametrize("stream", [False, True])
def test_required_may_give_several_calls_unless_parallel_calls_are_off(
    fake: Any, stream: bool
) -> None:
    """A random model ends the list after any call."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 500,
        "stream": stream,
    }

    def count(**more: Any) -> int:
        if not stream:
            return len(calls_of(fake.post("/v1/chat/completions", {**body, **more})))
        events = fake.events("/v1/chat/completions", {**body, **more})[:-1]
        return sum(len(c["delta"].get("tool_calls") or ()) for e in events for c in e["choices"])

    assert {count(seed=seed, parallel_tool_calls=False) for seed in range(6)} == {1}
    for default in ({}, {"parallel_tool_calls": True}):
        counts = [count(seed=seed, logit_bias={"44": 2}, **default) for seed in range(6)]
        assert min(counts) >= 1
        assert max(counts) >= 2, counts


def test_a_list_of_calls_that_a_limit_cut_keeps_its_complete_calls() -> None:
    one = '{"name": "add", "arguments": {"a": [1, "]"]}}'
    call = ("add", {"a": [1, "]"]})
    for text in (f"[{one}, {one}", f'[{one},\n{one}, {{"name": "ad'):
        calls, left = parse("hermes", [text], forced=True)
        assert calls == [call, call]
        assert text.endswith(left)
    assert parse("hermes", ['[{"name": "ad'], forced=True) == ([], '[{"name": "ad')
    assert parse("hermes", [f"[{one}, 1"], forced=True) == ([], f"[{one}, 1")


@pytest.mark.parametrize("form", ["hermes", "llama3", "json"])
@pytest.mark.parametrize("text", [None, TAGS])
def test_the_grammar_of_calls_or_text_names_its_documents(form: str, text: Any) -> None:
    """Calls in the format of the model, one or several, or the text; items are unique in each."""
    from verbatim.grammar.compiler import compile_structure

    tokenizer = ByteTokenizer()
    good, bad = '{"tags": [1, 2]}', '{"tags": [1, 1]}'
    calls = {a: f'{{"name": "tag", "arguments": {a}}}' for a in (good, bad)}

    def written(*arguments: str) -> str:
        if form == "llama3":
            listed = ", ".join(calls[a] for a in arguments)
            return listed if len(arguments) == 1 else f"[{listed}]"
        return "\n".join(f"<tool_call>\n{calls[a]}\n</tool_call>" for a in arguments)

    for single in (True, False):
        grammar = call_or_text([strict_tool("tag", TAGS)], form, single=single, text=text)
        structure = compile_structure(SamplingParams(grammar=grammar), tokenizer)
        assert structure is not None

        def accepts(output: str, structure: Any = structure) -> bool:
            matcher = structure.start()
            for token in output.encode():
                if matcher.finished or not matcher.mask()[token // 8] >> token % 8 & 1:
                    return False
                matcher.advance(token)
            return bool(matcher.accepting)

        assert accepts(written(good))
        assert not accepts(written(bad))
        assert accepts(written(good, good)) is not single
        assert not accepts(written(good, bad))
        if text is None:
            assert accepts("Some text, [and] a list.")
        else:
            assert accepts(good)
            assert not accepts(bad)
