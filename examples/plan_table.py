"""Will it fit, and how fast can it be? Published shapes on common devices, from configs alone.

python examples/plan_table.py [--context 4096] [--batch 1]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from verbatim.diagnose.capacity import Plan, make_plan
from verbatim.diagnose.devices import DEVICES
from verbatim.diagnose.footprint import footprint_of_config

CONFIGS = Path(__file__).parent / "configs"


def main(arguments: list[str] | None = None) -> list[Plan]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args(arguments)
    plans = []
    print(f"{'model':14} {'device':15} {'weights':>9} {'KV cache':>9} {'fits':5} {'ms/token':>9}")
    for path in sorted(CONFIGS.glob("*.json")):
        footprint = footprint_of_config(json.loads(path.read_text()), str(path))
        for device in DEVICES.values():
            plan = make_plan(
                footprint, device, context=options.context, batch=options.batch, output=256
            )
            plans.append(plan)
            print(
                f"{footprint.name:14} {device.name:15} {footprint.weight_bytes / 1e9:6.1f} GB "
                f"{plan.kv_sequence * plan.batch / 1e9:6.2f} GB {'yes' if plan.fits else 'no':5} "
                f"{plan.decode.seconds * 1e3:9.1f}"
            )
    return plans


if __name__ == "__main__":
    main()
