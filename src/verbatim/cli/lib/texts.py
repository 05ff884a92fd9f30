"""The texts and files of a command: prompts, lines, and the check of an output file before any work
is done. Arguments, files or stdin come in; a text goes out."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from pathlib import Path

import click

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.base.params import STRUCTURE, SamplingParams
from verbatim.cli.lib.options import Values, model_source
from verbatim.cli.lib.terminal import warn

MAX_CHECKED = 20_000  # characters of a grammar; a larger one may take seconds to compile
MAX_RECEIPT = 16_000_000  # bytes; a prompt of a million tokens fits


def split_model(args: tuple[str, ...], flags: Values) -> tuple[str, ...]:
    """`verbatim run MODEL PROMPT`, as Ollama's users type it: the first argument is the model if it
    is the name of one and -m is not given. The rest is returned."""
    if model_source() == "COMMANDLINE":
        return args
    if not 1 <= len(args) <= 2 or not _is_model_name(args[0], sized=len(args) == 1):
        return args
    if len(args) == 1 and sys.stdin.isatty():
        why = f"{args[0]!r} is a model, and there is no prompt"
        raise ParameterError("prompt", f"{why}; to chat with it: verbatim chat {args[0]}")
    flags["model"] = args[0]
    return args[1:]


def read_prompt(args: tuple[str, ...], param: str = "prompt", file: str | None = None) -> str:
    """The prompt: the only argument of the command, the content of `file`, or stdin if the argument
    is `-` or missing with a pipe.

    Several arguments are an error and are not joined: one of them may be a model name or a separate
    prompt."""
    if file is not None:
        if args:
            why = f"--file {file} and an argument contradict each other; give one"
            raise ParameterError(param, why)
        return read_text(file, param)
    if len(args) > 1:
        raise ParameterError(param, _too_many_arguments(args, param))
    if args and args != ("-",):
        if not args[0]:
            why = f'is empty; type the {param} in quotes, or "-" to read stdin'
            raise ParameterError(param, why)
        if names_file(args[0]):
            warn(_file_hint(args[0], param))
        if stdin_has_text():
            why = f"because the {param} is an argument"
            warn(f'the pipe into stdin is not read, {why}; to use both: "… $(cat)"')
        return decode_argument(args[0], param)
    if not args and sys.stdin.isatty():
        raise ParameterError(param, 'is missing; type it in quotes, or "-" to read stdin')
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"stdin is not UTF-8 text (byte {error.start}); convert it first"
        raise ParameterError(param, why) from None
    text = text.removesuffix("\n")  # as $(...) does: the shell's final newline is not the prompt's
    if not text:
        why = f"stdin was empty; type the {param} in quotes, or send it through a pipe"
        raise ParameterError(param, why)
    return text


def read_lines(args: tuple[str, ...], file: str | None, param: str) -> list[str]:
    """The texts: the arguments, the lines of `file`, or the lines of stdin."""
    if file is None and args and args != ("-",):
        return [decode_argument(text, param) for text in args]
    # not splitlines(), which ends a line at U+2028, U+0085 and form feeds too
    text = read_prompt(args, param, file).replace("\r\n", "\n")
    if lines := [line for line in text.split("\n") if line.strip()]:
        return lines
    raise ParameterError(param, "no line has text; give one text per line")


def stdin_has_text() -> bool:
    """Whether stdin is a pipe that holds bytes. They are not read: in a shell's `while read` loop
    they are the lines of the loop."""
    try:
        if not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
            return False
        import fcntl
        import termios

        waiting = fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, b"\0" * 4)
        return int.from_bytes(waiting, sys.byteorder) > 0
    except (OSError, ValueError, ImportError):  # no file behind it (tests), or not Unix
        return False


def names_file(text: str) -> bool:
    """Whether a text on the command line is also the name of an existing file."""
    try:
        return len(text) < 1000 and os.path.isfile(text)
    except ValueError:  # a null byte
        return False


def _file_hint(file: str, param: str) -> str:
    if _is_receipt(file):
        return (
            f"the {param} is the name of a receipt; verbatim replay {file} repeats its answer, and "
            "verbatim explain with the same prompt, seed and flags explains it"
        )
    return f"the {param} is the name of a file; --file {file} reads the file"


def _is_receipt(file: str) -> bool:
    from verbatim.explain.receipt import read_receipt

    try:
        if os.path.getsize(file) > MAX_RECEIPT:
            return False
        with open(file, encoding="utf-8") as handle:
            read_receipt(json.load(handle))
    except (OSError, ValueError, RecursionError, ParameterError):
        return False
    return True


def file_text(file: str, param: str, encoding: str = "utf-8", newline: str | None = None) -> str:
    """The content of a text file; newline="" keeps its line endings."""
    try:
        with open(file, encoding=encoding, newline=newline) as handle:
            return handle.read()
    except OSError as error:
        raise ParameterError(param, f"cannot read {file!r}: {error.strerror}") from None
    except (UnicodeDecodeError, ValueError):
        raise ParameterError(param, f"{file!r} is not UTF-8 text; convert it first") from None


def read_text(file: str, param: str) -> str:
    """The content of a text file, without its final newline."""
    text = file_text(file, param, newline="").removesuffix("\n")
    if not text:
        raise ParameterError(param, f"{file!r} is empty; give a file with text")
    return text


def check_structure(params: SamplingParams) -> None:
    """Compile a grammar once before the model loads, so that a typo fails at once. The engine
    compiles it again, with the model's vocabulary; large ones are left to its worker processes."""
    for field in STRUCTURE:
        value = getattr(params, field)
        if value is None or len(str(value)) > MAX_CHECKED:
            continue
        try:
            from verbatim.grammar.matcher import LIMITS
            from verbatim.grammar.translate import byte_tokenizer, parser_limits, try_compile

            found = try_compile(field, value, byte_tokenizer(), parser_limits(LIMITS))
        except ImportError:  # the engine names the missing extra
            return
        if "error" in found:
            kind = {"UnsupportedError": UnsupportedError}.get(found["error"], ParameterError)
            raise kind(field, found["message"])


def decode_argument(text: str, param: str) -> str:
    """Decode an argument as UTF-8. In another locale Python passes its bytes as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        try:
            return os.fsencode(text).decode("utf-8")
        except UnicodeError:
            why = "is not UTF-8 text; check the encoding of the terminal, or send it through a pipe"
            raise ParameterError(param, why) from None
    return text


def _too_many_arguments(args: tuple[str, ...], param: str) -> str:
    """The error for several arguments, with the remedy: `verbatim run smollm2 "Hi"` needs -m, and
    `verbatim run why is the sky blue` needs quotes."""
    called = click.get_current_context().command_path
    from verbatim.hub.catalog import CATALOG
    from verbatim.hub.hub_catalog import suggestion

    error = f"{len(args)} arguments were given, and the {param} is one argument"
    if _is_model_name(args[0], sized=True):
        return f"{error}; pass the model with -m: {called} -m {shlex.quote(args[0])} …"
    if len(args) == 2 and (hint := suggestion(args[0], tuple(CATALOG))):
        return f"the {param} is one argument, in quotes, and there is no model {args[0]!r}{hint}"
    joined = shlex.quote(" ".join(args))
    example = f": {called} {joined}" if len(joined) <= 100 else ""
    return f"{error}; put it in quotes{example}"


def _is_model_name(word: str, *, sized: bool) -> bool:
    from verbatim.hub.catalog import is_known

    return is_known(word, sized=sized) or word.endswith(".gguf") or word.startswith("hf.co/")


def check_output(name: str, file: str) -> None:
    """Raise if `file` cannot be written, before any work is done. Folders are not created."""
    path = Path(file)
    folder = path.parent
    if file == "-":
        raise ParameterError(name, "'-' is no file, and this output is not for a pipe; name a file")
    if path.is_dir():
        raise ParameterError(name, f"{file!r} is a folder; name a file in it")
    if not folder.is_dir():
        why = "is not a folder" if folder.exists() else "does not exist"
        why = f"cannot write {file!r}: {str(folder)!r} {why}"
        raise ParameterError(name, f"{why}; make it (mkdir -p), or choose another path")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ParameterError(name, f"cannot write {file!r}: permission denied; choose another path")


def check_plot(file: str | None) -> None:
    """check_output for --plot, whose file name decides the format. None: no plot was asked for."""
    if file is None:
        return
    from verbatim.observe.plot import require_matplotlib

    if Path(file).suffix not in (".svg", ".png"):
        raise ParameterError("plot", f"{file!r} ends in neither .svg nor .png; choose one of them")
    check_output("plot", file)
    require_matplotlib()
