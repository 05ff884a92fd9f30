"""Fixtures of tests that call the command line: a tiny model file that opens in milliseconds (a
random llama, a trained byte-level tokenizer, a chat template), and the callers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_result import Call, CliResult
from tiny_tokenizer import TEMPLATE, train_tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of tiny.gguf."""
    from verbatim.convert.export_model import model_metadata, model_tensors
    from verbatim.convert.export_tokenizer import tokenizer_metadata
    from verbatim.files.gguf_write import write_gguf
    from verbatim.testing.tiny_models import tiny_model
    from verbatim.text.tokenizer import from_directory

    directory = tmp_path_factory.mktemp("tiny")
    train_tokenizer(directory)
    words = from_directory(directory)
    model = tiny_model(
        "llama",
        vocab_size=words.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        max_position_embeddings=8192,
    )
    metadata, extra = model_metadata(model, "tiny")
    metadata |= tokenizer_metadata(directory, words, model.spec.vocab, "llama")
    metadata["tokenizer.chat_template"] = TEMPLATE
    metadata["general.sampling.temp"] = 0.0  # the text of a random model is stable at temperature 0
    write_gguf(directory / "tiny.gguf", metadata, [*extra, *model_tensors(model)])
    return directory / "tiny.gguf"


@pytest.fixture
def verbatim(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Call:
    """Run the command line in this process, with the tiny model and an empty cache."""
    from verbatim.cli.main import main

    monkeypatch.setenv("VERBATIM_MODEL", str(tiny))
    monkeypatch.setenv("VERBATIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VERBATIM_LOG", "WARNING")  # as `batch` does, but only for one test

    def call(*words: str, stdin: str | bytes | None = None) -> CliResult:
        if stdin is not None:
            import io

            raw = stdin.encode() if isinstance(stdin, str) else stdin
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return CliResult(ended.value.code, captured.out, captured.err)

    return call


@pytest.fixture
def spawn(tiny: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Start the command line (or other code) as a separate process."""

    def start(*words: str, code: str = "", **options: Any) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "VERBATIM_MODEL": str(tiny),
            "VERBATIM_CACHE": str(tmp_path / "cache"),
        }
        what = ["-c", code] if code else ["-m", "verbatim"]
        # a shell's background job ignores Ctrl-C, and so would its children
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen([sys.executable, *what, *words], env=environment, **options)
        finally:
            signal.signal(signal.SIGINT, before)

    return start
