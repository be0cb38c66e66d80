"""Make the tables of docs/scale-tables.md: `python scripts/roofline.py > tables.md`.

It compiles about forty programs, which take seconds to minutes each. With --cache FILE, compiled results are stored there and reused.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path

from linnet.config import presets
from linnet.config.schema import RunConfig
from linnet.plan import chips, planning, result, tables
from linnet.plan.result import TrainingPlan
from linnet.plan.serving import ServingPlan, plan_serving

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
    arguments.add_argument("--cache", type=Path, help="file in which compiled results are stored")
    arguments.add_argument(
        "--max-devices", type=int, default=result.MAX_DEVICES, help="maximum size of a mesh that is compiled completely"
    )
    arguments.add_argument("--presets", nargs="*", default=list(tables.PRESETS))
    args = arguments.parse_args()
    plan = functools.partial(compile_plans, cache=args.cache, max_devices=args.max_devices)
    print("### Chips\n\n" + tables.chips_table())
    for preset in args.presets:
        plans = {
            "weak": plan([tables.weak(preset, n) for n in tables.DEVICES]),
            "strong": plan([run for n in tables.DEVICES if (run := tables.strong(preset, n))]),
        }
        for chip in CHIPS:
            rows = tables.ROWS[preset]
            print(f"\n### {preset} on {chip}\n\nWeak scaling, {rows} row{'s' * (rows > 1)} per device:\n")
            print(tables.table(plans["weak"], chips.get(chip)))
            print(f"\nStrong scaling, {plans['strong'][0].rows} rows in total:\n")
            print(tables.table(plans["strong"], chips.get(chip)), flush=True)
    remats = [
        run for preset in args.presets for run in planning.remat_plans(tables.weak(preset, REMAT_DEVICES[preset]))
    ]
    print("\n## Rematerialization\n\n" + tables.remat_table(remats, plan(remats)), flush=True)
    served = serving_plans()
    for chip in CHIPS:
        print(f"\n### Sessions on {chip}\n\n" + tables.sessions_table(served, chips.get(chip)))
        print("\n" + tables.replicas_table(served, chips.get(chip)))


def serving_plans() -> list[tuple[str, ServingPlan]]:
    return [
        (preset, plan_serving(dataclasses.replace(presets.get(preset), mesh=mesh), weights))
        for preset, weights, mesh in SERVED
    ]


def compile_plans(runs: list[RunConfig], cache: Path | None, max_devices: int) -> list[TrainingPlan]:
    known = json.loads(cache.read_text()) if cache is not None and cache.exists() else {}
    keys = [_key(run) for run in runs]
    missing = {key: run for key, run in zip(keys, runs, strict=True) if key not in known}
    plans = planning.plan_in_subprocess(list(missing.values()), max_devices) if missing else ()
    for key, plan in zip(missing, plans, strict=True):
        print(f"compiled {key}", file=sys.stderr, flush=True)
        known[key] = result.to_json(plan)
        if cache is not None:
            cache.write_text(json.dumps(known))
    return [result.from_json(known[key]) for key in keys]


def _key(run: RunConfig) -> str:
    remat = "" if run.model.remat == presets.get(run.preset).model.remat else f" {run.model.remat}"
    return f"{run.preset} {run.mesh} {run.data.batch_size}{remat}"


if __name__ == "__main__":
    main()
