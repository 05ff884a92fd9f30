"""Mutation testing of the main path: apply a fixed list of one-line faults, one at a time, and say
which of them the tests find.

    python tests/mutants.py                 all of them, half an hour or more
    python tests/mutants.py rope top-p      these
    python tests/mutants.py --list

The files of the package stay as they are: each run gets a folder with a sitecustomize.py, which
replaces the line when a process imports the module. So the processes of a server have the fault,
too. "killed": a test failed. "survived": a test is missing. "hangs": the tests did not end, because
of the fault or of the machine's load. "broken": the tests did not run, so the mutant must be
corrected. Ends with status 1 unless all are killed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 1200  # seconds; a run that takes longer hangs because of the fault

SITE = """
import importlib.machinery, importlib.util, sys

class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):  # without the bytecode cache of the correct module
        with open({path!r}, encoding="utf-8") as file:
            text = file.read()
        assert text.count({old!r}) == 1, "the mutant does not apply"
        return compile(text.replace({old!r}, {new!r}), {path!r}, "exec")

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != {module!r}:
            return None
        return importlib.util.spec_from_file_location(name, {path!r}, loader=Loader(name, {path!r}))

sys.meta_path.insert(0, Finder)
"""


class Mutant(NamedTuple):
    name: str
    file: str  # below src/verbatim
    old: str  # occurs once
    new: str
    tests: str  # below tests/, as pytest takes them


PROCESSORS = "sampling/test_sampling_processors.py"
RULES = "schedule/test_schedule_rules.py"
MACHINE = "schedule/test_schedule_machine.py"
STOP = "text/test_text_stop.py"
AGREES = "parity/test_families.py -k llama"

MUTANTS = (
    # ---- sampler
    Mutant(
        "filter-order", "sampling/filters.py", "(TopK(), TopP(),", "(TopP(), TopK(),",
        "sampling/test_sampling_pipeline.py",
    ),
    Mutant(
        "penalty-order", "sampling/processors.py",
        "Repetition(), Frequency(),", "Frequency(), Repetition(),",
        "sampling/test_sampling_pipeline.py",
    ),
    Mutant("top-p", "sampling/filters.py", "need)) + 1", "need)) + 2", PROCESSORS),
    Mutant("min-p", "sampling/filters.py", "row.centred >= log", "row.centred > log", PROCESSORS),
    Mutant("repetition", "sampling/penalties.py", "x / r, x * r)", "x / r, x / r)", PROCESSORS),
    Mutant(
        "frequency-of-prompt", "sampling/penalties.py",
        "np.asarray(_recent(row, row.prompt_len), np.int64), return_counts=True",
        "np.asarray(_recent(row, 0), np.int64), return_counts=True",
        PROCESSORS,
    ),
    Mutant(
        "penalty-range", "sampling/penalties.py",
        "len(row.history) - window)", "len(row.history) - window + 1)", PROCESSORS,
    ),
    Mutant(
        "min-tokens", "sampling/logit_edits.py",
        "row.prompt_len < row.params.min_tokens", "row.prompt_len + 1 < row.params.min_tokens",
        PROCESSORS,
    ),
    Mutant(
        "grammar-mask-end", "sampling/logit_edits.py",
        "row.logits[len(bits) :] = REMOVED", "row.logits[len(bits) :] += 0.0",
        "sampling/test_sampling_pipeline.py",
    ),
    Mutant(
        "noise-position", "sampling/draw.py",
        "noise = gumbel(key, position, ids)", "noise = gumbel(key, 0, ids)",
        "sampling/test_sampling_draw.py",
    ),
    Mutant(
        "noise-of-choices", "sampling/draw.py", "philox(choice & _LOW,", "philox(0,",
        "sampling/test_sampling_draw.py",
    ),
    # ---- text
    Mutant("stop-held-back", "text/stop.py", "keep = max(", "keep = min(", STOP),
    Mutant(
        "stop-longest", "text/stop.py", "len(stop) > len(found)", "len(stop) < len(found)", STOP
    ),
    Mutant("stop-overlap", "text/stop.py", "        fail[i] = k\n", "", STOP),
    Mutant(
        "stop-before-min-tokens", "engine/stream.py",
        "if len(self._written) <= self._params.min_tokens:", "if False:",
        "engine/test_engine_llm.py -k stop",
    ),
    Mutant(
        "decode-invalid-bytes", "text/decode.py", '_UTF8("replace")', '_UTF8("ignore")',
        "text/test_text_decode.py",
    ),
    # ---- scheduler and KV cache
    Mutant("step-budget", "schedule/scheduler.py", "seq, budget - behind,", "seq, budget,", RULES),
    Mutant(
        "fair-prefill", "schedule/scheduler.py",
        "return half if prefilling or self._could_admit(tenant) else paid", "return paid", RULES,
    ),
    Mutant(
        "preempted-rank", "schedule/shares.py", "left[-1] if left", "left[0] if left", RULES
    ),
    Mutant(
        "tenant-share", "schedule/scheduler.py",
        "budget -= self._reserved - self.", "budget -= 0 * self.",
        "schedule/test_schedule_tenants.py",
    ),
    Mutant(
        "block-leak", "schedule/paged_cache.py", "pool.release(table.pop())", "table.pop()", RULES
    ),
    Mutant(
        "fork-without-reference", "schedule/paged_cache.py",
        "                if block >= 0:\n                    pool.share(block)",
        "                if block >= 0:\n                    pass",
        RULES,
    ),
    Mutant(
        "copy-on-write", "schedule/paged_cache.py",
        "copies.append((g, table[first], copy))", "copies.append((g, copy, copy))", RULES,
    ),
    Mutant(
        "window-release", "schedule/paged_cache.py",
        "max(seq.computed - window + 1, 0)", "max(seq.computed - window + 2, 0)", MACHINE,
    ),
    Mutant(
        "prefix-chain", "schedule/prefix.py",
        'before + array("q", tokens).tobytes()', 'array("q", tokens).tobytes()', RULES,
    ),
    Mutant(
        "prefix-tenant", "schedule/prefix.py",
        "tenant, cache_salt))", "cache_salt))", RULES,
    ),
    Mutant(
        "prefix-last-token", "schedule/paged_cache.py",
        "(len(seq.tokens) - 1) // self.block_size", "len(seq.tokens) // self.block_size", RULES,
    ),
    Mutant(
        "draft-acceptance", "schedule/scheduler.py",
        "drafts[i] != token", "(drafts[i] != token and i != 2)", RULES,
    ),
    Mutant(
        "draft-computed", "schedule/scheduler.py",
        "seq.computed = computed = len(tokens) - 1",
        "seq.computed = computed = len(tokens) - (0 if last and i == 0 else 1)", RULES,
    ),
    # ---- engine
    Mutant(
        "overlap-token", "engine/step/overlap.py",
        "and planned.tokens[0] == ahead.inputs[row]", "", "engine/test_overlap.py",
    ),
    Mutant(
        "overlap-context", "engine/step/overlap.py", "if end >= context:", "if end > context:",
        "engine/test_overlap.py",
    ),
    Mutant(
        "failed-step", "engine/step/failed_step.py", "self._scheduler.preempt_all()", "pass",
        "engine/test_overlap.py engine/test_engine_structure.py -k 'failed or interrupt'",
    ),
    Mutant(
        "masks-of-drafts", "engine/step/grammar_steps.py",
        "matcher.masks_along(drafts)", "[matcher.masks_along(())[0]] * step.draws",
        "engine/test_engine_structure.py",
    ),
    Mutant(
        "model-default-wins", "base/defaults.py",
        "        if name in origins:\n", "        if True:\n", "base/test_base_defaults.py",
    ),
    # ---- model
    Mutant(
        "rope-sign", "backend/reference/ops.py", "a * cos - b * sin", "a * cos + b * sin", AGREES
    ),
    Mutant(
        "norm-epsilon", "backend/reference/ops.py",
        "return x / np.sqrt(square + F32(self.spec.norm_eps))", "return x / np.sqrt(square)",
        AGREES,
    ),
    Mutant(
        "window-mask", "backend/reference/ops.py",
        "max(0, position - window + 1)", "max(0, position - window)",
        "parity/test_families.py -k mistral",
    ),
    Mutant(
        "config-key-dropped", "model/families/smollm3.py", "        rows.BIASES,\n", "",
        "parity/test_config_keys.py -k smollm3",
    ),
    # ---- server
    Mutant(
        "server-seed", "server/api/common/to_params.py",
        'if "seed" in body:', 'if "seeds" in body:',
        "server/test_server_api.py -k seed",
    ),
    Mutant(
        "server-stop", "server/api/common/to_params.py",
        '("stop", "thinking_budget")', '("thinking_budget",)', "server/test_server_api.py -k stop",
    ),
)  # fmt: skip


def source(mutant: Mutant) -> Path:
    return ROOT / "src" / "verbatim" / mutant.file


def sitecustomize(mutant: Mutant) -> str:
    module = "verbatim." + mutant.file.removesuffix(".py").replace("/", ".")
    return SITE.format(path=str(source(mutant)), module=module, old=mutant.old, new=mutant.new)


def outcome(mutant: Mutant) -> tuple[str, str]:
    """killed, survived, hangs or broken, and pytest's last line about it."""
    tests = [f"tests/{word}" if ".py" in word else word for word in shlex.split(mutant.tests)]
    options = "-x -q -p no:xdist -p no:cacheprovider --tb=line"
    command = [sys.executable, "-m", "pytest", *options.split()]
    command += ["-m", "not soak and not models", *tests]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(sitecustomize(mutant), encoding="utf-8")
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return "hangs", f"no end after {TIMEOUT} s"
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E "))]
    words = {0: "survived", 1: "killed"}
    return words.get(done.returncode, "broken"), (said or [done.stdout[-200:]])[-1][:120]


def main(names: list[str]) -> int:
    known = {mutant.name: mutant for mutant in MUTANTS}
    if names == ["--list"]:
        for mutant in MUTANTS:
            print(f"{mutant.name:24} {mutant.file:32} {mutant.tests}")
        return 0
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"unknown mutants: {', '.join(unknown)}; --list shows them all")
    count: Counter[str] = Counter()
    for name in names or known:
        result, line = outcome(known[name])
        count[result] += 1
        print(f"{result:8} {name:24} {line}", flush=True)
    print(", ".join(f"{number} {word}" for word, number in sorted(count.items())))
    return int(count["killed"] < sum(count.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
