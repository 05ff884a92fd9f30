"""Check the files and weights of models before serving them; no model runs.

python examples/check_models.py MODEL [MODEL ...]
"""

from __future__ import annotations

import argparse

from verbatim.diagnose.doctor.file_checks import check_files
from verbatim.diagnose.doctor.findings import Finding, is_sound
from verbatim.diagnose.doctor.model_files import read_files
from verbatim.diagnose.doctor.weight_checks import check_weights
from verbatim.hub.catalog import resolve


def main(arguments: list[str] | None = None) -> dict[str, list[Finding]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    found: dict[str, list[Finding]] = {}
    for model in parser.parse_args(arguments).models:
        files = read_files(resolve(model))
        found[model] = [*check_files(files), *check_weights(files)]
        print(f"{model}: {'no fault found' if is_sound(found[model]) else 'FAULTS'}")
        for finding in found[model]:
            if finding.state != "good":
                print(f"  {finding.state}: {finding.text} ({finding.evidence})")
                print(f"        {finding.remedy}")
    return found


if __name__ == "__main__":
    main()
