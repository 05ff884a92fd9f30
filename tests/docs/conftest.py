"""Fixtures of the documentation's tests: the built site, and a server for its examples."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = ("torch", "transformers", "triton", "gguf", "safetensors", "verbatim.backend.cpu._native")
sys.path.insert(0, str(ROOT / "tests" / "server"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, without the packages that it does not install; a warning
    of MkDocs is an error."""
    target, path = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("path")
    (path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update({dict.fromkeys(ABSENT)})"
    )
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(target)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(path)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def read_once(default_model: Path) -> Iterator[None]:
    """Every block that loads the default model gets one reading of its header and its tokenizer,
    which take three quarters of a load. Weights are packed and engines are started by each."""
    from verbatim.engine.loading import model_info
    from verbatim.model.loading import load

    read_gguf, read_text = load.read_gguf, model_info.read_text
    source, text = read_gguf(default_model), read_text(read_gguf(default_model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            load, "read_gguf", lambda path: source if path == source.path else read_gguf(path)
        )
        patch.setattr(
            model_info, "read_text", lambda file: text if file is source else read_text(file)
        )
        yield


@pytest.fixture(scope="session")
def doc_server(default_model: Path) -> Iterator[Callable[[], int]]:
    """The port of a server with the default model, which starts on the first call."""
    from doc_server import DocServer

    server = DocServer()
    yield server.port
    server.stop()
