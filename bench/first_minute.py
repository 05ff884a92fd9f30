"""The first minute of a new user, step by step: `python bench/first_minute.py --wheel FILE`.

    wheel     a fresh environment, `pip install` of the wheel without pip's cache, the extras, the
              first and the second `verbatim run`, the server, the chat page in a browser
    checkout  a fresh clone of this repository with an empty home folder and without ccache:
              `make run`, which builds the kernels and downloads the default model (--only checkout)
    rival     llama.cpp's binding from its wheel on the same model file (--only rival)

`--only` may be repeated. Run it on a machine that does nothing else: load and goals are printed
first, then each step when it is done. The model must be in the cache, except for `checkout`. The
page needs Playwright and Chromium for this interpreter (`make test` installs them). The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))  # lens_pictures: a server and a browser
PROMPT = "Name the capital of France."
GOALS = {"pip install, core": 15.0, "first text": 5.0}  # seconds
PARTS = ("wheel", "checkout", "rival")
RIVAL = "xllamacpp"  # llama.cpp with a wheel for this platform: nothing is compiled
RIVAL_CODE = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 2048
question = {"messages": [{"role": "user", "content": sys.argv[2]}], "max_tokens": 16}
answer = xllamacpp.Server(params).handle_chat_completions(question)
print(answer["choices"][0]["message"]["content"], flush=True)
"""
# The text of the answer after the first `n` ones.
NEXT_TEXT = "n => document.querySelectorAll('.assistant .md')[n]?.innerText.trim()"
RESULTS: dict[str, float] = {}


@contextmanager
def step(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    RESULTS[name] = round(time.perf_counter() - start, 2)
    print(f"{name:28} {RESULTS[name]:7.2f} s", flush=True)


def environment(python: str, folder: Path, name: str) -> Path:
    with step(f"python -m venv ({name})"):
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return folder / "bin"


def install(bin: Path, *words: str) -> None:
    pip = [str(bin / "python"), "-m", "pip", "install", "-qq", "--no-compile", "--no-cache-dir"]
    subprocess.run([*pip, *words], check=True)


def first_text(name: str, words: list[str]) -> None:
    """Until the process writes its first byte of text; then until it ends, not counted."""
    with step(name):
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        first = process.stdout.read(1)
    process.communicate()
    assert first, f"{words} wrote nothing"
    assert process.returncode == 0, words


def page(url: str) -> None:
    """The chat page as a new user loads it, twice, and an answer on each."""
    from lens_pictures import chromium
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, chromium(playwright) as browser:
        context = browser.new_context()
        for number in ("first", "second"):
            shown = context.new_page()
            with step(f"page loaded, {number}"):
                shown.goto(url)
                shown.wait_for_selector("body[data-ready]")
            before = shown.locator(".assistant .md").count()
            shown.fill("#message", PROMPT)
            with step(f"first token on it, {number}"):
                shown.press("#message", "Enter")
                shown.wait_for_function(NEXT_TEXT, arg=before)
            shown.wait_for_selector("body:not(:has(.assistant[aria-busy=true]))")


def wheel(python: str, folder: Path, file: Path) -> None:
    from lens_pictures import start_server

    bin = environment(python, folder / "wheel", "wheel")
    with step("pip install, core"):
        install(bin, str(file))
    with step("pip install, extras"):
        install(bin, f"{file}[server,grammar]")
    words = [str(bin / "verbatim"), "run", "-q", PROMPT]
    first_text("first text", words)
    first_text("first text, second start", words)
    with step("server is ready"):
        server, url = start_server(str(bin / "python"))
    try:
        page(url)
    finally:
        server.terminate()
        server.communicate()


def checkout(python: str, folder: Path) -> None:
    clone, home = folder / "clone", folder / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VERBATIM_")}
    clean |= {"HOME": str(home), "CCACHE_DISABLE": "1", "PIP_NO_CACHE_DIR": "1"}
    with step("make run, fresh clone"):
        subprocess.run(["make", "run", f"PYTHON={python}"], cwd=clone, env=clean, check=True)
    with step("make run, again"):
        subprocess.run(["make", "run"], cwd=clone, env=clean, check=True)


def rival(python: str, folder: Path, model: Path) -> None:
    bin = environment(python, folder / "rival", RIVAL)
    with step(f"pip install {RIVAL}"):
        install(bin, RIVAL)
    words = [str(bin / "python"), "-c", RIVAL_CODE, str(model), PROMPT]
    for number in ("first", "second"):
        first_text(f"{RIVAL}: {number} text", words)


def default_model() -> Path:
    from verbatim.hub.catalog import cache_dir

    return next(cache_dir().glob("models/smollm2/*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="a wheel of this checkout (docs/install.md)")
    parser.add_argument("--only", choices=PARTS, action="append", help="may be repeated [wheel]")
    parser.add_argument("--python", default=sys.executable, help="of the environments [this one]")
    given = parser.parse_args()
    parts = given.only or ["wheel"]
    if "wheel" in parts and given.wheel is None:
        parser.error("--wheel FILE is missing: pip wheel --no-deps -w dist . makes it")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; goals in seconds: {GOALS}")
    folder = Path(tempfile.mkdtemp(prefix="first-minute-"))
    try:
        if "wheel" in parts:
            wheel(given.python, folder, given.wheel.resolve())
        if "checkout" in parts:
            checkout(given.python, folder)
        if "rival" in parts:
            rival(given.python, folder, default_model())
    finally:
        shutil.rmtree(folder)
    print(json.dumps({"cores": os.cpu_count(), "seconds": RESULTS}))


if __name__ == "__main__":
    main()
