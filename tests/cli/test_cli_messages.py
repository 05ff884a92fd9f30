"""Rules for every message that the command line can print (cli_messages.py collects them)."""

from __future__ import annotations

import re

from cli_messages import messages

from verbatim.diagnose.doctor.kv_cost import TEXT

# A program part is named, not "who"; a message speaks of the program, not of its authors.
PERSONS = re.compile(
    r"\b(who|whom|whoever|nobody|somebody|someone|anybody|anyone|we|our|ours|us)\b", re.IGNORECASE
)


def test_no_message_calls_a_program_part_a_person() -> None:
    found = [message for message in messages() if PERSONS.search(without_values(message.text))]
    # a quiz question, and the text that doctor scores with each KV cache
    others = [message.text for message in found if message.text != " ".join(TEXT.split())]
    assert others == ["On which planet do we live?"]


def without_values(text: str) -> str:
    return re.sub(r"\{[^{}]*\}", "…", text)


def test_the_list_has_helps_errors_notes_and_migration_hints() -> None:
    texts = {(message.file, message.text) for message in messages()}
    for wanted in (
        ("cli/commands/run.py", "print one JSON object instead of text"),  # a help text
        ("base/migration_hints.json", "use verbatim chat"),  # an answer to another program's flag
        ("cli/commands/batch.py", "needs --ray; without it one engine runs the batch"),  # an error
        ("base/params.py", "{self.best_of} is less than n ({self.n})"),
        ("files/gguf.py", "tensors {name} and {other} overlap"),  # raised by a helper
        ("engine/calls/blocking_engine.py", "this LLM is closed; open a new one: LLM(model)"),
    ):
        assert wanted in texts
    assert any(text.startswith("Answer PROMPT, streamed") for _, text in texts)  # a command's help
    assert len(texts) > 1500
