"""The /commands of `verbatim chat`. A line and the chat come in; the conversation changes, and a
notice goes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Protocol

from verbatim.base.errors import UnsupportedError, VerbatimError
from verbatim.cli.lib.chat.chat_session import check_supported
from verbatim.cli.lib.open_model import speed_limit
from verbatim.cli.lib.options import Values
from verbatim.cli.lib.reasoning_options import LEVELS, ReasoningLevel
from verbatim.cli.lib.report import closing_line, params_line
from verbatim.cli.lib.sampling_options import parse_parameter
from verbatim.cli.lib.terminal import DIM, GREEN, RED, columns, note, use_colour, write

if TYPE_CHECKING:
    from verbatim.base.params import SamplingParams
    from verbatim.cli.lib.chat.chat_session import Conversation
    from verbatim.engine.calls.llm import LLM


class Chat(Protocol):
    """What a command needs of chat.py's ChatLoop."""

    talk: Conversation
    reopen: Callable[[str], LLM]

    def turn(self, text: str, params: SamplingParams | None = None) -> None: ...


NO_ANSWER = "there is no answer yet"
EXPLAINED = 5  # candidates of /explain N
LEAST_CERTAIN = 10  # tokens of /explain
SYNONYMS = {
    "reset": "clear",
    "exit": "quit",
    "bye": "quit",
    "?": "help",
    "set": "params",
    "show": "model",  # Ollama's /show info
}


def run_command(chat: Chat, line: str) -> bool:
    """Run a /command. Returns True to leave the chat."""
    name, _, rest = line[1:].strip().partition(" ")
    name = SYNONYMS.get(name, name)
    if name == "params" and rest.split()[:1] in (["think"], ["nothink"]):  # Ollama's /set think
        name, _, rest = rest.strip().partition(" ")
    if name == "quit":
        return True
    if name in COMMANDS:
        run, argument, _ = COMMANDS[name]
        if argument == "FILE" and not rest.strip():
            _refuse(f"/{name} needs a file name")
        else:
            run(chat, rest.strip())
        return False
    matches = get_close_matches(name, COMMANDS, 1)
    hint = f"did you mean /{matches[0]}?" if matches else "/help lists them"
    _refuse(f"no command /{name}; {hint} (put a space first to send a line that starts with /)")
    return False


def _refuse(message: str) -> None:
    note(f"verbatim: {message}", RED)


def _turns(count: int) -> str:
    return f"{count} turn{'s' if count != 1 else ''}"


def _help(chat: Chat, rest: str) -> None:
    for name, (_, argument, text) in COMMANDS.items():
        note(f"{f'/{name} {argument}'.rstrip():22}{text}")
    note(
        "Ctrl-C stops the answer, not the program. A line that ends in \\ continues on the next;"
        ' typed, """ opens and closes a message of several lines.'
    )


def _clear(chat: Chat, rest: str) -> None:
    chat.talk.clear()
    note("the conversation is cleared")


def _system(chat: Chat, rest: str) -> None:
    if not rest:
        none = "no system message is set; the chat template may add its own"
        note(none if chat.talk.system is None else f"system message: {chat.talk.system}")
        return
    chat.talk.system = rest
    chat.talk.clear()
    note("system message set; the conversation is cleared")


def _params(chat: Chat, rest: str) -> None:
    changes: Values = {}
    words = rest.split()
    if len(words) == 2 and "=" not in rest:  # Ollama's /set parameter value
        words = ["=".join(words)]
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            _refuse(f"{word!r} is not NAME=VALUE, such as temperature=0.7")
            return
        changes[name.replace("-", "_")] = parse_parameter(name, value)
    if changes.get("num_beams", 1) > 1:  # a beam search has neither a seed nor a loop stop
        changes = {"on_loop": "report", "seed": None, **changes}
    changed = chat.talk.params.with_(**changes)
    check_supported(changed)
    chat.talk.params = changed
    shown = changed.to_mapping() or {"temperature": changed.temperature}
    note(" ".join(f"{name}={value}" for name, value in shown.items()), GREEN if changes else DIM)


def _reason(chat: Chat, rest: str) -> None:
    level = {"on": "true", "off": "false"}.get(rest, rest) or "true"
    if level not in LEVELS:
        _refuse(f"{rest!r} is not one of {', '.join(LEVELS)}")
        return
    chat.talk.set_reasoning(ReasoningLevel(level))
    note(f"think={level}", GREEN)


def _no_reasoning(chat: Chat, rest: str) -> None:
    _reason(chat, "false")


def _retry(chat: Chat, rest: str) -> None:
    if chat.talk.last is None:
        note(NO_ANSWER)
        return
    _, params, before = chat.talk.last
    used = before.params or params
    if used.greedy or used.num_beams > 1:
        note("the answer would be the same: it was not sampled; try /params temperature=0.7")
        return
    asked = chat.talk.undo()
    assert asked is not None, "the last answer belongs to a turn"
    seed = (before.seed + 1) % 2**63
    note(f"again, with seed {seed}")
    chat.turn(asked, chat.talk.params.with_(seed=seed))


def _undo(chat: Chat, rest: str) -> None:
    asked = chat.talk.undo()
    if asked is None:
        note("there is nothing to undo")
        return
    line = " ".join(asked.split())
    note(f"forgot: {line if len(line) <= 60 else line[:57] + '…'}")


def _drop(chat: Chat, rest: str) -> None:
    if rest and not (rest.isdecimal() and int(rest) > 0):
        _refuse(f"{rest!r} is not a number of turns")
        return
    there = len(chat.talk.turns) // 2
    count = min(int(rest or 1), there)
    del chat.talk.turns[: 2 * count]
    note(f"forgot the oldest {_turns(count)}; {there - count} left")


def _explain(chat: Chat, rest: str) -> None:
    from verbatim.explain.explanation import headline, render

    if chat.talk.last is None:
        note(NO_ANSWER)
        return
    tokens = len(chat.talk.last[2].token_ids)
    every = rest == "all"
    rest = "" if every else rest
    if rest and not (rest.isdecimal() and 1 <= int(rest) <= tokens):
        _refuse(f"{rest!r} is not a token of the answer, which has {tokens}; 1 is the first")
        return
    _, completion = chat.talk.explained(EXPLAINED if rest else 1)
    show = chat.talk.llm.tokenizer.token_bytes
    records = completion.choices[0].explain
    screen = columns() if use_colour(sys.stdout) else 0
    if rest:
        write(render(records[int(rest) - 1], show, screen=screen) + "\n")
        return
    rows = list(enumerate(records, 1))
    if not every:
        rows = sorted(rows, key=lambda row: row[1]["logprob"])[:LEAST_CERTAIN]
    for number, record in rows:
        write(f"{number:4}  {headline(record, show, screen=max(screen - 6, 0))}\n")
    if len(rows) < tokens:
        shown = f"the {len(rows)} least certain of {tokens} tokens"
        note(f"{shown}; /explain all, or the number of one")


def _stats(chat: Chat, rest: str) -> None:
    if chat.talk.last is None:
        note(NO_ANSWER)
        return
    llm, completion = chat.talk.llm, chat.talk.last[2]
    note(closing_line(llm, completion, limit=speed_limit(llm, completion)))
    note(params_line(completion))
    note(f"{completion.usage.total_tokens} of {llm.context} tokens of the context are in use")


def _model(chat: Chat, rest: str) -> None:
    talk = chat.talk
    rest = "" if rest == "info" else rest
    before = talk.llm.loaded.name
    if rest:
        talk.llm.close()  # two models may not fit in memory
        try:
            talk.llm = chat.reopen(rest)
            talk.last = None
            _keep_reasoning_level(talk)
        except VerbatimError as error:
            _refuse(error.message)
            talk.llm = chat.reopen(before)
    stays = "; the conversation stays" if rest and talk.turns else ""
    note(f"{talk.llm.loaded.name}, context {talk.llm.context} tokens{stays}")


def _keep_reasoning_level(talk: Conversation) -> None:
    """Apply /think to another model, or say that it has no such switch."""
    try:
        talk.set_reasoning(talk.level)
    except UnsupportedError as error:
        talk.set_reasoning(None)
        note(f"{error.message}; reasoning is as the model's default again")


def _save(chat: Chat, rest: str) -> None:
    chat.talk.save(rest)
    note(f"saved {_turns(len(chat.talk.turns) // 2)} to {rest}")


def _load(chat: Chat, rest: str) -> None:
    chat.talk.load(rest)
    note(f"loaded {_turns(len(chat.talk.turns) // 2)} from {rest}")


def _quit(chat: Chat, rest: str) -> None:
    raise AssertionError("run_command ends the chat")


# name -> (function, argument, help), in the order of /help
COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str, str]] = {
    "help": (_help, "", "this list"),
    "clear": (_clear, "", "forget the conversation (the system message stays)"),
    "system": (_system, "[TEXT]", "set the system message and clear the chat; alone: show it"),
    "params": (_params, "[NAME=VALUE]", "change a parameter; without one show those that are set"),
    "think": (_reason, "[LEVEL]", "let the model think; LEVEL: true, false, low, medium, high …"),
    "nothink": (_no_reasoning, "", "answer without reasoning"),
    "retry": (_retry, "", "answer the last message again, with the next seed"),
    "undo": (_undo, "", "forget the last message and its answer"),
    "drop": (_drop, "[N]", "forget the N oldest messages and their answers [1]"),
    "explain": (_explain, "[N]", "the least certain tokens of the last answer; N: one token; all"),
    "stats": (_stats, "", "the last answer in numbers: tokens, speed, parameters in force"),
    "model": (_model, "[NAME]", "continue with another model; without NAME show it"),
    "save": (_save, "FILE", "write the conversation as JSON"),
    "load": (_load, "FILE", "continue a saved conversation"),
    "quit": (_quit, "", "leave (also Ctrl-D)"),
}
