"""An error of a parameter names the flag that the user typed, for every flag of every command."""

from __future__ import annotations

from importlib import import_module

import pytest

from cli_result import Call
from verbatim.base.params import FIELDS
from verbatim.cli.lib.command_class import Command, Option, with_flags
from verbatim.cli.lib.options import flag_name
from verbatim.cli.lib.sampling_options import NOT_FLAGS
from verbatim.cli.main import COMMANDS


def options_of(name: str) -> list[Option]:
    command = import_module(f"verbatim.cli.commands.{name}").command
    return [param for param in command.params if isinstance(param, Option)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_a_parameter_is_named_as_typed(name: str) -> None:
    if name != "models":  # a group; its commands are of the class too
        assert isinstance(import_module(f"verbatim.cli.commands.{name}").command, Command)
    options = options_of(name)
    for option in options:
        assert option.name is not None
        param = option.name.removeprefix("p_").removeprefix("e_")
        for flag in option.opts:
            for args in (["x", flag, "3"], [f"{flag}=3"] if flag.startswith("--") else [flag]):
                said = with_flags(f"{param}: 3 is wrong", param, options, args)
                assert said == f"{flag}: 3 is wrong"
        first = next((flag for flag in option.opts if flag.startswith("--")), option.opts[0])
        assert with_flags(f"{param}: is missing", param, options, []) == f"{first}: is missing"


RANGES = {
    name: rule.high * 2 + 1
    for name, rule in FIELDS.items()
    if name not in NOT_FLAGS and rule.kind in ("int", "float") and rule.high is not None
}


@pytest.mark.parametrize("name", RANGES)
def test_a_value_out_of_range_names_its_flag(verbatim: Call, name: str) -> None:
    value = RANGES[name]
    assert value is not None
    result = verbatim("run", flag_name(name), f"{value:.0f}", "Hi")
    assert result.code == 2
    assert result.err.startswith(f"verbatim: {flag_name(name)}: "), result.err


def test_a_setting_is_named_as_it_is_typed(verbatim: Call) -> None:
    def said(*words: str) -> str:
        return verbatim(*words).err.removeprefix("verbatim: ")

    assert said("run", "--temp", "200", "Hi").startswith("--temp: 200")
    assert said("run", "-n", "-2", "Hi").startswith("-n: ")
    assert said("compare", "-s", "top_p=3", "Hi").startswith("top_p: 3")
    assert said("explain", "--what-if", "top_p=3", "Hi").startswith("top_p: 3")
    both = said("run", "--min-tokens", "9", "--max-tokens", "3", "Hi")
    assert both.startswith("--min-tokens: 9 is more than --max-tokens (3)")
    assert said("run", "").startswith("prompt: is empty")
