"""Packaging: the build without a compiler, a Makefile that installs once, and consistent version
pins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from extras import requirements
from install import progress

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def constraints() -> dict[str, str]:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    return {
        m[1].lower().replace("_", "-"): m[2]
        for line in lines
        if (m := re.fullmatch(r"([\w.-]+)([<>=].*)", line))
    }


def test_the_install_page_names_every_dependency() -> None:
    text = (ROOT / "docs" / "install.md").read_text("utf-8").lower()
    extras = PROJECT["project"]["optional-dependencies"]
    core = text[text.index("the core depends on") : text.index("everything else")]
    wanted = [(name, core) for name in PROJECT["project"]["dependencies"]]
    for extra in ("server", "grammar", "hub", "cuda", "ray", "bench"):
        row = re.search(rf"^\| `{extra}` \|.*$", text, re.M)
        assert row is not None, extra
        wanted += [(name, row[0]) for name in extras[extra]]
    for name, where in wanted:
        found = re.match(r"[\w-]+", name)
        assert found is not None
        assert found[0] in where or found[0] == "verbatim-engine", name


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
@pytest.mark.parametrize(
    ("option", "compiler", "reason"),
    [
        ("", "/bin/false", "no C++ compiler was found"),
        ("-DVERBATIM_KERNELS=OFF", "", "left out when it was installed"),
    ],
)
def test_the_build_works_without_a_compiler(
    option: str, compiler: str, reason: str, tmp_path: Path
) -> None:
    """CMake configures, installs nothing native, and leaves a note that `verbatim version`
    prints."""
    environment = {**os.environ, "CXX": compiler} if compiler else dict(os.environ)
    words = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "b"), *([option] if option else [])]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "will run on the reference backend" in done.stderr
    note: dict[str, str] = {}
    exec((tmp_path / "b" / "_build.py").read_text(), note)
    assert reason in note["REASON"]
    assert not list((tmp_path / "b").rglob("*.o"))


def test_version_reports_why_the_native_kernels_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from types import ModuleType

    from verbatim.cli.commands.version import cpu_facts

    import_module("verbatim.backend.cpu")  # before its native module is hidden
    note = ModuleType("verbatim.backend.cpu._build")
    note.REASON = "no C++ compiler was found when it was installed"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verbatim.backend.cpu._native", None)
    monkeypatch.setitem(sys.modules, "verbatim.backend.cpu._build", note)
    state, text = cpu_facts()
    assert state == "note"  # the reference backend still runs
    assert "no C++ compiler was found" in text
    assert "install verbatim again" in text


def test_every_extra_is_imported_by_the_sources() -> None:
    """An extra must not install packages that the sources do not use. `dev` is for the tests,
    `docs` for mkdocs.yml."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    sources = [
        path.read_text() for path in (ROOT / "src").rglob("*.py") if "rivals" not in path.parts
    ]
    result = [path.read_text() for path in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]]
    for name, packages in extras.items():
        for package in packages if name not in ("dev", "docs") else ():
            module = re.split(r"[^A-Za-z0-9_]", package)[0]
            used = re.compile(rf"^\s*(import|from) {module}\b", re.MULTILINE)
            assert any(used.search(text) for text in sources), (
                f"the extra {name} brings {module}, which nothing imports"
            )
    offered = {
        extra
        for text in [*sources, *result]
        for extra in re.findall(r"pip install '\.\[([a-z]+)\]'", text)
    }
    assert {"server", "grammar", "hub"} <= offered <= set(extras), (
        "an extra is recommended that does not exist"
    )


def test_no_text_recommends_the_public_package_index() -> None:
    """The package is not published: its name on the public index may belong to another project."""
    told = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    assert [
        str(path) for path in told if re.search(r"pip install \S*verbatim", path.read_text())
    ] == []


def linked_checkout(folder: Path) -> Path:
    """Link the files that `make run` depends on into `folder`, and return the installed environment
    `v` there. make reads a path with a space as two paths, so VENV must be a relative one."""
    for name in ("Makefile", "pyproject.toml", "CMakeLists.txt", "constraints.txt", "src"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "v" / "bin").mkdir(parents=True)
    (folder / "v" / "bin" / "python").touch()
    (folder / "v" / ".installed").touch()
    return folder / "v"


def test_nothing_asks_pip_for_our_own_name() -> None:
    """An index may hold another project under it, or under a name that it had."""
    name = PROJECT["project"]["name"]
    for file in ("Makefile", ".ci/run", "deploy/Dockerfile", "deploy/Dockerfile.cuda"):
        text = (ROOT / file).read_text("utf-8") if (ROOT / file).exists() else ""
        assert name not in text, file
    wanted = requirements("dev")
    assert not [line for line in wanted if line.startswith("verbatim")]
    assert any(line.startswith("starlette") for line in wanted), "an extra of the extra"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_second_make_run_installs_nothing(tmp_path: Path) -> None:
    """With a stamp newer than the sources `make run` only runs the command; with an older one it
    installs first, with the constraints."""
    venv = linked_checkout(tmp_path)

    def dry(target: str) -> str:
        return subprocess.check_output(["make", "-n", "VENV=v", target], cwd=tmp_path, text=True)

    assert "install.py" not in dry("run")
    assert "verbatim run" in dry("run")
    os.utime(venv / ".installed", (1, 1))
    assert "-c constraints.txt -e ." in dry("run")
    assert "extras.py server grammar" in dry("serve")
    test = dry("test")
    assert test.index("torch==") < test.index("extras.py dev"), "torch comes first, pinned"
    assert test.index("ruff check") < test.index("-m pytest")
    assert test.count("/mypy") == 1, "a checker that must be asked twice is not a check"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_run_passes_the_prompt_unchanged(tmp_path: Path) -> None:
    venv = linked_checkout(tmp_path)
    (venv / "bin" / "verbatim").write_text('#!/bin/sh\nfor word; do echo "[$word]"; done\n')
    (venv / "bin" / "verbatim").chmod(0o755)
    prompt = 'say "hi"; `id` it\'s $$HOME'  # $$ in a Makefile is one $
    done = subprocess.run(
        ["make", "-s", "VENV=v", f"PROMPT={prompt}", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == '[say "hi"; `id` it\'s $HOME]', done


def test_torch_has_the_same_pin_everywhere() -> None:
    [wanted] = [
        d for d in PROJECT["project"]["optional-dependencies"]["dev"] if d.startswith("torch")
    ]
    assert wanted == "torch" + constraints()["torch"]
    assert wanted in (ROOT / "Makefile").read_text()


def test_every_constraint_belongs_to_a_dependency() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *(d for deps in extras.values() for d in deps)]
    names = {re.split(r"[<>=!;\[ ]", d)[0].lower().replace("_", "-") for d in asked}
    assert set(constraints()) <= names


def test_jinja_is_a_version_with_a_safe_sandbox() -> None:
    """Before 3.1.6 a Jinja template can escape its sandbox (CVE-2025-27516), and templates come
    with models."""
    [wanted] = [d for d in PROJECT["project"]["dependencies"] if d.startswith("jinja2")]
    bounds = (wanted.removeprefix("jinja2"), constraints()["jinja2"].split(",")[0])
    assert bounds == (">=3.1.6", ">=3.1.6")


def test_the_core_needs_few_packages() -> None:
    names = {re.split(r"[<>=]", d)[0] for d in PROJECT["project"]["dependencies"]}
    assert names == {"numpy", "tokenizers", "tqdm", "jinja2", "click", "rich"}


def test_the_version_is_defined_once() -> None:
    import verbatim

    assert PROJECT["project"]["version"] == verbatim.__version__


def test_another_distribution_with_our_module_is_named(tmp_path: Path) -> None:
    """Where an index's `verbatim` is installed, too, the import warns and `verbatim version` says
    what to do; a distribution of any other name is found by the command."""
    folder = tmp_path / "site-packages"
    for name in ("verbatim-0.2.0", "quoted-1.0"):
        info = folder / f"{name}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.partition('-')[0]}\n")
        (info / "RECORD").write_text("verbatim/__init__.py,,\n")

    def run(path: Path) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "verbatim", "version"]
        environment = {**os.environ, "PYTHONPATH": str(path)}
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=True)

    line = (
        "the module `verbatim` also belongs to quoted and verbatim, which is another project: pip "
        "uninstall quoted verbatim, then install verbatim-engine again"
    )
    both, none = run(folder), run(tmp_path)
    assert both.stdout.splitlines()[-1] == line
    assert f"UserWarning: {line}" in both.stderr
    assert "another project" not in none.stdout + none.stderr


@pytest.mark.parametrize(
    ("tool", "flags"), [("uv tool", []), ("pipx", ["--pip-args=--no-compile"])]
)
def test_the_installer_only_runs_uv_or_pipx(tool: str, flags: list[str], tmp_path: Path) -> None:
    """From the checkout or a given wheel, never by name from an index."""
    script, name = ROOT / "deploy" / "install.sh", tool.partition(" ")[0]
    (tmp_path / name).write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    (tmp_path / name).chmod(0o755)
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "")

    def run(*words: str) -> list[str]:
        command = ["/bin/sh", str(script), *words]
        return subprocess.check_output(command, env={"PATH": str(tmp_path)}, text=True).split("\n")

    verbs = [*tool.split(" ")[1:], "install", *flags]
    wanted = "verbatim-engine[server,grammar] @ "
    assert run() == [*verbs, f"{wanted}file://{ROOT}", ""]
    assert run("https://host/x.whl") == [*verbs, f"{wanted}https://host/x.whl", ""]


def test_the_installer_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "")
    command = ["/bin/sh", str(ROOT / "deploy" / "install.sh")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "install uv (https://docs.astral.sh/uv) or pipx first" in done.stderr


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "  [3/19] Building CXX object cpu/CMakeFiles/kernels_avx2.dir/kernels/kernels.cpp.o\n",
            "3/19 kernels_avx2 kernels.cpp",
        ),
        ("[19/19] Linking CXX shared module cpu/_native.so\n", "19/19 link cpu/_native.so"),
        ("  Downloading numpy-2.5.5-cp312-x86_64.whl (16.6 MB)\n", "download numpy (16.6 MB)"),
        ("verbatim: no CPU kernels (why)\n", "verbatim: no CPU kernels (why)"),
        ("  Created temporary directory: /tmp/x\n", None),
    ],
)
def test_the_install_shows_which_of_how_many_files_is_compiled(
    line: str, shown: str | None
) -> None:
    assert progress(line) == shown


def test_a_failed_install_shows_the_error(tmp_path: Path) -> None:
    """With the lines before it, as of a killed compiler, and pip's exit code."""
    (tmp_path / "pyproject.toml").write_text("[build-system]\nrequires = 3\n")
    words = [sys.executable, str(ROOT / "tests" / "install.py"), "--no-index", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error:" in done.stderr.lower()
    assert "pyproject.toml" in done.stderr


def test_a_wheel_has_the_stable_abi_and_no_sources() -> None:
    build = PROJECT["tool"]["scikit-build"]["wheel"]
    assert build["py-api"] == "cp312"
    assert {"**/*.cpp", "**/*.h", "**/*.inc", "**/CMakeLists.txt"} <= set(build["exclude"])
    pythons = PROJECT["tool"]["cibuildwheel"]["build"].split()
    assert pythons == ["cp311-*", "cp312-*"], "the wheel of 3.12 serves every later Python"
