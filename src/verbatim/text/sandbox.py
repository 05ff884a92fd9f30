"""Sandbox of chat templates. In: a template's source and plain data. Out: text, or an error, within
a time and memory budget.

A chat template is a program from a model file, so it is untrusted. Jinja's immutable sandbox blocks
Python's internals. In addition, only the methods and filters that templates need exist; every
operation that creates large values from small ones (repeat, join, pad, format) charges the budget
first; every loop iteration, call and filter checks the time. So the work is bounded for any
template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import update_wrapper
from typing import Any

from jinja2 import Template, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from verbatim.text.template_budget import (
    MAX_BITS,
    MAX_ELEMENTS,
    MAX_OUTPUT,
    MAX_SECONDS,
    Budget,
    BudgetError,
    current,
    use_budget,
)

MAX_SOURCE = 64 * 1024  # characters of template source; the longest in use have a quarter of that
MAX_PAD = 1000  # width of a padding, indentation or format field

_STR = (
    "capitalize casefold center count endswith find format format_map index isalnum isalpha "
    "isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle "
    "isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex "
    "rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper "
    "zfill"
)
METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, frozenset(_STR.split())),
    (dict, frozenset(("copy", "get", "items", "keys", "values"))),
    # grouper and list: the pairs of the groupby filter
    ((list, tuple), frozenset(("copy", "count", "index", "grouper", "list"))),
)
OWN_TYPES = (Undefined, LoopContext, Macro, Namespace, Cycler, Joiner)
FILTERS = (
    "abs attr batch capitalize center count d default dictsort e escape filesizeformat first "
    "float forceescape format groupby indent int items join last length list lower map max "
    "min pprint reject rejectattr replace reverse round safe select selectattr slice sort "
    "string sum title trim truncate unique upper wordcount"
)
# Filters that are cheap on a long string; the others create a list of its characters or words.
_CHEAP_ON_STRINGS = frozenset(
    [
        "capitalize",
        "count",
        "d",
        "default",
        "e",
        "escape",
        "first",
        "float",
        "forceescape",
        "format",
        "indent",
        "int",
        "items",
        "last",
        "length",
        "lower",
        "replace",
        "safe",
        "string",
        "trim",
        "upper",
    ]
)
# A format field wider than 999, or with a width from an argument.
_WIDE_FORMAT = re.compile(r"\*|\d{4,}|\{[^{}]*\{")
_STRFTIME = re.compile(r"(?:[^%]|%[-_0^#]?[A-Za-z%])*")


# ------------------------------------------------------------- checks before values are created


def _check_width(width: Any) -> None:
    if isinstance(width, int) and width > MAX_PAD:
        raise BudgetError(
            f"the chat template pads to {width} characters; at most {MAX_PAD} are allowed"
        )


def _check_format(pattern: Any) -> None:
    if isinstance(pattern, str) and _WIDE_FORMAT.search(pattern):
        raise BudgetError("the chat template formats with a width that no chat needs")


def _check_list_size(text: str, elements: int) -> None:
    if elements > MAX_ELEMENTS:
        raise BudgetError(
            f"the chat template makes a list out of {len(text)} characters, "
            "more than a chat can need"
        )


def _charge_join(separator: Any, items: Any) -> list[Any]:
    if isinstance(items, str):
        _check_list_size(items, len(items))
    parts = current().weigh(list(items))
    current().spend(len(parts) * len(str(separator)))
    return list(parts)


def _charge_replace(text: str, old: str, new: str, count: Any = None) -> None:
    times = text.count(old)
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    current().spend(len(text) + times * len(new))


def _check_method(owner: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Check the arguments of a string method before it runs. Returns the arguments to use."""
    if name in ("ljust", "rjust", "center", "zfill"):
        for width in args[:1]:
            _check_width(width)
    elif (
        name == "replace"
        and len(args) >= 2
        and isinstance(args[0], str)
        and isinstance(args[1], str)
    ):
        _charge_replace(owner, args[0], args[1], args[2] if len(args) > 2 else None)
    elif name == "join" and len(args) == 1:
        return (_charge_join(owner, args[0]),)
    elif name in ("split", "rsplit", "splitlines"):
        # Without a separator only the length of the text bounds the number of parts.
        by = args[0] if args and isinstance(args[0], str) and args[0] else None
        _check_list_size(owner, len(owner) // 8 if by is None else owner.count(by))
    return args


def _check_filter(name: str, value: Any, rest: list[Any]) -> Any:
    """The same for filters: `value` is filtered, `rest` are the other arguments in order."""
    if isinstance(value, str) and name not in _CHEAP_ON_STRINGS:
        _check_list_size(value, len(value))
    if name in ("indent", "batch", "slice", "round", "truncate", "center"):
        for width in rest:
            _check_width(width)
        if name == "indent":
            width = max(
                [
                    4,
                    *(
                        w if isinstance(w, int) else len(w)
                        for w in rest
                        if isinstance(w, (int, str))
                    ),
                ]
            )
            current().spend((str(value).count("\n") + 1) * width)
    elif name == "format":
        _check_format(value)
    elif name == "replace" and len(rest) >= 2:
        _charge_replace(str(value), str(rest[0]), str(rest[1]), rest[2] if len(rest) > 2 else None)
    elif name == "join":
        return _charge_join(rest[0] if rest else "", value)
    elif name == "sum" and any(isinstance(r, (list, tuple)) for r in rest):
        raise BudgetError("the chat template sums lists; join them with + instead")
    return value


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter: check its arguments before, charge its result after. update_wrapper() copies
    the attributes of Jinja's calling convention."""
    context_args = 1 if hasattr(function, "jinja_pass_arg") else 0

    def run(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.tick()
        context, values = args[:context_args], args[context_args:]
        if values:
            values = (_check_filter(name, values[0], [*values[1:], *kwargs.values()]), *values[1:])
        return budget.weigh(function(*context, *values, **kwargs))

    return update_wrapper(run, function)


def _guarded_test(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        current().tick()
        return function(*args, **kwargs)

    return update_wrapper(run, function)


# ------------------------------------------------------------------------ globals and functions


def _raise_exception(message: Any) -> Any:
    raise RaisedByTemplate(str(message))


class RaisedByTemplate(TemplateError):
    """The template's `raise_exception(...)`: it rejects the conversation."""


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face's templates expect it: no HTML escaping, Unicode unescaped."""
    current().tick()
    _check_width(len(indent) if isinstance(indent, str) else indent)
    current().weigh(value)
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    current().spend(len(text))
    return text


def _strftime_now(pattern: Any) -> str:
    if not isinstance(pattern, str) or len(pattern) > 256 or not _STRFTIME.fullmatch(pattern):
        raise SecurityError("strftime_now takes a short format of plain % fields")
    return datetime.now().strftime(pattern)


class _TemplateNamespace(Namespace):
    """`namespace(...)` without names that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(
            f"a namespace cannot hold {str(name)[:40]!r}: "
            "names with a leading underscore are refused"
        )


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks assistant text for training. Here it renders its
    body unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for token in stream:
            current().tick()
            yield token

    @pass_eval_context
    def _render_body(self, context: Any, caller: Callable[[], str]) -> str:
        return caller()


# -------------------------------------------------------------------------------- environment


class _InsertBudgetCalls(NodeTransformer):
    """Rewrites a parsed template: operations that Jinja compiles to plain Python (loop bodies, `~`,
    slices, list literals) call the budget instead."""

    @staticmethod
    def _call(name: str, *args: nodes.Expr) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("guard_tick")))
        if node.test is not None:
            node.test = nodes.And(self._call("guard_tick"), node.test)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("guard_concat", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice) and node.ctx == "load":
            parts = [
                p if p is not None else nodes.Const(None)
                for p in (node.arg.start, node.arg.stop, node.arg.step)
            ]
            return self._call("guard_slice", node.node, *parts)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if _constant(node.items) else self._call("guard_weigh", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return (
            node if node.ctx != "load" or _constant(node.items) else self._call("guard_weigh", node)
        )

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return (
            node
            if _constant([pair.value for pair in node.items])
            else self._call("guard_weigh", node)
        )

    def _reject(self, node: nodes.Node) -> nodes.Node:
        raise SecurityError("a chat template cannot load other templates")

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _reject


def _constant(items: list[Any]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)


class _TimedGenerator(CodeGenerator):
    """Jinja's compiler under the time budget."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        current().tick()
        return super().visit(node, *args, **kwargs)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it (trim_blocks, lstrip_blocks, loop controls), sandboxed and
    under the budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _TimedGenerator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.finalize = self.guard_output
        self.filters = {name: _guarded_filter(name, self.filters[name]) for name in FILTERS.split()}
        self.filters["tojson"] = _tojson
        self.tests = {
            name: _guarded_test(test) for name, test in dict[str, Any](self.tests).items()
        }
        self.globals = {
            "range": self.globals["range"],
            "namespace": _TemplateNamespace,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        for kind, allowed in METHODS:
            if isinstance(obj, kind):
                return attr in allowed
        return isinstance(obj, OWN_TYPES)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raise. Jinja's default is an undefined value, which prints as nothing and hides an
        attack."""
        raise SecurityError(
            f"access to attribute {str(attribute)[:40]!r} of a {type(obj).__name__} is refused"
        )

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = _check_method(owner, getattr(__obj, "__name__", ""), args)
        return budget.weigh(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = current()
        budget.tick()
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%":
            _check_format(left)
        elif isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            budget.spend(len(left) + len(right))
        return budget.weigh(super().call_binop(context, operator, left, right))

    # Called by rewritten templates (_InsertBudgetCalls), and by Jinja for every value it prints.

    def guard_tick(self) -> bool:
        current().tick()
        return True

    def guard_weigh(self, value: Any) -> Any:
        return current().weigh(value)

    def guard_concat(self, *parts: Any) -> str:
        return "".join([str(self.guard_output(part)) for part in parts])

    def guard_slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return current().weigh(value[start:stop:step])

    def guard_output(self, value: Any) -> Any:
        """Only plain data is printed: repr() of other objects has memory addresses, or no bound."""
        if isinstance(value, (str, int, float, list, tuple, dict, Undefined, type(None))):
            current().tick()
            return current().weigh(value)
        raise SecurityError(f"a {type(value).__name__} cannot be written as text")

    def concat(self, parts: Any) -> str:
        pieces = list(parts)
        current().spend(sum(map(len, pieces)))
        return "".join(pieces)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and not isinstance(right, int):
        left, right = right, left
    if isinstance(right, int):
        if isinstance(left, (str, list, tuple)):
            current().spend(len(left) * max(right, 0))
        elif isinstance(left, int) and left.bit_length() + right.bit_length() > MAX_BITS:
            raise BudgetError("the chat template computes with an absurdly large number")


def _check_power(left: Any, right: Any) -> None:
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() * max(right, 1) > MAX_BITS
    ):
        raise BudgetError("the chat template computes with an absurdly large number")


_environment: list[ChatEnvironment] = []


def chat_environment() -> ChatEnvironment:
    """The environment of all templates, created on first use."""
    if not _environment:
        _environment.append(ChatEnvironment())
    return _environment[0]


def compile_template(source: str) -> Template:
    """Parse, rewrite and compile. Raises Jinja's errors and BudgetError."""
    if len(source) > MAX_SOURCE:
        raise BudgetError(
            f"the chat template is {len(source)} characters long; at most {MAX_SOURCE} are read"
        )
    environment = chat_environment()
    with use_budget(Budget()):
        tree = _InsertBudgetCalls().visit(environment.parse(source))
        current().tick(64)
        code = environment.compile(tree)
        return Template.from_code(environment, code, environment.make_globals(None))


def render_template(
    template: Template, variables: Mapping[str, Any], seconds: float = MAX_SECONDS
) -> str:
    """Render. The size of the output is checked while it grows."""
    with use_budget(Budget(variables.values(), seconds)) as budget:
        pieces: list[str] = []
        size = 0
        for piece in template.generate(**variables):
            budget.tick()
            pieces.append(piece)
            size += len(piece)
            if size > MAX_OUTPUT:
                raise BudgetError(f"the chat template writes more than {MAX_OUTPUT} characters")
        return "".join(pieces)
