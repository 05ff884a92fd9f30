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
from jinja2.visitor import NodeTransformer, NodeVisitor

from verbatim.text.templates.template_budget import (
    MAX_OUTPUT,
    MAX_SECONDS,
    Budget,
    BudgetError,
    current,
    use_budget,
)
from verbatim.text.templates.template_guards import (
    check_format,
    check_method,
    check_power,
    check_product,
    check_width,
    guarded_filter,
    guarded_test,
)

MAX_SOURCE = 64 * 1024  # characters of template source; the longest in use have a quarter of that

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
JINJA_FILTERS = (
    "abs attr batch capitalize center count d default dictsort e escape filesizeformat first "
    "float forceescape format groupby indent int items join last length list lower map max "
    "min pprint reject rejectattr replace reverse round safe select selectattr slice sort "
    "string sum title trim truncate unique upper wordcount"
)
_STRFTIME = re.compile(r"(?:[^%]|%[-_0^#]?[A-Za-z%])*")


# ------------------------------------------------------------------------ globals and functions


def _raise_exception(message: object) -> object:
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
    check_width(len(indent) if isinstance(indent, str) else indent)
    current().weigh(value)
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    current().spend(len(text))
    return text


def _strftime_now(pattern: object) -> str:
    if not isinstance(pattern, str) or len(pattern) > 256 or not _STRFTIME.fullmatch(pattern):
        raise SecurityError("strftime_now takes a short format of plain % fields")
    return datetime.now().strftime(pattern)


class _TemplateNamespace(Namespace):
    """`namespace(...)` without names that start with an underscore."""

    def __init__(*args: object, **kwargs: Any) -> None:
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
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
    def _render_body(self, context: object, caller: Callable[[], str]) -> str:
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

    def _literal(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        items = [item.value if isinstance(item, nodes.Pair) else item for item in node.items]
        stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
        constant = all(isinstance(item, nodes.Const) for item in items)
        return node if stored or constant else self._call("guard_weigh", node)

    visit_List = visit_Tuple = visit_Dict = _literal

    def _reject(self, node: nodes.Node) -> nodes.Node:
        raise SecurityError("a chat template cannot load other templates")

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _reject


class Timed(NodeVisitor):
    """Visits a syntax tree under the time budget."""

    def visit(self, node: nodes.Node, *args: object, **kwargs: Any) -> object:
        current().tick()
        return super().visit(node, *args, **kwargs)


class _TimedGenerator(Timed, CodeGenerator):
    """Jinja's compiler under the time budget."""


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
        self.filters = {
            name: guarded_filter(name, self.filters[name]) for name in JINJA_FILTERS.split()
        }
        self.filters["tojson"] = _tojson
        self.tests = {name: guarded_test(test) for name, test in dict[str, Any](self.tests).items()}
        self.globals = {
            "range": self.globals["range"],
            "namespace": _TemplateNamespace,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        for kind, allowed in METHODS:
            if isinstance(obj, kind):
                return attr in allowed
        return isinstance(obj, OWN_TYPES)

    def unsafe_undefined(self, obj: object, attribute: str) -> Undefined:
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
            args = check_method(owner, getattr(__obj, "__name__", ""), args)
        return budget.weigh(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = current()
        budget.tick()
        if operator == "*":
            check_product(left, right)
        elif operator == "**":
            check_power(left, right)
        elif operator == "%":
            check_format(left)
        elif isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            budget.spend(len(left) + len(right))
        return budget.weigh(super().call_binop(context, operator, left, right))

    # Called by rewritten templates (_InsertBudgetCalls), and by Jinja for every value it prints.

    def guard_tick(self) -> bool:
        current().tick()
        return True

    def guard_weigh(self, value: object) -> object:
        return current().weigh(value)

    def guard_concat(self, *parts: object) -> str:
        return "".join([str(self.guard_output(part)) for part in parts])

    def guard_slice(self, value: Any, start: Any, stop: object, step: object) -> Any:
        return current().weigh(value[start:stop:step])

    def guard_output(self, value: object) -> object:
        """Only plain data is printed: repr() of other objects has memory addresses, or no bound."""
        if isinstance(value, (str, int, float, list, tuple, dict, Undefined, type(None))):
            current().tick()
            return current().weigh(value)
        raise SecurityError(f"a {type(value).__name__} cannot be written as text")

    def concat(self, parts: Any) -> str:
        pieces = list(parts)
        current().spend(sum(map(len, pieces)))
        return "".join(pieces)


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
    template: Template, variables: Mapping[str, object], seconds: float = MAX_SECONDS
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
