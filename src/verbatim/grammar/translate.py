"""Translate a structure to llguidance's grammar text and compile it once, in a compile worker.

In: a request's json_schema, regex, grammar or choice. Out: grammar text, or an error that names the
field; for a JSON schema also what the grammar does not enforce. Slow Python code runs here, outside
the engine's process: normalising a schema and the GBNF parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from verbatim.base.errors import ParameterError, RequestError, UnsupportedError
from verbatim.base.json_io import JsonObject, no_key_twice
from verbatim.grammar.finite import infinite_definitions, infinite_keyword, needed
from verbatim.grammar.gbnf import RULE, gbnf_to_lark
from verbatim.grammar.json_schema import Normal, normalise
from verbatim.grammar.llguidance_tokenizer import byte_tokenizer as byte_tokenizer
from verbatim.grammar.lower import (
    Options,
    has_free_names,
    lower,
    names_may_run_out,
    without_definitions,
)

WHITESPACE = r"[ \t\n\r]{0,32}"  # between JSON tokens; bounded, or a model may write blanks forever
# Characters of a schema whose oneOf parts are tested for disjointness, which takes a second compile
# if they are not; beyond it the document check counts the parts.
MAX_EXACT_ONE_OF = 64 * 1024
# Characters of schemas compiled to find the part that no document satisfies; a quarter second
MAX_SEARCHED = 256 * 1024


class Translation(NamedTuple):
    """`check`: what the grammar does not enforce: the schema that finished documents must satisfy
    (True: only that names do not repeat) and a grammar for the look-ahead, "" if names cannot run
    out; of a grammar the Documents of embedded_check.py. `warnings`: sentences for the client."""

    grammar: str
    check: Any = None
    warnings: tuple[str, ...] = ()


def try_translate(field: str, value: Any, compiles: Callable[[str], None]) -> Translation:
    """The grammar text, which `compiles` has accepted. Raises ParameterError (invalid) or
    UnsupportedError (not supported)."""
    try:
        if field == "json_schema":
            return _json_translation(value, compiles)
        if field == "grammar":
            translation = _grammar_text(value, compiles)
        else:
            translation = Translation(_TRANSLATORS[field](value))
        compiles(translation.grammar)
        return translation
    except RequestError:
        raise
    except RecursionError:
        raise ParameterError(field, "is nested too deeply") from None
    except ValueError as error:  # from llguidance's parser
        raise refusal(field, str(error)) from None


# --- JSON Schema


def _json_translation(text: str, compiles: Callable[[str], None]) -> Translation:
    schema, check, warnings = _enforceable(text, compiles)
    return Translation(_schema_grammar(schema), check, warnings)


class _Unsatisfiable(Exception):
    """No document satisfies the schema, or the definition of this name; the message says why."""

    def __init__(self, why: str, name: str | None = None) -> None:
        super().__init__(why)
        self.name = name


def _enforceable(text: str, compiles: Callable[[str], None]) -> tuple[Any, Any, tuple[str, ...]]:
    """The schema that llguidance compiles, and `check` and `warnings` of its Translation."""
    normal = normalise(json.loads(text))
    options = Options(one_of=len(text) <= MAX_EXACT_ONE_OF)
    try:
        schema, enforced = _compiled(normal.schema, normal.parts, options, compiles)
    except _Unsatisfiable as error:
        why, place = _innermost(normal, error, compiles)
        raise ParameterError(
            "json_schema", f"no document satisfies it: {why} (at {place})"
        ) from None
    names = _schema_grammar(schema) if names_may_run_out(schema) else ""
    checked = has_free_names(schema) if enforced else normal.schema
    check = [checked, names] if checked else None
    return schema, check, _ignored(normal.ignored)


# A part of llguidance's message -> the option without which it does not refuse the schema
_REFUSALS = {
    "oneOf": "one_of",
    "not disjoint": "patterns",
    "min/maxProperties": "counts",
    "Failed to generate regex for": "bounds",
}


def _compiled(
    given: Any, parts: Collection[str], options: Options, compiles: Callable[[str], None]
) -> tuple[Any, bool]:
    """The lowered schema that llguidance compiles, and whether it enforces all of the given one.
    Compile with everything in the grammar; leave to the document check what llguidance refuses and
    the check can do. Raises _Unsatisfiable, also for one of `parts`."""
    dropped: dict[str, str] = {}  # $defs that no document satisfies -> why
    while True:
        lowered = lower(given, options)
        reasons = "; ".join(dict.fromkeys(lowered.impossible))
        for name, why in _infinite(lowered.schema):
            dropped.setdefault(name, why)
        schema = without_definitions(lowered.schema, dropped) if dropped else lowered.schema
        for name in parts if isinstance(lowered.schema, dict) else ():
            if name in dropped or lowered.schema["$defs"][name] is False:
                raise _Unsatisfiable(dropped.get(name, reasons or "the schema is false"), name)
        if schema is False:
            raise _Unsatisfiable(reasons or "; ".join(dropped.values()) or "the schema is false")
        try:
            compiles(_schema_grammar(schema))
        except (ValueError, RequestError) as error:
            message = first_line(str(error))
            if found := _UNSATISFIABLE.search(str(error)):
                if found["name"] is None:
                    raise _Unsatisfiable(reasons or found["why"]) from None
                dropped[found["name"]] = found["why"]
            else:
                refused = [name for sign, name in _REFUSALS.items() if sign in message]
                refused += ["conditionals"] if "if" in lowered.checked else []
                left = [option for option in refused if getattr(options, option)]
                if not left:
                    raise
                options = replace(options, **{left[0]: False})
            continue
        return schema, not lowered.checked


def _innermost(
    normal: Normal, error: _Unsatisfiable, compiles: Callable[[str], None]
) -> tuple[str, str]:
    """Why no document satisfies a schema, and the place of the innermost part that shows it."""
    definitions = dict(normal.schema.get("$defs", {})) if isinstance(normal.schema, dict) else {}
    whole = json.dumps({"$defs": {**definitions, "#": normal.schema}}).replace(
        '"$ref": "#"', '"$ref": "#/$defs/#"'
    )
    definitions = json.loads(whole)["$defs"]
    name, places = error.name or "#", {**normal.places, "#": "#"}
    node, place, seen, left = definitions[name], places[name], {name}, MAX_SEARCHED
    while isinstance(node, dict):
        found = None
        for part, where in _needed_parts(node, place, definitions, places, seen):
            tested = _alone(part, definitions)
            left -= len(json.dumps(tested))
            if left < 0:
                break
            try:
                _compiled(tested, (), Options(), compiles)
            except _Unsatisfiable as inner:
                found = error, node, place = inner, part, where
                break
            except (ValueError, RequestError):
                continue  # the whole schema had no such fault
        if found is None:
            break
    return str(error), place


def _needed_parts(
    node: JsonObject, place: str, definitions: JsonObject, places: Mapping[str, str], seen: set[str]
) -> Iterator[tuple[Any, str]]:
    """The parts without which no document satisfies a schema, with their places; each definition
    once (`seen`). Alternatives stand together, and are parts of their list."""
    if "$ref" in node and (name := node["$ref"].removeprefix("#/$defs/")) not in seen:
        seen.add(name)
        yield definitions[name], places[name]
    for keyword in ("anyOf", "oneOf"):
        if keyword in node:
            if len(node) > 1:
                yield {keyword: node[keyword]}, place
            else:
                yield from ((p, f"{place}/{keyword}/{i}") for i, p in enumerate(node[keyword]))
    for _, where, part in needed(node):
        name = part.get("$ref", "").removeprefix("#/$defs/") if isinstance(part, dict) else ""
        if name not in seen and (part, where) != (False, "/additionalProperties"):
            yield part, place + where


def _alone(part: Any, definitions: JsonObject) -> Any:
    """A part of a schema with the definitions that it needs."""
    if not isinstance(part, dict):
        return part
    names: JsonObject = {}
    texts = [json.dumps(part)]
    while texts:
        for name in re.findall(r'"\$ref": "#/\$defs/([^"]+)"', texts.pop()):
            if name in definitions and name not in names:
                names[name] = definitions[name]
                texts.append(json.dumps(names[name]))
    return {**part, "$defs": names} if names else part


# llguidance's message; without a name the root is meant.
_UNSATISFIABLE = re.compile(
    r"^Unsatisfiable schema: (?P<why>[^\n]*)(?:\n.*/\$defs/(?P<name>\S+))?", re.M
)


def _schema_grammar(schema: Any) -> str:
    from llguidance import LLMatcher

    options: Any = {"lenient": False, "whitespace_pattern": WHITESPACE, "coerce_one_of": False}
    schema = {} if schema is True else schema
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


def _infinite(schema: Any) -> Iterator[tuple[str, str]]:
    """The names under $defs that no finite document satisfies, and why. Raises _Unsatisfiable if
    the schema is such."""
    why = "every document would contain itself"
    try:
        keyword, names = infinite_keyword(schema), infinite_definitions(schema)
    except (TypeError, ValueError, AttributeError):
        return  # a keyword of a wrong type, which llguidance reports
    if keyword is not None:
        raise _Unsatisfiable(f"{keyword}: {why}")
    yield from ((name, why) for name in names)


def _ignored(parts: Iterable[Iterable[str]], field: str = "json_schema") -> tuple[str, ...]:
    """The warnings about keywords that assert nothing, one for each part of the schema.

    >>> _ignored([["$default", "format: path"]])
    ('json_schema: these keywords assert nothing and were ignored: $default, format: path',)
    """
    why = "these keywords assert nothing and were ignored"
    return tuple(f"{field}: {why}: {', '.join(names)}" for names in parts)


# --- one translator per other kind of structure


def _regex_text(pattern: str) -> str:
    from llguidance import LLMatcher

    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # llguidance would drop the backslash
        raise ParameterError(
            "regex",
            "ends in a backslash that escapes nothing; write two of them for the character itself",
        )
    return str(LLMatcher.grammar_from_regex(pattern))


# The attribute in the brackets behind a rule's name. Strings and patterns there may contain `]`.
_TEMPERATURE = re.compile(
    r"""^[^"/\n\[]*\[(?:"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/|[^]"/\n])*?\btemperature\s*=""",
    re.M,
)


# A line of a Lark grammar that says where the documents of its %json rules start: a JSON list of
# [text before it, its first characters, name of its rule] (Document of embedded_check.py)
DOCUMENTS = "// documents: "


def _grammar_text(grammar: str, compiles: Callable[[str], None]) -> Translation:
    """Lark in llguidance's dialect, or GBNF (llama.cpp), whose rules have `::=`."""
    from llguidance import LLMatcher

    if RULE.search(grammar):
        return Translation(str(LLMatcher.grammar_from_lark(gbnf_to_lark(grammar))))
    if _TEMPERATURE.search(grammar):
        raise UnsupportedError(
            "grammar",
            "the attribute `temperature` inside a grammar is not supported; set the parameter",
        )
    places: list[list[str]] = []
    if grammar.startswith(DOCUMENTS):
        places = json.loads(grammar.partition("\n")[0].removeprefix(DOCUMENTS))
        if not isinstance(places, list) or any(
            not isinstance(place, list) or [*map(type, place)] != [str] * 3 for place in places
        ):
            raise ParameterError("grammar", f"{DOCUMENTS!r}: lists of three strings are needed")
    text, checks, warnings = _lower_embedded(grammar, compiles, {name for *_, name in places})
    check = [[before, first, *checks[name]] for before, first, name in places if name in checks]
    return Translation(str(LLMatcher.grammar_from_lark(text)), check or None, warnings)


def _lower_embedded(
    grammar: str, compiles: Callable[[str], None], placed: Collection[str]
) -> tuple[str, JsonObject, tuple[str, ...]]:
    """The grammar with its `%json` schemas lowered, the schemas to check by rule, and warnings. A
    document check can follow only the rules whose place is known (`placed`)."""
    decoder = json.JSONDecoder(object_pairs_hook=no_key_twice)
    parts, done = [], 0
    checks: JsonObject = {}
    warnings: dict[str, None] = {}
    for found in re.finditer(r"%json\s*(?=[{])", grammar):
        if found.start() < done:
            continue  # inside the schema before
        try:
            schema, end = decoder.raw_decode(grammar, found.end())
        except json.JSONDecodeError:
            continue  # llguidance reports the error
        except ValueError as error:
            raise ParameterError("grammar", f"%json: {error}") from None
        rule = grammar[: found.start()].rpartition("\n")[2].partition(":")[0].strip()
        if rule in placed:
            lowered_schema, check, lines = _enforceable(grammar[found.end() : end], compiles)
            warnings |= dict.fromkeys(lines)
            if check is not None:
                checks[rule] = check
            parts += [grammar[done : found.end()], json.dumps(lowered_schema)]
            done = end
            continue
        normal = normalise(schema, "grammar")
        lowered = lower(normal.schema)
        warnings |= dict.fromkeys(_ignored(normal.ignored, "grammar: %json"))
        if lowered.checked:
            raise UnsupportedError(
                "grammar",
                f"%json: the keyword {sorted(lowered.checked)[0]!r} is supported in json_schema "
                "only, where the finished document is checked",
            )
        parts += [grammar[done : found.end()], json.dumps(lowered.schema)]
        done = end
    return "".join([*parts, grammar[done:]]), checks, tuple(warnings)


# Characters that a regular expression must escape to match literally.
_LITERAL = {ord(sign): f"\\{sign}" for sign in r"\.+*?()|[]{}^$#&-~/"}


def choice_text(choices: Sequence[str]) -> str:
    """One regex of alternatives. The lexer follows thousands of them at once, unlike the parser;
    it compiles in half the time of a grammar of strings."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex("|".join(text.translate(_LITERAL) for text in choices)))


_TRANSLATORS: dict[str, Callable[[Any], str]] = {"regex": _regex_text, "choice": choice_text}


# --- errors

# llguidance's messages for valid input that it does not support.
_UNSUPPORTED = re.compile(
    r"unimplemented|not supported|unsupported|too complex|too large|too many|limit|fuel"
    r"|unknown format|not disjoint|registry",
    re.I,
)
_BAD_REGEX = re.compile(
    r"regex parse error:\n    (?P<pattern>[^\n]*)\n    (?P<before> *)\^+\nerror: (?P<why>[^\n]*)"
)


def refusal(field: str, message: str) -> ParameterError | UnsupportedError:
    """The error for a message of llguidance."""
    if found := _BAD_REGEX.search(message):
        message = _about_regex(field, found["pattern"], len(found["before"]), found["why"])
    elif "regex parse error" in message and (why := re.search(r"^error: (.*)$", message, re.M)):
        message = f"is not a regular expression: {why[1]}; {_SYNTAX}"  # a pattern of several lines
    else:
        message = first_line(message)
    if "unknown special token" in message:
        return UnsupportedError(
            field,
            "control tokens (<|...|>) inside a grammar are not supported; write text in quotes",
        )
    if "registry" in message:
        where = message.split(" is not")[0]
        message = f"$ref outside the schema is not supported, nothing is ever fetched ({where})"
    kind = UnsupportedError if _UNSUPPORTED.search(message) else ParameterError
    return kind(field, message)


_SYNTAX = (
    "the syntax is that of Rust's regex crate, and a backslash before a sign means the sign itself"
)


def _about_regex(field: str, pattern: str, at: int, why: str) -> str:
    """The error message of a regular expression that does not compile.

    >>> _about_regex("regex", "ab(c", 2, "unclosed group").removesuffix(_SYNTAX)
    "'ab(c' is not a regular expression: unclosed group, at character 3 ('(c'); "
    """
    shown = pattern if len(pattern) <= 60 else pattern[:57] + "..."
    inside = "" if field == "regex" else " (a pattern inside)"
    what = f"{shown!r} is not a regular expression{inside}"
    return f"{what}: {why}, at character {at + 1} ({pattern[at : at + 12]!r}); {_SYNTAX}"


def first_line(text: str) -> str:
    if text.startswith("panic:"):  # a bug in llguidance, whose message does not help the client
        return "llguidance, which follows it, failed"
    return text.strip().splitlines()[0][:300] if text.strip() else "unknown reason"


# --- the first compile


def parser_limits(limits: JsonObject) -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**limits)


def try_compile(field: str, value: Any, tokenizer: Any, limits: Any) -> JsonObject:
    """A Translation as a mapping if the structure compiles, else {"error": the class, "param": the
    field, "message": why}."""
    from llguidance import LLMatcher

    def compiles(grammar: str) -> None:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        found = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if found:
            raise ValueError("\n".join(found))
        matcher.compute_bitmask()  # the first mask is the most expensive

    try:
        return try_translate(field, value, compiles)._asdict()
    except (ParameterError, UnsupportedError) as error:
        return {
            "error": type(error).__name__,
            "param": str(error.param),
            "message": str(error).removeprefix(f"{error.param}: "),
        }
