"""Translate a structure to llguidance's grammar text and compile it once, in a compile worker.

In: a request's json_schema, regex, grammar or choice. Out: grammar text, or an error that names the
field. Slow Python code runs here, outside the engine's process: the schema check and the GBNF
parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from verbatim.base.errors import ParameterError, RequestError, UnsupportedError
from verbatim.base.params import no_key_twice
from verbatim.grammar.finite import infinite_keyword
from verbatim.grammar.json_schema import check_schema

WHITESPACE = r"[ \t\n\r]{0,32}"  # between JSON tokens; bounded, or a model may write blanks forever


def translate(field: str, value: Any) -> str:
    """The grammar text. Raises ParameterError (invalid) or UnsupportedError (not supported)."""
    try:
        return _TRANSLATORS[field](value)
    except RequestError:
        raise
    except RecursionError:
        raise ParameterError(field, "is nested too deeply") from None
    except ValueError as error:  # from llguidance's parser
        raise refusal(field, str(error)) from None


# --- one translator per kind of structure


def _json_text(schema: str) -> str:
    from llguidance import LLMatcher

    value = json.loads(schema)
    check_schema(value)
    if value is False:
        raise ParameterError("json_schema", "false: no text can satisfy it")
    value = {} if value is True else value
    try:
        keyword = infinite_keyword(value)
    except (TypeError, ValueError, AttributeError):
        keyword = None  # a keyword of a wrong type, which llguidance reports
    if keyword is not None:
        raise ParameterError(
            "json_schema",
            f"{keyword}: no finite text can satisfy it; every document would contain itself",
        )
    options: Any = {"lenient": False, "whitespace_pattern": WHITESPACE, "coerce_one_of": False}
    return str(LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=options))


def _regex_text(pattern: str) -> str:
    from llguidance import LLMatcher

    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # llguidance would drop the backslash
        raise ParameterError(
            "regex",
            "ends in a backslash that escapes nothing; write two of them for the character itself",
        )
    return str(LLMatcher.grammar_from_regex(pattern))


def _grammar_text(grammar: str) -> str:
    """Lark in llguidance's dialect; a grammar with `::=` is GBNF (llama.cpp) and is translated."""
    from llguidance import LLMatcher

    if "::=" in grammar:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            grammar = gbnf_to_lark(grammar)
        except RecursionError:
            raise
        except Exception as error:
            raise ParameterError("grammar", f"is not GBNF that we can read: {error}") from None
    if re.search(r"\[[^\]\n]*\btemperature\s*=", grammar):
        raise UnsupportedError(
            "grammar",
            "the attribute `temperature` inside a grammar is not offered; set the parameter",
        )
    for found in re.finditer(r"%json\s*(?=[{])", grammar):  # embedded schemas: the same rules
        try:
            schema, _ = json.JSONDecoder(object_pairs_hook=no_key_twice).raw_decode(
                grammar, found.end()
            )
        except json.JSONDecodeError:
            continue  # llguidance reports the error
        except ValueError as error:
            raise ParameterError("grammar", f"%json: {error}") from None
        check_schema(schema, "grammar")
    return str(LLMatcher.grammar_from_lark(grammar))


# Characters that a regular expression must escape to match literally.
_LITERAL = {ord(sign): f"\\{sign}" for sign in r"\.+*?()|[]{}^$#&-~/"}


def choice_text(choices: Sequence[str]) -> str:
    """One regex of alternatives. The lexer follows thousands of them at once, unlike the parser;
    it compiles in half the time of a grammar of strings."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex("|".join(text.translate(_LITERAL) for text in choices)))


_TRANSLATORS: dict[str, Callable[[Any], str]] = {
    "json_schema": _json_text,
    "regex": _regex_text,
    "grammar": _grammar_text,
    "choice": choice_text,
}


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
            field, "control tokens (<|...|>) inside a grammar are not offered; write text in quotes"
        )
    if "registry" in message:
        where = message.split(" is not")[0]
        message = f"$ref outside the schema is not supported, nothing is ever fetched ({where})"
    return (
        UnsupportedError(field, message)
        if _UNSUPPORTED.search(message)
        else ParameterError(field, message)
    )


_SYNTAX = (
    "the syntax is that of Rust's regex crate, and a backslash before a sign means the sign itself"
)


def _about_regex(field: str, pattern: str, at: int, why: str) -> str:
    """
    >>> _about_regex("regex", "ab(c", 2, "unclosed group").removesuffix(_SYNTAX)
    "'ab(c' is not a regular expression: unclosed group, at character 3 ('(c'); "
    """
    shown = pattern if len(pattern) <= 60 else pattern[:57] + "..."
    what = f"{shown!r} is not a regular expression" + (
        "" if field == "regex" else " (a pattern inside)"
    )
    return f"{what}: {why}, at character {at + 1} ({pattern[at : at + 12]!r}); {_SYNTAX}"


def first_line(text: str) -> str:
    if text.startswith("panic:"):  # a bug in llguidance, whose message does not help the client
        return "llguidance, which follows it, failed"
    return text.strip().splitlines()[0][:300] if text.strip() else "unknown reason"


# --- the first compile


class _Bytes:
    """A vocabulary of single bytes, the smallest with which llguidance builds its lexer."""

    is_tokenizer_wrapper = True
    bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"\xff<end>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def byte_tokenizer() -> Any:
    from llguidance import LLTokenizer

    vocabulary: Any = _Bytes()
    return LLTokenizer(vocabulary, n_vocab=257, eos_token=256, slices=[])


def parser_limits(limits: dict[str, Any]) -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**limits)


def try_compile(field: str, value: Any, tokenizer: Any, limits: Any) -> dict[str, str]:
    """{"grammar": text} if the structure compiles, else {"error": the class, "param": the field,
    "message": why}."""
    from llguidance import LLMatcher

    try:
        grammar = translate(field, value)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        found = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if found:
            raise refusal(field, "\n".join(found))
        matcher.compute_bitmask()  # the first mask is the most expensive
    except (ParameterError, UnsupportedError) as error:
        return {
            "error": type(error).__name__,
            "param": str(error.param),
            "message": str(error).removeprefix(f"{error.param}: "),
        }
    return {"grammar": grammar}
