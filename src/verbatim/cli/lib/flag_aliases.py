"""What users of Ollama, llama.cpp, vLLM and transformers type: aliases that work, and answers that
name the right flag. The names are in base/migration_hints.json.

command_class.Command adds the flags to every command that has the flag of ours; main.py resolves
the commands.
"""

from __future__ import annotations

from verbatim.base.migration_hints import hints

# our flag -> names of other programs with the same meaning
FLAG_ALIASES = {flag: tuple(names.split()) for flag, names in hints("flag_aliases").items()}
# name -> our flag, and what comes before its value
VALUE_ALIASES = {name: tuple(ours.split()) for name, ours in hints("value_aliases").items()}
# flags without a counterpart -> what to type instead
FLAG_ANSWERS = {tuple(names.split()): hint for names, hint in hints("flags").items()}
# commands of other programs -> ours
COMMAND_ALIASES = {name: tuple(words.split()) for name, words in hints("command_aliases").items()}
COMMAND_ANSWERS = hints("commands")
