"""Rivals of `bench`: each runs in its own interpreter and answers in JSON lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verbatim.base.errors import BackendError
from verbatim.bench.rivals import client

WORKER = """
import json, os, sys
for line in sys.stdin:
    ask = json.loads(line)
    if ask["op"] == "open": print(json.dumps({"version": "9", "load": 0.1}), flush=True)
    elif ask["op"] == "decode": print(json.dumps({"error": "RuntimeError: no"}), flush=True)
    elif ask["op"] == "batch": os.kill(os.getpid(), 9)
    else: print(json.dumps({"seconds": ask["tokens"] / 100}), flush=True)
"""


def test_a_rival_process_answers_in_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setitem(client.WORKERS, "pretend", (str(tmp_path / "worker.py"), "json", "json"))
    rival = client.Rival("pretend", client.find_python("pretend", None))
    rival.open("x", 2, 64)
    assert (rival.version, rival.file) == ("9", "x")
    assert rival.prefill(50) == 0.5
    with pytest.raises(BackendError, match="RuntimeError: no"):
        rival.decode(1, 1)
    with pytest.raises(BackendError, match="SIGKILL"):
        rival.batch(1, 1, 1)
    rival.close()


def test_a_missing_rival_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        client.WORKERS, "pretend", ("worker.py", "no_such_module_x", "no-such-dist")
    )
    with pytest.raises(BackendError, match="--rival-python"):
        client.find_python("pretend", None)
    with pytest.raises(BackendError, match="cannot be run"):
        client.find_python("pretend", "/no/such/python")


@pytest.mark.torch
@pytest.mark.soak
def test_transformers_as_a_rival(tmp_path: Path) -> None:
    """The real worker, on a tiny checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    rival = client.Rival("transformers", client.find_python("transformers", sys.executable))
    rival.open(str(tmp_path), 1, 64)
    assert rival.prefill(8) > 0
    assert rival.decode(8, 2) > 0
    assert rival.batch(2, 4, 2) > 0
    rival.close()


FAKE_VLLM = """
import os
from types import SimpleNamespace

__version__ = "0.0"
SamplingParams = SimpleNamespace
os.write(1, b"a line of a library")


class LLM:
    def __init__(self, model, **options):
        assert 0 < options["gpu_memory_utilization"] < 0.9
        config = SimpleNamespace(get_vocab_size=lambda: 50)
        self.llm_engine = SimpleNamespace(model_config=config)

    def generate(self, prompts, params, use_tqdm):
        print("a line of a library")
        assert [len(p["prompt_token_ids"]) for p in prompts] in ([8], [4, 4], [3, 9])
        lengths = [p.max_tokens for p in params]
        assert lengths in ([1], [1, 1], [3, 3], [5, 6]), lengths
        assert (params[0].temperature == 0.6) == (lengths == [5, 6])
"""
FAKE_TORCH = "import types; cuda = types.SimpleNamespace(mem_get_info=lambda: (50, 100))"


def test_the_vllm_worker_sends_its_requests_and_keeps_the_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With modules that have the names of vLLM and PyTorch: there is no GPU here."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rival = client.Rival("vllm", client.find_python("vllm", sys.executable))
    rival.open("model", 1, 64, "cuda")
    assert rival.prefill(8) > 0
    assert rival.batch(2, 4, 2) > 0
    assert rival.crowd([3, 9], [5, 6]) > 0
    rival.close()
