"""ChatRequest: chat fields become one message to the engine process.

In: a checked request in the fields of OpenAI's chat completions. Out: a Generate message, and the
parser of its output. The Responses, Anthropic and Ollama routes share it: they translate their
fields into chat fields first, and format the output themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verbatim.base.errors import RequestError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.base.params import STRUCTURE
from verbatim.server.api.common import to_params
from verbatim.server.api.common.field_rules import NO_LIMIT, Rule
from verbatim.server.api.common.reasoning_variables import reasoning_variables
from verbatim.server.api.common.request_context import RequestContext
from verbatim.server.problem import Problem, check_limit, invalid, problem_of, unsupported
from verbatim.server.process.messages import Generate, Tokenize, Tokenized
from verbatim.text.tools.tool_grammar import compiled_tools
from verbatim.text.tools.tool_messages import template_messages
from verbatim.text.tools.tool_parser import ParsedCall, ToolParser
from verbatim.text.tools.tool_use import tool_use

# Template variables that encode_chat sets itself; chat_template_kwargs must not override them.
RESERVED = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final"),
    *("template_name", "bos_token", "eos_token", "tokenizer", "template", "warnings"),
)
NO_TEMPLATE = {  # task of ModelFacts -> why there is no chat, and what to use
    "generate": "this model has no chat template; use /v1/completions",
    "embed": "this model is an encoder and generates no text; use /v1/embeddings",
    "rerank": "this model is an encoder and generates no text; use /v1/rerank",
}


class ChatRequest:
    """A chat request after validation: what the engine gets, and how to parse its output.

    `names` maps the engine's parameter names to the client's field names, for error messages."""

    def __init__(
        self,
        call: RequestContext,
        body: JsonMapping,
        table: Mapping[str, Rule],
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.call = call
        self.body = body
        self.names = {**(names or {}), **call.aliases}
        self.tools: list[JsonMapping] = list(body.get("tools") or [])
        self.choice = body.get("tool_choice", "auto")
        self.single = body.get("parallel_tool_calls") is False
        # The model continues the last message. Only protocols with this feature set it.
        self.continues = bool(body.get("continue_final"))
        self.values = to_params.sampling_values(body, table)
        self._length()
        self._logprobs()
        self._structure()
        self._tools()
        self._check_continued()
        self.messages, self.template = conversation(call, body, self.tools, self.names)
        state = call.state
        self.params = to_params.finish_params(self.values, state, names=self.names)
        self.rows = to_params.wants_logit_rows(body, self.params)
        if self.rows:
            call.admission.enter_context(state.admission.admit_rows())

    def _client_name(self, name: str) -> str:
        return self.names.get(name, name)

    def _length(self) -> None:
        old, new = self.body.get("max_tokens"), self.body.get("max_completion_tokens")
        if old is not None and new is not None and old != new:
            raise invalid("max_tokens", "differs from max_completion_tokens; send one of them")
        if new is not None:
            self.names = {"max_tokens": "max_completion_tokens", **self.names}
        length = new if new is not None else old
        if length is not None and length != NO_LIMIT:
            self.values["max_tokens"] = length

    def _logprobs(self) -> None:
        top = self.body.get("top_logprobs")
        if top and not self.body.get("logprobs"):
            raise invalid(self._client_name("top_logprobs"), "needs logprobs: true")
        if self.body.get("logprobs"):
            self.values["logprobs"] = top or 0
            self.names = {"logprobs": "top_logprobs", **self.names}

    def _structure(self) -> None:
        form = self.body.get("response_format") or {"type": "text"}
        if form["type"] == "text":
            return
        self._check_single_grammar("response_format")
        default: Any = {"type": "object"}
        schema = form.get("schema")  # llama.cpp's json_object has one
        if form["type"] == "json_schema":
            default, schema = True, form["json_schema"].get("schema")
        self.values["json_schema"] = default if schema is None else schema
        self.names = {"json_schema": "response_format", **self.names}

    def _check_single_grammar(self, name: str) -> None:
        field_name = self._client_name(name)
        for other in STRUCTURE:
            if other in self.values:
                raise invalid(field_name, f"cannot be combined with {self._client_name(other)}")

    def _tools(self) -> None:
        check_tools(self.call, self.tools)
        form = self.call.state.facts.tool_format
        try:
            self.use = tool_use(self.tools, self.choice, form, single=self.single)
            changes = self.use.changes(self.values)
        except RequestError as error:
            raise self._tool_problem(error) from None
        self.tools = list(self.use.tools)
        if "grammar" in changes:
            self.names["grammar"] = "tools"
            if self.values.pop("json_schema", None) is not None:
                self.names["text"] = self._client_name("response_format")
        if "grammar" in changes or self.use.forced:
            self._name_tools(self.use.named)
        self.values.update({name: v for name, v in changes.items() if v is not None})

    def _tool_problem(self, error: RequestError) -> Problem:
        """An error about tools in the client's names."""
        names = {**self.names, "json_schema": self._client_name("response_format")}
        for name in STRUCTURE:
            error.message = error.message.replace(f" with {name}", f" with {names.get(name, name)}")
        return to_params.with_client_names(problem_of(error), names)

    def _name_tools(self, wanted: str | None) -> None:
        """Errors about the schema are about the parameters of one of these tools."""
        self.names["json_schema"] = "tools"
        placed = [{**tool, "place": place} for place, tool in enumerate(self.tools)]
        self.call.tools = compiled_tools(placed, wanted)

    def _check_continued(self) -> None:
        if self.continues and any(name in self.values for name in STRUCTURE):
            field_name = self._client_name("messages")
            why = "structured output and tool_choice are not supported when the last message is"
            raise invalid(field_name, f"{why} continued")

    def submit(self, stream: bool, num_ctx: int | None = None, open_end: bool = False) -> None:
        message = Generate(self.call.next_id(), self.call.tenant, self.params, stream)
        message = replace(message, messages=self.messages, template=self.template)
        rows = self.rows
        self.call.submit(replace(message, num_ctx=num_ctx, open_end=open_end, explain_rows=rows))

    def parser(self) -> ToolParser | None:
        """A tool-call parser for one choice; None if the request has no tools."""
        return self.use.parser(midway=self.continues)

    def pieces(self, text: str) -> list[tuple[str, Any]]:
        """The texts and tool calls of a complete output, in its order."""
        parser = self.parser()
        if parser is None:
            return [("text", text)] if text else []
        return [*parser.push(text), *parser.finish()]

    def read(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Split a complete output into text and tool calls."""
        found = self.pieces(text)
        texts = [piece for kind, piece in found if kind == "text"]
        return "".join(texts), [call for kind, call in found if kind == "call"]


def check_tools(call: RequestContext, tools: Sequence[JsonMapping]) -> None:
    check_limit("tools", len(tools), call.state.limits.max_tools, "tools are")
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise invalid("tools", "two tools have the same name")


def conversation(
    call: RequestContext, body: JsonMapping, tools: Sequence[JsonMapping], names: Mapping[str, str]
) -> tuple[list[JsonObject], JsonObject]:
    """Messages and options for the chat template, after checking the server's limits.

    Also sets the client's field names on the request context, so that later errors of the engine
    name the right field."""
    messages, facts = body["messages"], call.state.facts
    field_name = names.get("messages", "messages")
    check_limit(field_name, len(messages), call.state.limits.max_messages, "messages are")
    if not facts.has_template:
        raise unsupported(field_name, f"{NO_TEMPLATE[facts.task]}")
    takes = {"takes_tools": facts.template_tools, "takes_calls": facts.template_calls}
    made = template_messages(messages, tools, **takes)
    for message in made:
        to_params.check_text_length(field_name, message["content"] or "", facts)
    check_reserved(body)
    template = reasoning_variables(facts, body, names, call.notices)
    if tools and facts.template_tools:
        template["tools"] = tools
    if body.get("continue_final"):
        template["continue_final"] = True
    elif body.get("add_generation_prompt") is False:
        template["add_generation_prompt"] = False
    # The engine's prompt is made from the messages, so errors about it name that field.
    call.names = {"prompt": field_name, **names}
    call.shift = len(made) - len(messages)
    return made, template


async def count_tokens(call: RequestContext, body: JsonMapping, names: Mapping[str, str]) -> int:
    """Number of prompt tokens of a request in chat fields."""
    tools = [] if body.get("tool_choice") == "none" else body.get("tools", [])
    check_tools(call, tools)
    messages, template = conversation(call, body, tools, names)
    call.submit(Tokenize(call.next_id(), call.tenant, messages=messages, template=template))
    (done,) = await call.results(Tokenized)
    return len(done.token_ids)


def continued(body: JsonObject) -> JsonObject:
    """The body with `continue_final` set if the model continues the last message.

    A last message of the assistant is continued, unless the request asks for a new turn."""
    last = body["messages"][-1]
    wanted, new_turn = body.get("continue_final_message"), body.get("add_generation_prompt")
    if wanted and new_turn:
        why = "cannot be combined with add_generation_prompt: true"
        raise invalid("continue_final_message", why)
    if wanted and last["role"] != "assistant":
        raise invalid("continue_final_message", "the last message is not one of the assistant")
    if wanted is None and new_turn is None:
        wanted = last["role"] == "assistant" and not last.get("tool_calls")
    return {**body, "continue_final": bool(wanted)}


def check_reserved(body: JsonMapping) -> None:
    """Reject template variables that the server sets. The engine process rejects those that the
    template does not read."""
    for name in RESERVED:
        if name in (body.get("chat_template_kwargs") or ()):
            why = f"chat_template_kwargs.{name}: is set by the server"
            raise Problem("invalid_parameter", why, "chat_template_kwargs")
