"""The tables of docs/scale-tables.md: each preset on meshes of up to 4,096 devices, with a constant batch per device (weak
scaling) and with the preset's global batch (strong scaling)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from linnet.config import presets
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError
from linnet.parallel.mesh import data_parallel_size, mesh_text, parse_mesh
from linnet.plan import roofline
from linnet.plan.chips import CHIPS, Chip
from linnet.plan.formatting import format_bytes, format_seconds, markdown
from linnet.plan.result import TrainingPlan
from linnet.plan.serving import ServingPlan
from linnet.plan.sessions import TURN, traffic

DEVICES = (1, 8, 64, 256, 1024, 4096)
PRESETS = ("enwik8", "pg19", "imagenet64", "grok-1")
ROWS = {"enwik8": 4, "pg19": 4, "imagenet64": 4, "grok-1": 1}
"""Rows per device for weak scaling. Limited by memory: a row's carried state and activations take gigabytes."""


def weak(preset: str, n: int) -> RunConfig:
    """Return the run with a constant batch per device. Weights of large vq models are sharded over 8 devices, of grok-1 over 256."""
    if preset == "grok-1":
        expert = min(n, 8)
        fsdp = min(n // expert, 32)
        sizes = {"data": n // expert // fsdp, "fsdp": fsdp, "expert": expert}
    elif preset == "enwik8":
        sizes = {"data": n}
    else:
        fsdp = min(n, 8)
        sizes = {"data": n // fsdp, "fsdp": fsdp}
    return _sized(presets.get(preset), mesh_text(sizes), ROWS[preset] * n)


def strong(preset: str, n: int) -> RunConfig | None:
    """Return the run with the preset's global batch. Devices beyond one per row go to the model axis; None if that is not possible."""
    cfg = presets.get(preset)
    rows = min(n, cfg.data.batch_size)
    sizes = {"expert" if preset == "grok-1" else "data": rows, "model": n // rows}
    try:
        return _sized(cfg, mesh_text(sizes), cfg.data.batch_size)
    except UserError:
        return None


def _sized(cfg: RunConfig, mesh: str, rows: int) -> RunConfig:
    data: Any = dataclasses.replace(cfg.data, batch_size=rows)
    return dataclasses.replace(cfg, mesh=mesh, data=data)


HEADER = (
    "devices",
    "mesh",
    "rows per device",
    "state",
    "total",
    "sent",
    "compute",
    "memory",
    "communication",
    "bound by",
    "MFU",
)


def table(plans: Sequence[TrainingPlan], chip: Chip) -> str:
    return markdown(HEADER, [_row(plan, chip) for plan in plans]) + "\n\n" + where_it_stops(plans, chip)


def _row(plan: TrainingPlan, chip: Chip) -> list[str]:
    times = roofline.times(plan.program, plan.memory.state, chip, plan.dtype)
    share = roofline.share_of_peak(plan.useful_flops, plan.n_device, times.step, chip, plan.dtype)
    too_much = " (does not fit)" if plan.memory.total > chip.hbm else ""
    return [
        f"{plan.n_device:,}" + (" *" if plan.compiled_mesh is not None else ""),
        plan.mesh or "one device",
        f"{plan.rows / data_parallel_size(parse_mesh(plan.mesh)):g}",
        format_bytes(plan.memory.state),
        format_bytes(plan.memory.total) + too_much,
        format_bytes(plan.program.sent()),
        *(format_seconds(t) if t else "-" for t in (times.compute, times.memory, times.communication)),
        times.bound,
        f"{share:.0%}",
    ]


def where_it_stops(plans: Sequence[TrainingPlan], chip: Chip) -> str:
    """Return a sentence that names the first mesh bound by communication."""
    for plan in plans:
        times = roofline.times(plan.program, plan.memory.state, chip, plan.dtype)
        if times.communication > max(times.compute, times.memory):
            return f"Communication is the bottleneck from {plan.n_device:,} devices on."
    return f"Communication is not the bottleneck up to {plans[-1].n_device:,} devices."


def remat_table(runs: Sequence[RunConfig], plans: Sequence[TrainingPlan]) -> str:
    """Make a table of the memory savings and FLOPs cost of rematerialization."""
    header = ("preset", "mesh", "remat", "temporaries per device", "TFLOPs per device", "useful")
    rows = [
        (
            run.preset,
            plan.mesh,
            run.model.remat,
            format_bytes(plan.memory.temporary),
            f"{plan.program.flops / 1e12:,.4g}",
            f"{plan.useful_flops / plan.n_device / plan.program.flops:.0%}",
        )
        for run, plan in zip(runs, plans, strict=True)
    ]
    return markdown(header, rows)


def chips_table() -> str:
    header = ("chip", "bf16", "float32", "memory", "bandwidth", "links", "chips per domain", "network", "source")
    rows = [
        (
            chip.name,
            f"{chip.bf16_flops / 1e12:g} TFLOP/s",
            f"{chip.float32_flops / 1e12:g} TFLOP/s",
            format_bytes(chip.hbm),
            f"{format_bytes(chip.hbm_bandwidth)}/s",
            f"{format_bytes(chip.link)}/s",
            f"{chip.domain:,}",
            f"{format_bytes(chip.network)}/s",
            chip.source,
        )
        for chip in CHIPS.values()
    ]
    return markdown(header, rows)


def sessions_table(plans: Sequence[tuple[str, ServingPlan]], chip: Chip) -> str:
    """Make a table of the capacity of one replica of each preset."""
    header = (
        "preset",
        "replica",
        "weights per device",
        "session",
        "sessions",
        "time per token",
        f"responses of {TURN} tokens per second",
        "time to move a session",
        "responses that can start with a move",
        "store traffic at one move in ten",
    )
    rows: list[list[str]] = []
    for preset, plan in plans:
        capacity = traffic(plan, chip, "bfloat16")
        where = f"{plan.mesh or 'one device'}, {plan.weights}"
        sizes = [format_bytes(plan.weight_bytes), format_bytes(plan.session_bytes)]
        if capacity is None:
            rows.append([preset, where, *sizes, "none", *["-"] * 5])
            continue
        rows.append(
            [
                preset,
                where,
                *sizes,
                f"{capacity.sessions:,}",
                format_seconds(capacity.tick),
                f"{capacity.turns:.3g}",
                format_seconds(capacity.move),
                f"{capacity.moved_share:.0%}",
                f"{format_bytes(capacity.store_rate(0.1, plan.session_bytes))}/s",
            ]
        )
    return markdown(header, rows)


def replicas_table(plans: Sequence[tuple[str, ServingPlan]], chip: Chip) -> str:
    """Make a table of N replicas: concurrent sessions, responses per second and the load of a shared store."""
    header = ("replicas", *(f"{preset}: sessions, responses/s, store" for preset, _ in plans))
    capacities = [(plan, traffic(plan, chip, "bfloat16")) for _, plan in plans]
    rows: list[list[str]] = []
    for n in DEVICES:
        cells = [
            "-"
            if one is None
            else f"{n * one.sessions:,}, {n * one.turns:,.0f}, {format_bytes(n * one.store_rate(0.1, plan.session_bytes))}/s"
            for plan, one in capacities
        ]
        rows.append([f"{n:,}", *cells])
    return markdown(header, rows)
