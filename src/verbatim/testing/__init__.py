"""Public fakes for your own tests: a fake model, a byte tokenizer, tiny checkpoints.

fakes.py has an engine without a model, tiny_models.py random checkpoints of every family.
"""

from verbatim.testing.fakes import (
    ByteTokenizer,
    CanaryError,
    ChatByteTokenizer,
    FakeBackend,
    PacedBackend,
    PairByteTokenizer,
    ThinkByteTokenizer,
    fake_parts,
    fake_spec,
    mix,
    server_parts,
)

__all__ = [
    "ByteTokenizer",
    "CanaryError",
    "ChatByteTokenizer",
    "FakeBackend",
    "PacedBackend",
    "PairByteTokenizer",
    "ThinkByteTokenizer",
    "fake_parts",
    "fake_spec",
    "mix",
    "server_parts",
]
