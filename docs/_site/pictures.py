"""Make every picture of README.md and docs/: `make pictures`, or only some of them:
`make pictures PICTURES="explain lens"`.

Badges and the bench chart are made from pyproject.toml and the figures below; explain.svg is the
output of `verbatim explain`; each script of examples/course draws its own plot; the pictures of the
chat and the Lens are screenshots of a server on the default model. Times in the plots of the course
are those of the machine that runs this.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "docs" / "assets"
TOOLS = ROOT / "docs" / "tools"
COURSE = ROOT / "examples" / "course"
EXPLAIN = ["--temperature", "0.8", "--seed", "4", "--top-p", "0.95", "--max-tokens", "2"]
QUESTION = "Name the capital of France."
# Background, foreground, and black, red, green, yellow, blue, magenta, cyan, white.
# fmt: off
THEME = TerminalTheme(
    (24, 26, 36),
    (214, 217, 230),
    [(70, 75, 95), (240, 113, 120), (152, 195, 121), (229, 192, 123),
     (97, 175, 239), (198, 120, 221), (86, 182, 194), (214, 217, 230)],
)
# fmt: on
# Verbatim against llama.cpp, same file (Q4_1), tokens per second: docs/benchmarks.md.
BENCH = {"prefill 512": (1281, 189), "decode at 32": (135, 59), "decode at 2,000": (87, 16)}
# A block-diffusion model by the length of its blocks: bench/block_diffusion.md. Per threshold.
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95)
DIFFUSION: dict[str, tuple[dict[int, tuple[float, ...]], float]] = {  # and from left to right
    "tokens per pass": (
        {
            4: (1.62, 1.46, 1.36, 1.28, 1.22),
            8: (1.94, 1.56, 1.49, 1.38, 1.30),
            16: (1.97, 1.69, 1.54, 1.41, 1.33),
            32: (2.15, 1.68, 1.47, 1.31, 1.21),
        },
        1.0,
    ),
    "tokens per second, one CPU thread": (
        {
            4: (60.1, 54.5, 54.2, 44.3, 44.3),
            8: (43.6, 52.3, 44.1, 40.5, 41.7),
            16: (41.1, 37.1, 33.7, 33.3, 33.0),
            32: (29.2, 18.7, 20.3, 16.2, 15.4),
        },
        63.1,
    ),
    "nats per token under the original": (
        {
            4: (1.26, 1.03, 1.02, 0.98, 0.96),
            8: (1.47, 1.19, 1.06, 1.02, 0.96),
            16: (1.58, 1.25, 1.12, 1.03, 0.97),
            32: (1.75, 1.31, 1.21, 1.12, 1.09),
        },
        0.70,
    ),
}
# SVG without the web font that rich's own template loads.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace;
font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}"
height="{terminal_height}" /></clipPath>{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#181a24" />
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def badge(name: str, label: str, value: str, colour: str) -> None:
    left, right = 7 * len(label) + 12, 7 * len(value) + 12
    text = 'fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle"'
    (ASSETS / f"badge-{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20">'
        f'<rect width="{left}" height="20" fill="#555"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/>'
        f'<text x="{left / 2}" y="14" {text}>{label}</text>'
        f'<text x="{left + right / 2}" y="14" {text}>{value}</text></svg>\n'
    )


def badges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    status = next(c for c in project["classifiers"] if c.startswith("Development Status"))
    badge("license", "license", project["license"], "#3f51b5")
    badge("python", "python", project["requires-python"].removeprefix(">=") + "+", "#3f51b5")
    badge("status", "status", status.rsplit(" ", 1)[1].lower(), "#b26a00")


def explain() -> None:
    words = [sys.executable, "-m", "verbatim", "explain", *EXPLAIN, QUESTION]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.rstrip().splitlines() if len(line) < 100]
    text = Text()
    text.append(f'$ verbatim explain {" ".join(EXPLAIN[:6])} "{QUESTION}"\n', style="bold")
    for line in lines:
        part = Text(line + "\n")
        part.highlight_regex(r"^\s+\*.*$", "bold green")
        part.highlight_regex(r"'[^']*'", "cyan")
        part.highlight_regex(r"^(position|token) \d+", "bold blue")
        part.highlight_regex(r"\d+\.\d+ %", "yellow")
        part.highlight_regex(r"(top_p|top_k|min_p|temperature)\b", "magenta")
        text.append(part)
    console = Console(record=True, width=100, file=io.StringIO(), color_system="truecolor")
    console.print(text)
    svg = console.export_svg(title="", theme=THEME, code_format=SVG, unique_id="explain")
    (ASSETS / "explain.svg").write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE))


def bench() -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(BENCH), figsize=(7.5, 2.2), layout="constrained")
    for axes, (what, values) in zip(panels, BENCH.items(), strict=True):
        bars = axes.bar(("Verbatim", "llama.cpp"), values, 0.6, color=("#3f51b5", "#b0b5c9"))
        axes.bar_label(bars, [f"{value:,}" for value in values], padding=2)
        axes.set_title(what)
        axes.set_ylim(0, 1.2 * max(values))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("tokens per second")
    save(figure, ASSETS / "bench-cpu.svg")


def diffusion() -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(DIFFUSION), figsize=(9, 2.6), layout="constrained")
    for axes, (what, (by_length, causal)) in zip(panels, DIFFUSION.items(), strict=True):
        for length, values in by_length.items():
            axes.plot(THRESHOLDS, values, marker="o", markersize=3, label=f"blocks of {length}")
        axes.axhline(causal, color="#555", linestyle="--", label="left to right")
        axes.set_title(what, fontsize=9)
        axes.set_xlabel("threshold")
        axes.set_ylim(0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(fontsize=7, frameon=False)
    save(figure, ASSETS / "diffusion.svg")


def save(figure: object, path: Path) -> None:
    """An SVG without a date, so that the same plot is the same file."""
    figure.savefig(path, metadata={"Date": None})  # type: ignore[attr-defined]


def course() -> None:
    for script in sorted(COURSE.glob("[0-9]*.py")):
        print(f"{script.relative_to(ROOT)}")
        plot = ASSETS / "course" / f"{script.stem[3:]}.svg"
        script_of(script, "--plot", str(plot))


def loop() -> None:
    script_of(ROOT / "examples" / "loop_in_numbers.py", "--plots", str(ASSETS))


def lens() -> None:
    """Needs Chromium (`make browser`)."""
    script_of(ROOT / "examples" / "lens_pictures.py")


def tools() -> None:
    """The plots of docs/tools, by the commands that the pages show."""
    for page, start, plot in (
        ("compare.md", 'verbatim compare "', "compare.svg"),
        ("compare.md", "verbatim compare --quiz", "quiz.svg"),
        ("drift.md", "verbatim drift", "drift.svg"),
    ):
        text = (TOOLS / page).read_text("utf-8").replace("\\\n", " ")
        shown = next(x for x in text.splitlines() if x.startswith(f"$ {start}"))
        words = [sys.executable, "-m", *shlex.split(shown.removeprefix("$ "))]
        done = [*words, "--plot", str(TOOLS / plot)]
        subprocess.run(done, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def script_of(script: Path, *words: str) -> None:
    subprocess.run([sys.executable, str(script), *words], check=True, cwd=ROOT)


# name -> (the files of docs/ that it makes, the function)
PICTURES: dict[str, tuple[str, Callable[[], None]]] = {
    "badges": ("assets/badge-*.svg", badges),
    "explain": ("assets/explain.svg", explain),
    "bench": ("assets/bench-cpu.svg", bench),
    "diffusion": ("assets/diffusion.svg", diffusion),
    "course": ("assets/course/*.svg", course),
    "loop": ("assets/loop-in-numbers.svg", loop),
    "tools": ("tools/*.svg", tools),
    "lens": ("pictures/*.png", lens),
}


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "verbatim", "svg.fonttype": "none", "font.size": 9})
    names = sys.argv[1:] or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        sys.exit(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    for name in names:
        PICTURES[name][1]()


if __name__ == "__main__":
    main()
