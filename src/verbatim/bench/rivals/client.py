"""A rival engine as a Runner: the same calls as our own runner, served by a worker process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from verbatim.base.errors import BackendError
from verbatim.base.json_io import JsonObject

# rival -> (worker script, module it needs, distribution of that module)
WORKERS = {
    "llama.cpp": ("worker_llama.py", "llama_cpp", "llama-cpp-python"),
    "transformers": ("worker_transformers.py", "transformers", "transformers"),
    "vllm": ("worker_vllm.py", "vllm", "vllm"),
}
# where each of them runs here
DEVICES = {"llama.cpp": ("cpu",), "transformers": ("cpu", "cuda"), "vllm": ("cuda",)}


def find_python(rival: str, given: str | None) -> str:
    """The Python that has the rival installed: the given one, else ours. Raises BackendError
    with the remedy if it has not."""
    _, package, distribution = WORKERS[rival]
    python = given or sys.executable
    probe = f"import importlib.util as u, sys; sys.exit(u.find_spec('{package}') is None)"
    try:
        found = subprocess.run([python, "-c", probe], capture_output=True, timeout=60)
    except OSError as error:
        why = f"{python} cannot be run: {error.strerror}; give a Python with --rival-python"
        raise BackendError(why) from None
    if found.returncode:
        raise BackendError(
            f"{rival} is not installed in {'that' if given else 'this'} Python; install "
            f"{distribution} into an environment of its own and name its Python with "
            "--rival-python"
        )
    return python


class Rival:
    """The worker process of a rival. Every call blocks until its response arrives."""

    def __init__(self, rival: str, python: str) -> None:
        self.name = rival
        self.version, self.file = "", ""
        self.load = 0.0
        script, pipe = Path(__file__).parent / WORKERS[rival][0], subprocess.PIPE
        self._process = subprocess.Popen(
            [python, str(script)], stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    def open(self, model: str, threads: int, context: int, device: str = "cpu") -> None:
        answer = self._call(op="open", model=model, threads=threads, context=context, device=device)
        self.version, self.load = str(answer["version"]), float(answer["load"])
        self.file = Path(model).name

    def prefill(self, tokens: int) -> float:
        return float(self._call(op="prefill", tokens=tokens)["seconds"])

    def decode(self, context: int, steps: int) -> float:
        return float(self._call(op="decode", context=context, steps=steps)["seconds"])

    def batch(self, sequences: int, context: int, steps: int) -> float:
        return float(
            self._call(op="batch", sequences=sequences, context=context, steps=steps)["seconds"]
        )

    def crowd(self, prompts: list[int], lengths: list[int]) -> float:
        """Seconds for requests with prompts and outputs of these numbers of tokens (vllm)."""
        return float(self._call(op="crowd", prompts=prompts, lengths=lengths)["seconds"])

    def close(self) -> None:
        process = self._process
        if process.stdin:
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()

    def _call(self, **request: Any) -> JsonObject:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            said = process.stderr.read().strip().splitlines()
            code = process.wait(10)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            why = f"{self.name} ended ({how}): {said[-1] if said else 'no reason given'}"
            raise BackendError(why)
        answer: JsonObject = json.loads(line)
        if "error" in answer:
            raise BackendError(f"{self.name}: {answer['error']}")
        return answer
