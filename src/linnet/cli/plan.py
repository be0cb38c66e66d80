"""`linnet plan`."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from linnet.cli.parse import base_config, parse
from linnet.config import presets
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError

if TYPE_CHECKING:
    from linnet.plan.chips import Chip
    from linnet.plan.outcome import Plan

WORDS = """Says what a run would take on devices that are not here: the real update is compiled for a mesh of them, and read. Nothing
is allocated, and nothing runs.

With --devices alone, meshes of so many devices are tried, and the one that fits with the least communication is recommended."""


@dataclasses.dataclass(frozen=True)
class Flags:
    config: Annotated[tyro.conf.AvoidSubcommands[RunConfig], tyro.conf.arg(name="")]
    devices: int | None = None
    """Number of devices. Without --mesh, search for the best mesh."""
    hbm: str | None = None
    """Memory per device, such as 16GB. Default: that of the chip."""
    chip: str = "tpu-v5e"
    """Chip whose published specifications are used: tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e, a100 or h100."""
    compare_remat: bool = False
    """Compare all rematerialization settings on the same mesh."""
    serve: bool = False
    """Plan serving instead of training: weights and slots."""
    slots: int = 8
    """With --serve: number of concurrent sequences."""
    weights: str = "bfloat16"
    """With --serve: weight dtype (float32, bfloat16 or int8)."""
    json: bool = False
    """Print one JSON object."""


def plan_command(argv: list[str]) -> int:
    flags = _flags(argv)
    from linnet.plan import chips
    from linnet.plan.sizes import parse_size

    chip = chips.get(flags.chip)
    hbm = chip.hbm if flags.hbm is None else parse_size(flags.hbm, "--hbm")
    if flags.serve:
        return _plan_serving(flags, chip, hbm)
    return _plan_training(flags, chip, hbm)


def _flags(argv: list[str]) -> Flags:
    words = WORDS
    if not argv or argv[0].startswith("-"):
        known = f"Presets: {', '.join(presets.PRESETS)}; or the path of a config.json or of a run."
        if argv and argv[0] not in ("-h", "--help"):
            raise UserError(f"name a preset first, as in `linnet plan enwik8 {' '.join(argv)}`. {known}")
        words += f"\n\nPRESET comes first. {known} The defaults below are those of quickstart."
        parse(Flags, ["--help"], "plan PRESET", words, Flags(config=presets.get("quickstart")))
    return parse(Flags, argv[1:], f"plan {argv[0]}", words, Flags(config=base_config(argv[0])))


def _plan_training(flags: Flags, chip: Chip, hbm: float) -> int:
    from linnet.plan import planning

    cfg = flags.config
    planning.check_agree(cfg, flags.devices)
    runs = [cfg]
    if flags.devices is not None and not cfg.mesh:
        given, cfg = cfg, planning.with_enough_rows(cfg, flags.devices)
        if cfg != given:
            rows = f"data.batch_size {given.data.batch_size} fits no mesh of {flags.devices} devices: planned with"
            _say(f"{rows} {cfg.data.batch_size}", quiet=False)
        runs = planning.short_list(cfg, flags.devices, hbm)
    if flags.compare_remat:
        runs = [one for run in runs for one in planning.remat_plans(run)]
    plans: list[Plan] = []
    for run, plan in zip(runs, planning.plan_apart(runs), strict=True):
        plans.append(plan)
        _say(f"compiled {run.preset} for {plan.mesh or 'one device'}, remat {run.model.remat}", quiet=flags.json)
    best = planning.recommended(plans, chip, hbm)
    advice = planning.suggestions(cfg, plans, hbm) if best is None else []
    if flags.json:
        print(json.dumps(_as_json(runs, plans, best, advice, chip, hbm)))
    else:
        _print(runs, plans, best, advice, chip, hbm)
    return 0


def _print(
    runs: list[RunConfig], plans: list[Plan], best: Plan | None, advice: list[str], chip: Chip, hbm: float
) -> None:
    from linnet.plan import words

    if len(plans) > 1:
        rows = [(*words.row(plan, chip, hbm), run.model.remat) for run, plan in zip(runs, plans, strict=True)]
        print(words.columns((*words.HEADER, "remat"), rows), end="\n\n")
    if best is None:
        print(words.format_report(min(plans, key=lambda plan: plan.memory.total), chip, hbm))
        print("What would fit: " + "; ".join(advice) + ".")
        return
    print(words.format_report(best, chip, hbm))
    if len(plans) > 1:
        run = runs[plans.index(best)]
        print(f"Recommended: --mesh {best.mesh or repr('')} --model.remat {run.model.remat}")


def _as_json(
    runs: list[RunConfig], plans: list[Plan], best: Plan | None, advice: list[str], chip: Chip, hbm: float
) -> dict[str, Any]:
    from linnet.plan import outcome, roofline

    rows: list[dict[str, Any]] = []
    for run, plan in zip(runs, plans, strict=True):
        times = roofline.times(plan.program, plan.memory.state, chip, plan.dtype)
        rows.append(
            {
                "remat": run.model.remat,
                **outcome.to_json(plan),
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


def _say(words: str, *, quiet: bool) -> None:
    if not quiet:
        print(words, file=sys.stderr, flush=True)


def _plan_serving(flags: Flags, chip: Chip, hbm: float) -> int:
    from linnet.plan import serving

    plan = serving.plan_serving(flags.config, flags.weights)
    if flags.json:
        figures = {**dataclasses.asdict(plan), "slots": flags.slots, "slots_that_fit": plan.n_slot(hbm)}
        print(json.dumps({"preset": flags.config.preset, "hbm_bytes": hbm, "chip": chip.name, **figures}))
    else:
        print(serving.in_full(plan, flags.slots, hbm))
    return 0
