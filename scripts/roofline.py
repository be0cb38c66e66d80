"""Make the tables of docs/scale-tables.md: `python scripts/roofline.py > tables.md`.

Compiles some forty programs, which take seconds to minutes each. With --keep FILE, compiled results are stored there and reused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from linnet.config import presets
from linnet.config.schema import RunConfig
from linnet.plan import chips, planning, result, tables
from linnet.plan.result import Plan
from linnet.plan.serving import plan_serving

CHIPS = ("tpu-v5p", "h100")
REMAT_DEVICES = {"enwik8": 8, "pg19": 8, "imagenet64": 8, "grok-1": 256}
SERVED = (
    ("enwik8", "bfloat16", ""),
    ("pg19", "bfloat16", ""),
    ("imagenet64", "bfloat16", ""),
    ("grok-1", "int8", "model=8"),
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keep", type=Path)
    arguments.add_argument(
        "--most", type=int, default=result.MAX_DEVICES, help="devices of a mesh that is compiled whole"
    )
    arguments.add_argument("--presets", nargs="*", default=list(tables.PRESETS))
    given = arguments.parse_args()
    print("### Chips\n\n" + tables.chips_table())
    for preset in given.presets:
        plans = {
            "weak": compiled([tables.weak(preset, n) for n in tables.DEVICES], given.keep, given.most),
            "strong": compiled(
                [run for n in tables.DEVICES if (run := tables.strong(preset, n))], given.keep, given.most
            ),
        }
        for chip in CHIPS:
            rows = tables.ROWS[preset]
            print(f"\n### {preset} on {chip}\n\nWeak scaling, {rows} row{'s' * (rows > 1)} per device:\n")
            print(tables.table(plans["weak"], chips.get(chip)))
            print(f"\nStrong scaling, {plans['strong'][0].rows} rows in total:\n")
            print(tables.table(plans["strong"], chips.get(chip)), flush=True)
    remats = [
        run for preset in given.presets for run in planning.remat_plans(tables.weak(preset, REMAT_DEVICES[preset]))
    ]
    print(
        "\n## Rematerialization\n\n" + tables.remat_table(remats, compiled(remats, given.keep, given.most)), flush=True
    )
    served = []
    for preset, weights, mesh in SERVED:
        served.append((preset, plan_serving(dataclasses.replace(presets.get(preset), mesh=mesh), weights)))
    for chip in CHIPS:
        print(f"\n### Sessions on {chip}\n\n" + tables.sessions_table(served, chips.get(chip)))
        print("\n" + tables.replicas_table(served, chips.get(chip)))


def compiled(runs: list[RunConfig], keep: Path | None, most: int) -> list[Plan]:
    known = json.loads(keep.read_text()) if keep is not None and keep.exists() else {}
    keys = [_key(run) for run in runs]
    missing = {key: run for key, run in zip(keys, runs, strict=True) if key not in known}
    for key, plan in zip(missing, planning.plan_apart(list(missing.values()), most) if missing else (), strict=True):
        print(f"compiled {key}", file=sys.stderr, flush=True)
        known[key] = result.to_json(plan)
        if keep is not None:
            keep.write_text(json.dumps(known))
    return [result.from_json(known[key]) for key in keys]


def _key(run: RunConfig) -> str:
    again = "" if run.model.remat == presets.get(run.preset).model.remat else f" {run.model.remat}"
    return f"{run.preset} {run.mesh} {run.data.batch_size}{again}"


if __name__ == "__main__":
    main()
