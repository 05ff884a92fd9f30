"""backend=auto opens cuda if a GPU is usable, else cpu with a note that gives the reason; without a
GPU it opens cpu without a note.

The GPU, PyTorch and Triton are faked: each test changes the result of one probe."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verbatim import backend as backends
from verbatim.backend import gpu, may_use_gpu, open_backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError, ParameterError
from verbatim.model.spec import DFlashSpec
from verbatim.testing.tiny_models import tiny_model

# what auto opens without a GPU: reference if the C++ kernels are not built
CPU = ("cpu", "reference")


class FakeGpu:
    """A machine with one GPU on which everything works, unless a test changes a probe."""

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
        """Set open_checked of the fake module verbatim.backend.cuda, or the error of its import."""
        real = backends.import_module

        def imported(name: str) -> Any:
            if name != "verbatim.backend.cuda":
                return real(name)
            if isinstance(open_checked, Exception):
                raise open_checked
            return SimpleNamespace(open_checked=open_checked)

        self._patch.setattr(backends, "import_module", imported)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpu:
    return FakeGpu(monkeypatch, tmp_path)


def opened(**options: Any) -> Any:
    return open_backend(tiny_model("llama"), EngineConfig(**options))


def refuses(reason: str) -> Any:
    def open_checked(*_: object) -> None:
        raise BackendError(reason)

    return open_checked


def test_auto_opens_cuda_if_the_gpu_works(fake_gpu: FakeGpu) -> None:
    assert may_use_gpu(EngineConfig())
    assert may_use_gpu(EngineConfig(backend="cuda"))
    assert not may_use_gpu(EngineConfig(backend="cpu"))
    fake_gpu.installed({"torch"}, cuda="12.8")
    assert not may_use_gpu(EngineConfig())
    fake_gpu.installed({"torch", "triton"}, cuda="12.8")
    assert opened().info.name == "cuda"
    assert opened(backend="auto").info.name == "cuda"
    assert opened(kv_type="q8").info.name == "cuda"
    assert opened(backend="reference").info.name == "reference"


def test_the_backend_cuda_is_checked_as_auto_is_and_never_replaced(fake_gpu: FakeGpu) -> None:
    fake_gpu.opens(refuses("the model needs 9 GB"))
    with pytest.raises(BackendError, match="needs 9 GB"):
        opened(backend="cuda")
    fake_gpu.opens(ImportError("cannot import name 'gdc_wait'"))
    with pytest.raises(BackendError, match=r"cannot be used \(.*gdc_wait.*\); install the extra"):
        opened(backend="cuda")


@pytest.mark.parametrize("shown", ["", "-1", "-1,0"])
def test_a_gpu_hidden_by_cuda_visible_devices_is_not_used(
    shown: str, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    info = opened().info
    assert info.name != "cuda"
    assert "cuda" not in info.note
    assert "CUDA_VISIBLE_DEVICES hides" in gpu.hidden_or_absent()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert opened().info.name == "cuda"


def test_without_a_gpu_there_is_no_note_and_no_import_of_the_cuda_backend(
    fake_gpu: FakeGpu,
) -> None:
    (fake_gpu.folder / "nvidia0").unlink()
    (fake_gpu.folder / "nvidiactl").touch()  # a driver without a GPU
    fake_gpu.opens(AssertionError("the cuda backend was imported"))
    info = opened().info
    assert info.name in CPU
    assert "cuda" not in info.note + info.detail
    assert (
        gpu.hidden_or_absent() == "this machine has no NVIDIA GPU, or its driver is not installed"
    )


def without_torch(fake_gpu: FakeGpu) -> None:
    fake_gpu.installed(set(), cuda=None)


def without_triton(fake_gpu: FakeGpu) -> None:
    fake_gpu.installed({"torch"}, cuda="12.8")


def cpu_build(fake_gpu: FakeGpu) -> None:
    fake_gpu.installed({"torch", "triton"}, cuda=None)


def broken_import(fake_gpu: FakeGpu) -> None:
    fake_gpu.opens(OSError("libcudart.so.12: cannot open shared object file"))


def old_driver(fake_gpu: FakeGpu) -> None:
    fake_gpu.opens(
        refuses(
            "PyTorch cannot use the GPU: RuntimeError: The NVIDIA driver on your system is too old."
        )
    )


def no_launch(fake_gpu: FakeGpu) -> None:
    fake_gpu.opens(
        refuses("a test kernel did not run on the GPU: RuntimeError: Failed to find C compiler.")
    )


def too_large(fake_gpu: FakeGpu) -> None:
    fake_gpu.opens(refuses("the model needs 141.0 GB of GPU memory and 79.1 GB are free"))


EXTRA = "install the extra 'cuda': pip install '.[cuda]' in the checkout"
CASES = [
    (without_torch, f"PyTorch and Triton are not installed; {EXTRA}"),
    (without_triton, f"Triton is not installed; {EXTRA}"),
    (
        cpu_build,
        "the installed PyTorch is a build without CUDA; "
        f"install a CUDA build of PyTorch, then {EXTRA.removeprefix('install ')}",
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
def test_the_note_gives_the_reason_why_a_gpu_is_not_used(
    case: Any, reason: str, fake_gpu: FakeGpu
) -> None:
    case(fake_gpu)
    info = opened().info
    assert info.name in CPU
    assert info.note == f"cuda is not used: {reason}"
    assert not opened(backend=info.name).info.note, "the configuration names another backend"


def test_auto_opens_cpu_for_a_head_that_cuda_does_not_run(fake_gpu: FakeGpu) -> None:
    model = tiny_model("llama")
    for dflash, names in ((None, ("cuda",)), (DFlashSpec(1, 0, 4), CPU)):
        draft = replace(model, spec=replace(model.spec, dflash=dflash))
        config = EngineConfig(speculate="head:x")
        info = open_backend(replace(model, draft=draft), config).info
        assert info.name in names
        assert ("it does not run the head of 'head:x'" in info.note) == (dflash is not None)


def test_auto_reports_a_wrong_parameter_instead_of_opening_another_backend(
    fake_gpu: FakeGpu,
) -> None:
    def open_checked(*_: object) -> None:
        raise ParameterError("threads", "is wrong")

    fake_gpu.opens(open_checked)
    with pytest.raises(ParameterError, match="threads"):
        opened()


def test_the_reference_backend_reports_why_neither_cuda_nor_cpu_is_used(
    fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_triton(fake_gpu)
    monkeypatch.setattr(backends, "_cpu_unsupported", lambda _: "heads of 3")
    info = opened().info
    assert info.name == "reference"
    assert info.note.startswith("cuda is not used: Triton is not installed")
    assert info.note.endswith(
        "the reference backend runs, which is slow; no cpu kernels: heads of 3"
    )


def test_without_kernels_every_run_is_told_why_it_is_slow(
    fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the build noted reaches info.note, which `verbatim run` prints and the server logs."""
    (fake_gpu.folder / "nvidia0").unlink()
    built = SimpleNamespace(REASON="no C++ compiler was found when it was installed")
    monkeypatch.setitem(sys.modules, "verbatim.backend.cpu._build", built)
    monkeypatch.delattr("verbatim.backend.cpu.unsupported", raising=False)
    info = opened().info
    assert info.name == "reference"
    assert info.note == (
        "the reference backend runs, which is slow; no cpu kernels: not built: no C++ compiler was "
        "found when it was installed; install a C++ compiler and install verbatim again"
    )
    assert not opened(backend="reference").info.note, "the configuration names it"


def test_an_unreadable_version_file_of_pytorch_counts_as_a_cuda_build(fake_gpu: FakeGpu) -> None:
    (fake_gpu.folder / "version.py").write_text("raise ValueError")
    assert gpu.missing() is None
    (fake_gpu.folder / "version.py").unlink()
    assert gpu.missing() is None


def test_gpu_detection_imports_neither_pytorch_nor_triton() -> None:
    code = (
        "import sys; from verbatim.backend import gpu; gpu.present(); gpu.missing(); "
        "print({'torch', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
