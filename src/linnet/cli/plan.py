"""`linnet plan`."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from linnet.cli.flags import Layout
from linnet.cli.parse import parse
from linnet.config import presets
from linnet.config.resolve import base_config
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError

if TYPE_CHECKING:
    from linnet.plan.chips import Chip
    from linnet.plan.result import TrainingPlan

DESCRIPTION = """Estimate the memory, FLOPs and communication of a run on hardware you do not have: the real update is compiled for
the mesh and analyzed. Nothing is allocated or executed.

With --devices and without --mesh, several meshes are compared, and the one that fits with the least communication is recommended."""


@dataclasses.dataclass(frozen=True)
class Flags:
    layout: ClassVar[Layout] = {
        "": ("devices", "mesh", "chip", "hbm", "compare-remat", "data.batch-size", "model.remat", "json"),
        "serving": ("serve", "slots", "weights"),
        "optim": (),
        "data": (),
        "model": (),
        "train": (),
        "lora": (),
        "metadata": ("preset", "family", "seed", "data.base"),
    }
    config: RunConfig
    devices: int | None = None
    """Number of devices. Without --mesh, the best mesh is searched for. Default: one device, or those of --mesh."""
    hbm: str | None = None
    """Memory per device, such as 16GB. Default: that of the chip."""
    chip: str = "tpu-v5e"
    """Chip whose published specifications are used: tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e, a100 or h100."""
    compare_remat: bool = False
    """Compare all rematerialization settings on the same mesh."""
    serve: bool = False
    """Plan serving instead of training: memory for weights and slots."""
    slots: int = 8
    """With --serve: number of concurrent requests."""
    weights: str = "bfloat16"
    """With --serve: weight dtype (float32, bfloat16 or int8)."""
    json: bool = False
    """Print one JSON object instead of text."""


def plan_command(argv: list[str]) -> int:
    flags = _flags(argv)
    from linnet.plan import chips
    from linnet.plan.formatting import parse_size

    chip = chips.get(flags.chip)
    hbm = chip.hbm if flags.hbm is None else parse_size(flags.hbm, "--hbm")
    if flags.serve:
        return _plan_serving(flags, chip, hbm)
    return _plan_training(flags, chip, hbm)


def _flags(argv: list[str]) -> Flags:
    description = DESCRIPTION
    if not argv or argv[0].startswith("-"):
        known = f"Presets: {', '.join(presets.PRESETS)}; or the path of a config.json or of a run."
        if argv and argv[0] not in ("-h", "--help"):
            raise UserError(f"name a preset first, as in `linnet plan enwik8 {' '.join(argv)}`. {known}")
        description += f"\n\n{known} Flags follow the preset; the defaults below are those of quickstart."
        parse(Flags, ["--help"], "plan PRESET", description, Flags(config=presets.get("quickstart")))
    return parse(Flags, argv[1:], f"plan {argv[0]}", description, Flags(config=base_config(argv[0])))


def _plan_training(flags: Flags, chip: Chip, hbm: float) -> int:
    from linnet.plan import planning

    cfg = flags.config
    planning.check_agree(cfg, flags.devices)
    runs = [cfg]
    if flags.devices is not None and not cfg.mesh:
        given, cfg = cfg, planning.with_enough_rows(cfg, flags.devices)
        if cfg != given:
            rows = f"data.batch_size {given.data.batch_size} does not divide over any mesh of {flags.devices} devices"
            _log(f"{rows}; planning with {cfg.data.batch_size}", quiet=False)
        runs = planning.short_list(cfg, flags.devices, hbm)
    if flags.compare_remat:
        runs = [one for run in runs for one in planning.remat_plans(run)]
    plans: list[TrainingPlan] = []
    for run, plan in zip(runs, planning.plan_in_subprocess(runs), strict=True):
        plans.append(plan)
        _log(f"compiled {run.preset} for {plan.mesh or 'one device'}, remat {run.model.remat}", quiet=flags.json)
    best = planning.recommended(plans, chip, hbm)
    advice = planning.suggestions(cfg, plans, hbm) if best is None else []
    if flags.json:
        print(json.dumps(_as_json(runs, plans, best, advice, chip, hbm)))
    else:
        _print(runs, plans, best, advice, chip, hbm)
    return 0


def _print(
    runs: list[RunConfig],
    plans: list[TrainingPlan],
    best: TrainingPlan | None,
    advice: list[str],
    chip: Chip,
    hbm: float,
) -> None:
    from linnet.plan import formatting

    if len(plans) > 1:
        rows = [(*formatting.row(plan, chip, hbm), run.model.remat) for run, plan in zip(runs, plans, strict=True)]
        print(formatting.columns((*formatting.HEADER, "remat"), rows), end="\n\n")
    if best is None:
        print(formatting.format_report(min(plans, key=lambda plan: plan.memory.total), chip, hbm))
        print("What would fit: " + "; ".join(advice) + ".")
        return
    print(formatting.format_report(best, chip, hbm))
    if len(plans) > 1:
        run = runs[plans.index(best)]
        print(f"Recommended: --mesh {best.mesh or repr('')} --model.remat {run.model.remat}")


def _as_json(
    runs: list[RunConfig],
    plans: list[TrainingPlan],
    best: TrainingPlan | None,
    advice: list[str],
    chip: Chip,
    hbm: float,
) -> dict[str, Any]:
    from linnet.plan import result, roofline

    rows: list[dict[str, Any]] = []
    for run, plan in zip(runs, plans, strict=True):
        times = roofline.times(plan.program, plan.memory.state, chip, plan.dtype)
        rows.append(
            {
                "remat": run.model.remat,
                **result.to_json(plan),
                "bytes_per_device": plan.memory.total,
                "fits": plan.memory.total <= hbm,
                "flops": plan.program.flops * plan.n_device,
                "sent_bytes_per_device": plan.program.sent(),
                "seconds": {**dataclasses.asdict(times), "bound": times.bound},
            }
        )
    recommended = None if best is None else {"mesh": best.mesh, "remat": runs[plans.index(best)].model.remat}
    return {
        "preset": runs[0].preset,
        "chip": chip.name,
        "hbm_bytes": hbm,
        "plans": rows,
        "recommended": recommended,
        "what_would_fit": advice,
    }


def _log(message: str, *, quiet: bool) -> None:
    if not quiet:
        print(message, file=sys.stderr, flush=True)


def _plan_serving(flags: Flags, chip: Chip, hbm: float) -> int:
    from linnet.plan import serving

    plan = serving.plan_serving(flags.config, flags.weights)
    if flags.json:
        figures = {**dataclasses.asdict(plan), "slots": flags.slots, "slots_that_fit": plan.n_slot(hbm)}
        print(json.dumps({"preset": flags.config.preset, "hbm_bytes": hbm, "chip": chip.name, **figures}))
    else:
        print(serving.format_serving(plan, flags.slots, hbm))
    return 0
