"""`verbatim doctor MODEL`: flags come in, findings with evidence and remedy go out."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from verbatim.base.json_io import JsonObject
from verbatim.cli.lib.options import engine_of
from verbatim.cli.lib.terminal import Progress, write_json

if TYPE_CHECKING:
    from verbatim.diagnose.doctor.findings import Finding
    from verbatim.diagnose.doctor.model_files import ModelFiles

MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("BAD", "bold red")}


def examine(flags: JsonObject, *, live: bool, seed: int, as_json: bool) -> int:
    from verbatim.diagnose.doctor.file_checks import check_files
    from verbatim.diagnose.doctor.findings import is_sound
    from verbatim.diagnose.doctor.model_files import read_files
    from verbatim.diagnose.doctor.weight_checks import check_weights
    from verbatim.hub.catalog import resolve

    engine_of(flags)  # a wrong flag fails before the model is read
    progress = Progress(quiet=as_json)
    path = resolve(
        flags["model"], revision=flags["revision"], offline=flags["offline"], progress=progress
    )
    progress.clear()
    files = read_files(path)
    found = [*check_files(files), *check_weights(files)]
    if live:
        from verbatim.cli.lib.doctor.doctor_live import run_checks

        found = run_checks(flags, files, found, seed=seed, as_json=as_json)
    if as_json:
        rows = [asdict(finding) for finding in found]
        faults = sum(finding.state == "bad" for finding in found)
        about = {"model": flags["model"], "faults": faults, "live": live, "seed": seed}
        write_json({**about, "findings": rows})
    else:
        _print(flags["model"], files, found, live)
    return 0 if is_sound(found) else 1


def _print(name: str, files: ModelFiles, found: list[Finding], live: bool) -> None:
    from rich.text import Text

    from verbatim.cli.lib.tables import console, section

    out = console()
    size = sum(tensor.data.nbytes for tensor in files.tensors.values())
    kind = f"{files.kind}, encoder" if files.encoder else files.kind
    out.print(f"{name}: {kind}, {size / 1e6:,.0f} MB of weights", style="bold")
    out.print()
    rows = []
    for finding in found:
        mark, style = MARKS[finding.state]
        text = Text(finding.text)
        if finding.evidence:
            text.append(f"\n{finding.evidence}", style="dim")
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="cyan")
        rows.append((Text(mark, style=style), Text(finding.check), text))
    section(out, "", rows, wide=2)
    count = {state: sum(f.state == state for f in found) for state in MARKS}
    faults = count["bad"]
    verdict = f"{_many(faults, 'fault') if faults else 'no fault'} found by {len(found)} checks"
    out.print()
    rest = "" if live else "; the model was not run (--no-live)"
    line = f"{verdict}, {_many(count['note'], 'note')}{rest}"
    out.print(line, style="bold red" if faults else "bold green")


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
