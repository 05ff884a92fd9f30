"""Conversation: the messages, parameters and last answer of one chat. No input and no output:
chat.py reads lines and shows answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from verbatim.base.errors import ContextError, ParameterError, UnsupportedError
from verbatim.base.json_io import JsonObject
from verbatim.base.params import FIELDS, SamplingParams
from verbatim.base.records import Completion
from verbatim.cli.lib.answer import collect

if TYPE_CHECKING:
    from verbatim.cli.lib.reasoning_options import ReasoningLevel
    from verbatim.cli.lib.terminal import ReasoningView
    from verbatim.engine.calls.llm import LLM

Message = dict[str, str]
# Parameters for several answers, and for reports that a chat does not show.
UNSUPPORTED = (
    *("n", "best_of", "num_return_sequences", "logprobs", "prompt_logprobs"),
    *("explain", "receipt"),
)
ROOM = 256  # tokens of answer for which drop_oldest makes room, without max_tokens


class ChatFileError(ParameterError):
    """A conversation cannot be written or read."""

    def __init__(self, message: str) -> None:
        super().__init__("file", message)
        self.message = message


def check_supported(params: SamplingParams) -> None:
    for name in UNSUPPORTED:
        if getattr(params, name) != FIELDS[name].default:
            raise UnsupportedError(name, "chat does not support it; use `verbatim run`")


class Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.level: ReasoningLevel | None = None
        self.template: dict[str, object] = {}  # variables of the chat template
        self.params = params
        self.system = system
        self.turns: list[Message] = []  # user and assistant alternate
        # Messages, parameters and completion of the last turn, and its template variables.
        self.last_template: JsonObject = {}
        self.last: tuple[list[Message], SamplingParams, Completion] | None = None

    def set_reasoning(self, level: ReasoningLevel | None) -> None:
        """Switch reasoning for the next turns; raises where the template has no such switch."""
        self.template = {} if level is None else level.variables(self.llm)
        self.level = level

    @property
    def head(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    @property
    def messages(self) -> list[Message]:
        return self.head + self.turns

    def ask(
        self,
        text: str,
        show: Callable[[str], None],
        params: SamplingParams | None = None,
        reasoning: ReasoningView | None = None,
    ) -> tuple[int, Completion]:
        """Send a user message. Returns the exit code (130: interrupted) and the completion. A
        cancelled answer stays in the history up to where the user saw it; reasoning does not."""
        params = params or self.params
        messages = [*self.messages, {"role": "user", "content": text}]
        code, completion = collect(
            self.llm.chat_stream(messages, params, **self.template), show=show, reasoning=reasoning
        )
        self.turns += [messages[-1], {"role": "assistant", "content": completion.text}]
        self.last, self.last_template = (messages, params, completion), self.template
        return code, completion

    def undo(self) -> str | None:
        """Forget the last turn. Returns its user message; None if there is none."""
        if not self.turns:
            return None
        asked = self.turns[-2]["content"]
        del self.turns[-2:]
        self.last = None
        return asked

    def clear(self) -> None:
        self.turns.clear()
        self.last = None

    def drop_oldest(self, text: str) -> int:
        """Forget as many of the oldest turns as `text` needs to fit with room for an answer.
        Returns their number; raises ContextError if the message alone does not fit."""
        room = min(self.params.max_tokens or ROOM, self.llm.context // 4)
        message = {"role": "user", "content": text}
        for dropped in range(len(self.turns) // 2 + 1):
            rest = [*self.head, *self.turns[2 * dropped :], message]
            size = len(self.llm.encode_chat(rest, **self.template))
            if size + room <= self.llm.context:
                del self.turns[: 2 * dropped]
                return dropped
        why = f"this message alone has {size} tokens, and the context holds {self.llm.context}"
        raise ContextError(f"{why}; shorten it", param="prompt")

    def explained(self, top: int) -> tuple[int, Completion]:
        """The last turn again, with explanations. The same request gives the same tokens, so no
        explanation needs to be recorded in advance."""
        assert self.last is not None, "there is an answer to explain"
        messages, params, before = self.last
        again = params.with_(explain=top, seed=None if params.num_beams > 1 else before.seed)
        if before.finish_reason == "cancel" and before.token_ids:
            again = again.with_(max_tokens=len(before.token_ids))  # the tokens before Ctrl-C
        stream = self.llm.chat_stream(messages, again, **self.last_template)
        code, completion = collect(stream, show=None)
        assert code or completion.token_ids == before.token_ids, (
            "the same request gave other tokens"
        )
        return code, completion

    # ------------------------------------------------------------------------------------ files

    def save(self, file: str) -> None:
        record = {"model": self.llm.loaded.name, "fingerprint": self.llm.fingerprint}
        record |= {"params": self.params.to_mapping(), "messages": self.messages}
        text = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
        try:
            Path(file).expanduser().write_text(text, "utf-8")
        # RuntimeError: ~ of an unknown user; ValueError: a name that no file can have.
        except (OSError, RuntimeError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ChatFileError(f"cannot write {file!r}: {why}") from None

    def load(self, file: str) -> None:
        """Continue a conversation from a file of save(), or from a JSON list of messages."""
        try:
            data = json.loads(Path(file).expanduser().read_text("utf-8-sig"))
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ChatFileError(f"cannot read {file!r}: {why}") from None
        except (ValueError, RecursionError):
            raise ChatFileError(f"cannot read {file!r}: it is not JSON") from None
        messages = data.get("messages") if isinstance(data, dict) else data
        self.system, self.turns = _checked(messages, file)
        self.last = None


def _checked(messages: object, file: str) -> tuple[str | None, list[Message]]:
    """(system message, turns) of a loaded conversation: user and assistant alternate."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages
    ):
        raise ChatFileError(f"{file!r} holds no list of messages with role and content")
    rows = [{"role": str(m.get("role")), "content": m["content"]} for m in messages]
    system = rows.pop(0)["content"] if rows and rows[0]["role"] == "system" else None
    if [row["role"] for row in rows] != ["user", "assistant"] * (len(rows) // 2):
        why = "user and assistant messages must alternate and end with an answer"
        raise ChatFileError(f"{file!r} is not a conversation: {why}")
    return system, rows
