"""`linnet quickstart`: train, evaluate and sample a small model, and write its report, in minutes."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import json
import lzma
from pathlib import Path

from linnet.api.training import run_training
from linnet.cli.parse import parse
from linnet.config import codec, presets
from linnet.config.schema import RunConfig
from linnet.core.errors import invalid

# MFU of training this preset relative to the measured matmul rate (measured on two cores). Only used to choose the number of steps
# for the requested minutes.
EXPECTED_MFU = 0.30
SECONDS_BESIDES = 20  # compiling, evaluating, sampling


@dataclasses.dataclass(frozen=True)
class Flags:
    minutes: float = 3.0
    """Approximate training time on this machine, in minutes."""
    out: Path = Path("runs/quickstart")
    """Run folder. An existing quickstart run in it is resumed."""
    seed: int = 0
    """Random seed of the initialization and data order."""
    quiet: bool = False
    """Do not print progress."""


def quickstart_command(argv: list[str]) -> int:
    flags = parse(
        Flags,
        argv,
        "quickstart",
        "Train a small linear-time language model on the source code of this Python's standard library, evaluate it, sample from "
        "it, and write a report.",
    )
    if not 0 < flags.minutes < 10_000:
        raise invalid("--minutes", flags.minutes, "above 0", "use 3")
    from linnet.parallel.cluster import init_jax
    from linnet.runs.folder import RunFolder
    from linnet.train.interrupt import EXIT_INTERRUPTED

    init_jax()
    folder = RunFolder(flags.out)
    cfg = codec.load(folder.config) if folder.config.exists() else sized(flags.minutes, flags.seed)
    if not run_training(cfg, flags.out, quiet=flags.quiet).finished:
        return EXIT_INTERRUPTED
    conclude(cfg, flags.out, flags.quiet)
    return 0


def sized(minutes: float, seed: int) -> RunConfig:
    """Return the preset with as many steps as this machine completes in the time, so that the schedule ends with it."""
    from linnet.models import registry
    from linnet.train.throughput import matmul_flops

    cfg = presets.get("quickstart")
    work = 3 * registry.get(cfg.family).flops_per_token(cfg.model) * cfg.data.batch_size * cfg.tokens.update_len
    seconds = max(minutes * 60 - SECONDS_BESIDES, minutes * 30)
    every = max(5, int(seconds * matmul_flops()[0] * EXPECTED_MFU / work) // 4)
    steps = 4 * every  # so that the last step is evaluated
    return dataclasses.replace(
        cfg,
        seed=seed,
        optim=dataclasses.replace(cfg.optim, steps=steps, warmup_steps=min(cfg.optim.warmup_steps, steps // 10)),
        train=dataclasses.replace(cfg.train, eval_every=every, checkpoint_every=every),
    )


def conclude(cfg: RunConfig, out: Path, quiet: bool) -> None:
    """Print the model's bits per byte on held-out text beside three compressors, a sample and next steps, and write the report."""
    from rich.console import Console
    from rich.table import Table

    from linnet.data import load_dataset
    from linnet.evaluate.language_model import evaluate
    from linnet.generate.samples import sample_text
    from linnet.report.build import write_report
    from linnet.runs.load import open_run
    from linnet.runs.metrics import replace_text
    from linnet.train.progress import track

    run = open_run(out)
    data = load_dataset(cfg.tokens, cfg.seed)
    n_batch = -(-data.test.n_windows // cfg.data.batch_size)
    result = evaluate(
        run.lm,
        cfg,
        run.params,
        run.buffers,
        data,
        "test",
        progress=lambda batches: track(batches, "held-out text", n_batch, quiet=quiet),
    )
    compressors = compressed_bits_per_byte(data.raw("test"))
    text = sample_text(run.lm, cfg, run.params, run.buffers, run.vocabulary, prompt="def ", n_tokens=400, seed=cfg.seed)
    console = Console()
    table = Table("on text it has never seen", "bits per byte", box=None)
    rows = {**compressors, "this model": result.bits_per_byte}
    for name, bits in sorted(rows.items(), key=lambda row: -row[1]):
        table.add_row(name, f"{bits:.3f}", style="bold" if name == "this model" else None)
    console.print(table)
    console.print("\nWhat it writes:\n", style="bold")
    print(text)
    # Written after it is printed: a full disk must not lose the result.
    replace_text(out / "eval_test.json", json.dumps(result.to_json() | {"step": run.step}, indent=2) + "\n")
    figures = {"model": result.to_json(), "compressors": compressors}
    replace_text(out / "quickstart.json", json.dumps(figures, indent=2) + "\n")
    replace_text(out / "samples" / "quickstart.txt", text)
    report = write_report(out)
    console.print("\nNext:", style="bold")
    print(
        f"  open {report}\n"
        f"  linnet sample {out} --prompt 'class ' --temperature 0.8\n"
        f"  linnet quickstart --minutes 15 --out runs/longer\n"
        "  linnet train quickstart --data.source YOUR_FOLDER --out runs/mine"
    )


def compressed_bits_per_byte(text: bytes) -> dict[str, float]:
    packed = {
        "gzip": gzip.compress(text, 9),
        "bzip2": bz2.compress(text, 9),
        "xz": lzma.compress(text, preset=9 | lzma.PRESET_EXTREME),
    }
    return {name: 8 * len(data) / len(text) for name, data in packed.items()}
