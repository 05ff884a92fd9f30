"""backend=auto: cuda where a GPU can be used, else cpu with a note that says why; without a GPU, cpu without a word.

The GPU, PyTorch and Triton are faked: each case of a real machine is one of these probes answering otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verbatim import backend as backends
from verbatim.backend import gpu, open_backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError, ParameterError
from verbatim.testing_models import tiny_model

CPU = (
    "cpu",
    "reference",
)  # what auto uses without a GPU: reference where the C++ kernels are not built


class Card:
    """A machine with one GPU, on which everything works until a test says otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch, self.folder = monkeypatch, folder
        (folder / "nvidia0").touch()
        monkeypatch.setattr(gpu, "DEVICES", folder)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.installed({"torch", "triton"}, cuda="12.8")
        self.opens(
            lambda model, config: SimpleNamespace(info=SimpleNamespace(name="cuda", note=""))
        )

    def installed(self, names: set[str], *, cuda: str | None) -> None:
        (self.folder / "version.py").write_text(
            f"from typing import Optional\ncuda: Optional[str] = {cuda!r}\n"
        )
        found = SimpleNamespace(submodule_search_locations=[str(self.folder)])
        self._patch.setattr(gpu, "find_spec", lambda name: found if name in names else None)

    def opens(self, open_checked: Any) -> None:
        """What `import verbatim.backend.cuda` gives; an exception: what the import raises."""
        real = backends.import_module

        def imported(name: str) -> Any:
            if name != "verbatim.backend.cuda":
                return real(name)
            if isinstance(open_checked, Exception):
                raise open_checked
            return SimpleNamespace(open_checked=open_checked)

        self._patch.setattr(backends, "import_module", imported)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Card:
    return Card(monkeypatch, tmp_path)


def opened(**options: Any) -> Any:
    return open_backend(tiny_model("llama"), EngineConfig(**options))


def refuses(reason: str) -> Any:
    def open_checked(*_: object) -> None:
        raise BackendError(reason)

    return open_checked


def test_auto_uses_a_gpu_that_works(card: Card) -> None:
    assert opened().info.name == "cuda"
    assert opened(backend="auto").info.name == "cuda"
    assert opened(backend="reference").info.name == "reference"


@pytest.mark.parametrize("shown", ["", "-1", "-1,0"])
def test_a_hidden_gpu_is_no_gpu(shown: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    info = opened().info
    assert info.name != "cuda"
    assert not info.note
    assert "CUDA_VISIBLE_DEVICES hides" in gpu.hidden_or_absent()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert opened().info.name == "cuda"


def test_without_a_gpu_nothing_is_said_and_nothing_is_imported(card: Card) -> None:
    (card.folder / "nvidia0").unlink()
    (card.folder / "nvidiactl").touch()  # a driver without a GPU
    card.opens(AssertionError("the cuda backend was imported"))
    info = opened().info
    assert info.name in CPU
    assert not info.note
    assert "cuda" not in info.detail
    assert (
        gpu.hidden_or_absent() == "this machine has no NVIDIA GPU, or its driver is not installed"
    )


def without_torch(card: Card) -> None:
    card.installed(set(), cuda=None)


def without_triton(card: Card) -> None:
    card.installed({"torch"}, cuda="12.8")


def cpu_build(card: Card) -> None:
    card.installed({"torch", "triton"}, cuda=None)


def broken_import(card: Card) -> None:
    card.opens(OSError("libcudart.so.12: cannot open shared object file"))


def old_driver(card: Card) -> None:
    card.opens(
        refuses(
            "PyTorch cannot use the GPU: RuntimeError: The NVIDIA driver on your system is too old."
        )
    )


def no_launch(card: Card) -> None:
    card.opens(
        refuses("a test kernel did not run on the GPU: RuntimeError: Failed to find C compiler.")
    )


def too_large(card: Card) -> None:
    card.opens(refuses("the model needs 141.0 GB of GPU memory and 79.1 GB are free"))


CASES = [
    (without_torch, "PyTorch and Triton are not installed; install verbatim-engine[cuda]"),
    (without_triton, "Triton is not installed; install verbatim-engine[cuda]"),
    (
        cpu_build,
        "the installed PyTorch is a build without CUDA; install verbatim-engine[cuda] with a CUDA build of PyTorch",
    ),
    (
        broken_import,
        "PyTorch or Triton cannot be imported: libcudart.so.12: cannot open shared object file",
    ),
    (
        old_driver,
        "PyTorch cannot use the GPU: RuntimeError: The NVIDIA driver on your system is too old.",
    ),
    (no_launch, "a test kernel did not run on the GPU: RuntimeError: Failed to find C compiler."),
    (too_large, "the model needs 141.0 GB of GPU memory and 79.1 GB are free"),
]


@pytest.mark.parametrize(("case", "reason"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_a_gpu_that_cannot_be_used_leaves_a_note(case: Any, reason: str, card: Card) -> None:
    case(card)
    info = opened().info
    assert info.name in CPU
    assert info.note == f"cuda is not used: {reason}"
    assert not opened(backend=info.name).info.note, "a GPU was not asked for"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_type": "q8"}, "it does not support kv_type 'q8'"),
        ({"speculate": "head"}, "it runs no draft heads, and speculate is 'head'"),
        ({"speculate": "head:x"}, "it runs no draft heads, and speculate is 'head:x'"),
    ],
)
def test_what_only_the_cpu_offers_is_done_by_the_cpu(
    options: dict[str, str], reason: str, card: Card
) -> None:
    info = opened(**options).info
    assert info.name in CPU
    assert info.note == f"cuda is not used: {reason}"


def test_a_wrong_parameter_is_not_a_reason_for_another_backend(card: Card) -> None:
    def open_checked(*_: object) -> None:
        raise ParameterError("threads", "is wrong")

    card.opens(open_checked)
    with pytest.raises(ParameterError, match="threads"):
        opened()


def test_without_cpu_kernels_the_reference_says_both(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_triton(card)
    monkeypatch.setattr(backends, "_cpu_unsupported", lambda _: "heads of 3")
    info = opened().info
    assert info.name == "reference"
    assert info.note.startswith("cuda is not used: Triton is not installed")
    assert "no cpu kernels: heads of 3" in info.detail


def test_an_unknown_layout_of_pytorch_is_left_to_the_import(card: Card) -> None:
    (card.folder / "version.py").write_text("raise ValueError")
    assert gpu.missing() is None
    (card.folder / "version.py").unlink()
    assert gpu.missing() is None


def test_looking_for_a_gpu_imports_neither_pytorch_nor_triton() -> None:
    code = "import sys; from verbatim.backend import gpu; gpu.present(); gpu.missing(); print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
