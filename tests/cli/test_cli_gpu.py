"""What the commands report about the GPU: with a fake GPU here, with a real one under `make
test-gpu`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_result import Call
from verbatim import backend as backends
from verbatim.backend import gpu
from verbatim.backend.protocol import BackendInfo
from verbatim.base.defaults import catalog_defaults
from verbatim.base.errors import OUT_OF_MEMORY, BackendError, DeviceMemoryError
from verbatim.cli.commands import doctor
from verbatim.engine.calls import llm
from verbatim.engine.calls.llm import LLM
from verbatim.hub import catalog
from verbatim.testing.fakes import FakeBackend, fake_parts

REAL = gpu.present()
needs_card = pytest.mark.skipif(not REAL, reason="needs an NVIDIA GPU: `make test-gpu`")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU, with PyTorch and Triton installed."""
    monkeypatch.setattr(gpu, "present", lambda: True)
    monkeypatch.setattr(gpu, "missing", lambda: None)
    return monkeypatch


def ran(monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
    def kernel_ran() -> str:
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(doctor, "import_module", lambda _: SimpleNamespace(kernel_ran=kernel_ran))


def cuda_line(verbatim: Call) -> tuple[int, str]:
    result = verbatim("doctor")
    [line] = [line for line in result.out.splitlines() if line[6:].startswith("cuda ")]
    return result.code, line


def test_doctor_and_version_without_a_gpu(verbatim: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "present", lambda: False)
    monkeypatch.setattr(doctor, "import_module", lambda _: pytest.fail("PyTorch was imported"))
    monkeypatch.setattr(gpu, "missing", lambda: None)
    _, line = cuda_line(verbatim)
    assert line.startswith("note")
    assert "no NVIDIA GPU" in line or "hides the NVIDIA GPUs" in line
    assert line.endswith("PyTorch and Triton are installed")
    assert "default backend: cuda" not in verbatim("version").out


def test_doctor_with_a_gpu_and_without_pytorch(verbatim: Call, card: pytest.MonkeyPatch) -> None:
    card.setattr(gpu, "missing", lambda: f"PyTorch is not installed; {gpu.EXTRA}")
    code, line = cuda_line(verbatim)
    assert code == 0
    assert line.startswith("note")
    assert f"there is an NVIDIA GPU, but PyTorch is not installed; {gpu.EXTRA}" in line


@pytest.mark.parametrize(
    ("result", "state", "text"),
    [
        (
            "NVIDIA H200 (sm90)",
            "ok",
            "NVIDIA H200 (sm90): a test kernel ran and its result is right",
        ),
        (
            BackendError("a test kernel did not run on the GPU: X"),
            "note",
            "there is an NVIDIA GPU, but a test kernel did not run",
        ),
        (
            gpu.WrongResult("its result is wrong"),
            "BAD",
            "there is an NVIDIA GPU, but its result is wrong",
        ),
        (
            OSError("libcudart.so.12"),
            "BAD",
            f"cannot be imported: libcudart.so.12; install the extra 'cuda' again: {gpu.PIP}",
        ),
    ],
)
def test_doctor_distinguishes_installed_from_tested(
    result: Any, state: str, text: str, verbatim: Call, card: pytest.MonkeyPatch
) -> None:
    ran(card, result)
    code, line = cuda_line(verbatim)
    assert line.split()[0] == state
    assert text in line
    assert code == (state == "BAD")


def test_version_with_a_gpu_reports_what_is_installed(
    verbatim: Call, card: pytest.MonkeyPatch
) -> None:
    result = verbatim("version").out
    assert (
        "there is an NVIDIA GPU, and PyTorch and Triton are installed; `verbatim doctor` runs a "
        "test kernel"
    ) in result
    assert "default backend: cuda" in result


def test_a_fallback_is_noted_once_and_not_with_quiet_or_json(
    verbatim: Call, card: pytest.MonkeyPatch
) -> None:
    real = backends.import_module

    def imported(name: str) -> Any:
        if name == "verbatim.backend.cuda":
            raise OSError("libcuda is broken")
        return real(name)

    card.setattr(backends, "import_module", imported)
    wanted = "cuda is not used: PyTorch or Triton cannot be imported: libcuda is broken"
    asked = ("run", "--max-tokens", "2", "the")
    result = verbatim(*asked)
    assert result.code == 0
    assert result.err.count(wanted) == 1
    assert wanted in result.err.splitlines()[0]
    assert wanted not in verbatim(*asked, "--quiet").err
    json_said = verbatim(*asked, "--json")
    assert wanted not in json_said.err
    assert json_said.json["backend"]["note"] == wanted
    assert wanted not in verbatim(*asked, "--backend", "reference").err


def test_a_receipt_of_the_cpu_is_replayed_by_the_cpu(
    verbatim: Call, card: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """auto would use the GPU, which has other numerics."""
    pytest.importorskip("verbatim.backend.cpu._native")
    card.setenv("CUDA_VISIBLE_DEVICES", "0")
    receipt = tmp_path / "receipt.json"
    assert (
        verbatim(
            "run", "--backend", "cpu", "--max-tokens", "4", "--save-receipt", str(receipt), "the"
        ).code
        == 0
    )
    assert json.loads(receipt.read_text())["backend"] == "cpu"
    card.setattr(gpu, "present", lambda: bool(gpu.os.environ.get("CUDA_VISIBLE_DEVICES")))
    card.setattr(backends, "_auto_cuda", lambda *_: pytest.fail("the GPU was used"))
    assert verbatim("replay", str(receipt)).code == 0


# ---------------------------------------------------------------------------------- with a real GPU


@needs_card
def test_run_uses_the_gpu_and_reports_it(verbatim: Call) -> None:
    import torch

    asked = ("run", "--max-tokens", "8", "--seed", "1", "the")
    result = verbatim(*asked)
    assert result.code == 0
    assert "cuda is not used" not in result.err
    again = verbatim(*asked, "--json").json
    assert again["backend"]["name"] == "cuda"
    assert again["backend"]["detail"] == torch.cuda.get_device_name()
    assert again["text"] == result.out.rstrip("\n")


@needs_card
def test_doctor_runs_a_kernel_on_the_gpu(verbatim: Call) -> None:
    code, line = cuda_line(verbatim)
    assert code == 0
    assert line.startswith("ok")
    assert "a test kernel ran and its result is right" in line


@needs_card
def test_the_default_model_on_the_gpu(verbatim: Call, default_model: Path) -> None:
    """Alone and in a batch, generated and re-scored: the same tokens and log-probabilities."""
    from verbatim import LLM, SamplingParams

    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3, logprobs=1)
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
    with LLM(default_model, context=512) as llm:
        assert llm.loaded.backend.info.name == "cuda"
        together = llm.generate(prompts, params)
        for prompt, done in zip(prompts, together, strict=True):
            assert llm.generate(prompt, params).token_ids == done.token_ids
            score = llm.score([*done.prompt_ids, *done.token_ids]).logprobs[len(done.prompt_ids) :]
            assert [entry.logprob for entry in score if entry is not None] == [
                e.logprob for e in done.logprobs
            ]


@needs_card
def test_plan_and_bench_agree_about_the_gpu(verbatim: Call, default_model: Path) -> None:
    """Equal limits and costs give equal bounds; they differ by the stated margin of 1 %."""
    from verbatim import LLM
    from verbatim.observe.roofline import MachineLimits, cost_card

    with LLM(default_model, backend="cuda") as llm:
        card = cost_card(llm.loaded.backend.spec, llm.loaded.backend.info)
    for context, batch in ((512, 1), (2000, 64)):
        found = verbatim(
            "plan", str(default_model), "--context", str(context), "--batch", str(batch), "--json"
        ).json
        device = found["device"]
        limits = MachineLimits(device["read_bytes"], 1, "gpu", int8_ops=device["ops"])
        ceiling = card.decode_ceiling(limits, context, batch)
        assert found["output_tokens_per_second"] == pytest.approx(ceiling, rel=0.01)


@needs_card
def test_plan_measures_the_gpu(verbatim: Call) -> None:
    """Any GPU that runs the kernels reads more than 100 GB/s and does more than 5 TFLOPS."""
    found = verbatim("plan", "7B", "--json").json["device"]
    assert found["kind"] == "measured"
    assert found["read_bytes"] > 1e11
    assert found["ops"] > 5e12


def on_card(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[Any]:
    """A fake engine that says it is on a GPU; returns the calls of the warm-up."""
    calls: list[Any] = []

    def compile_all(*given: Any) -> None:
        calls.append(given)
        if error is not None:
            raise error

    name = "verbatim.backend.cuda.kernel_compile"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(compile_all=compile_all))
    info = BackendInfo("cuda", "a card", 1, "cuda", weight_bytes=0, kv_token_bytes=16)
    monkeypatch.setattr(FakeBackend, "info", info)
    return calls


def test_kernels_are_compiled_before_the_first_request_if_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = on_card(monkeypatch)
    options = {"kv_blocks": 64, "max_running": 7, "step_tokens": 99}
    loaded = replace(fake_parts(), defaults=catalog_defaults({"temperature": 0.3, "top_k": 12}))
    LLM.from_loaded(loaded, **options).close()
    assert not calls
    LLM.from_loaded(loaded, warm_up=True, **options).close()
    [(backend, [params], max_running, step_tokens)] = calls
    assert backend is loaded.backend
    assert (params.temperature, params.top_k, max_running, step_tokens) == (0.3, 12, 7, 99)
    monkeypatch.undo()
    LLM.from_loaded(fake_parts(), warm_up=True, kv_blocks=64).close()  # no GPU: no effect


def test_an_engine_opens_without_memory_for_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_card(monkeypatch, DeviceMemoryError(f"{OUT_OF_MEMORY}a step did not fit"))
    LLM.from_loaded(fake_parts(), warm_up=True, kv_blocks=64, step_tokens=64).close()
    assert "not all GPU kernels are compiled: out of GPU memory" in caplog.text


def test_serve_compiles_ahead(verbatim: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    http_process = pytest.importorskip("verbatim.server.http_process")
    served: list[Any] = []
    monkeypatch.setattr(http_process, "run", lambda settings: served.append(settings) or 0)
    for flags in ((), ("--no-warm-up",), ("--warm-up",)):
        assert verbatim("serve", *flags).code == 0
    assert [settings.engine["warm_up"] for settings in served] == [True, False, True]


def test_pull_compiles_ahead_if_asked(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[Any] = []

    class Opened:
        def __init__(self, model: str, **options: Any) -> None:
            opened.append((model, options))

        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(llm, "LLM", Opened)
    monkeypatch.setattr(catalog, "pull", lambda *given, **named: tmp_path / "m.gguf")
    assert verbatim("pull", "smollm2").out == verbatim("pull", "smollm2", "--warm-up", "-q").out
    options = {"backend": "cuda", "warm_up": True, "offline": True}
    assert opened == [(str(tmp_path / "m.gguf"), options)]
    assert "the GPU kernels are compiled (" in verbatim("pull", "--warm-up").err
