"""`linnet import` and `linnet export`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import tyro

from linnet.cli.advice import needed_prompt
from linnet.cli.import_vq import OptimFlags, must_be_unused
from linnet.cli.parse import parse
from linnet.config import RunConfig
from linnet.errors import UserError, refuse
from linnet.families.prior.config import PriorConfig
from linnet.weights import Weights

if TYPE_CHECKING:
    from linnet.data.tokenizer import Rules, Tokenizer


@dataclasses.dataclass(frozen=True)
class ImportFlags:
    kind: Annotated[Literal["transformer-vq", "safetensors", "grok-1", "dalle2-prior"], tyro.conf.Positional]
    """What the file is: an official Transformer-VQ checkpoint (Flax msgpack, a folder of them, of which the newest checkpoint_N is
    read, or an .npz of '/'-joined names), Linnet's own export,
    Grok-1: the release's folder with ckpt-0, or a Hugging Face conversion (a .safetensors file, or the folder of several), or a
    checkpoint of DALLE2-pytorch's prior (.pth: a trainer's, a model's, an average's)."""
    file: Annotated[Path | None, tyro.conf.Positional] = None
    out: Path | None = None
    """The folder of the new run (dalle2-prior: runs/FILE if not given)."""
    block_len: int | None = None
    """As the model was trained, where the file does not tell (the paper's: 512)."""
    mem_len: int | None = None
    sequence_len: int | None = None
    """transformer-vq: tokens of one sequence, after which the state is reset (the paper's: 8192); the loss of an evaluation
    depends on it."""
    update_len: int | None = None
    """transformer-vq: tokens of a sequence in one update (the paper's: 2048)."""
    pe_lam: float | None = None
    e_scale: float | None = None
    """The paper's: 1 for enwik8, 0.005 for PG-19 and ImageNet64."""
    agg_cache: bool | None = None
    source: str | None = None
    """Data to evaluate the run on: text (this Python's standard library if not given), or pairs of embeddings for a prior."""
    tokenizer: str | None = None
    """What the model's ids mean, kept with the run: a sentencepiece .model, a tokenizer.json, or a folder with one. The file of a
    model from elsewhere is used as its own library uses it, an export's as the exported run used it."""
    begin_id: Literal["end", "none"] | int | None = None
    """What stands in front of every sequence: `end` (the id that ends a document), `none`, or an id. If not given: what the file
    says, else none for grok-1 (the release reads bare prompts) and `end` for others."""
    settings: Path | None = None
    """grok-1: a config.json with the model's sizes; one that lies in or beside the checkpoint is used if not given, else the
    published sizes. dalle2-prior: the JSON it was trained with, for what weights do not tell. transformer-vq: a JSON object of
    launch.py's arguments."""
    optim: OptimFlags = dataclasses.field(default_factory=OptimFlags)
    which: Literal["ema", "online"] = "ema"
    """dalle2-prior: the averaged weights or the trained ones, where the file has both."""
    text_encodings: bool = False
    """dalle2-prior: it was trained with the token encodings of its texts, which weights do not show (and --settings states)."""
    release: str | None = None
    """dalle2-prior: the release of DALLE2-pytorch that trained it, as in 1.4.2, instead of the one saved in the file. Networks with
    the same weights compute different things in different releases."""
    optimizer: Literal["auto", "keep", "fresh"] = "auto"
    """dalle2-prior, transformer-vq: the optimizer state and step (and average) of a trainer's checkpoint, from which `linnet train`
    continues. `auto`: kept where the file has them; `keep`: an error where it has not; `fresh`: training starts at step 0."""
    weights: Weights = "float32"
    """grok-1: bring matrices to so few bits while importing. What has fewer already stays as it is."""
    max_unpacked_gb: float | None = None
    """transformer-vq: refuse an .npz that unpacks to more gigabytes than this. If not given: 100 times its packed size, and at least
    0.27."""
    plan: bool = False
    """grok-1: only say what importing and serving need, and on how many devices the model fits. FILE may be left out."""


def import_command(argv: list[str]) -> int:
    flags = parse(
        ImportFlags,
        argv,
        "import",
        "Makes a run of weights from elsewhere: it can be evaluated, sampled and trained further.",
    )
    from linnet.cli.startup import prepare_jax
    from linnet.train.interchange.stored_weights import held_leaves, write_stored_run
    from linnet.train.interchange.weights_file import import_safetensors, is_float32
    from linnet.train.runs import write_run

    if flags.kind != "transformer-vq":
        must_be_unused(flags)
    if flags.plan:
        return _plan(flags)
    if flags.kind == "dalle2-prior":
        from linnet.cli.import_prior import import_prior

        return import_prior(flags)
    if flags.text_encodings:
        needs = "left out: only dalle2-prior has token encodings"
        raise refuse("--text-encodings", flags.text_encodings, needs, "leave it out")
    if flags.release is not None:
        raise refuse("--release", flags.release, "left out: only dalle2-prior has releases", "leave it out")
    if flags.file is None or flags.out is None:
        raise refuse("FILE" if flags.file is None else "--out", None, "given", "name what to import, and --out RUN")
    if (flags.out / "config.json").exists():
        raise UserError(f"{flags.out} holds a run already, and nothing is overwritten. Fix: choose another --out.")
    prepare_jax()
    if flags.kind == "grok-1":
        return _grok(flags, flags.file, flags.out)
    continued: dict[str, Any] = {}
    if flags.kind == "safetensors":
        from linnet import config as configs

        params, buffers, values = import_safetensors(flags.file)
        values.pop("version")
        cfg = configs.exported_from_dict(values)
        tokenizer = _exported_tokenizer(flags, flags.file, cfg)
    else:
        tokenizer = _tokenizer(flags, "released")
        from linnet.cli.import_vq import import_vq

        imported = import_vq(flags, flags.file)
        cfg, params, buffers = imported.cfg, imported.params, imported.buffers
        continued = {"step": imported.step, "opt_state": imported.opt_state}
        for remark in imported.remarks:
            print(remark)
    if flags.source is not None:
        places = {"images": None, "texts": None, "metadata": None, "encodings": None} if cfg.family == "prior" else {}
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, source=flags.source, **places))
    if tokenizer is not None:
        cfg = dataclasses.replace(cfg, model=_with_tokenizer(cfg.model, tokenizer, flags))
    cfg = dataclasses.replace(cfg, model=_with_begin(cfg.model, flags))
    if is_float32(params):
        write_run(flags.out, cfg, params, buffers, **continued)
        if tokenizer is not None:
            tokenizer.save(flags.out)
    else:  # an optimiser has no use for it
        finish = (lambda folder: None) if tokenizer is None else tokenizer.save
        write_stored_run(flags.out, cfg, held_leaves(params), finish, print)
    print(
        f"The run is in {flags.out}. Next: linnet eval {flags.out}; linnet sample {flags.out}{needed_prompt(cfg.model)}"
    )
    return 0


def _tokenizer(flags: ImportFlags, rules: Rules | None) -> Tokenizer | None:
    """`rules` are for a file; a folder with a saved tokenizer has its own."""
    from linnet.data.tokenizer import open_tokenizer

    if flags.tokenizer is None:
        return None
    return open_tokenizer(flags.tokenizer, rules=None if Path(flags.tokenizer).is_dir() else rules)


def _exported_tokenizer(flags: ImportFlags, file: Path, cfg: RunConfig) -> Tokenizer | None:
    """By the rules of the exported run. Exports from before there was a choice were exact, but for Grok-1."""
    from linnet.train.interchange.weights_file import exported_tokenizer

    if cfg.family == "prior":
        return _tokenizer(flags, None)
    known = exported_tokenizer(file) or {}
    rules = known.get("rules", "released" if cfg.writer.bos_id is None else "exact")
    tokenizer = _tokenizer(flags, "released" if rules == "released" else "exact")
    if tokenizer is not None and known.get("fingerprint") not in (None, tokenizer.fingerprint):
        print(f"Note: the exported run had another tokenizer ({known.get('kind')}, {str(known['fingerprint'])[:12]}).")
    return tokenizer


def _with_begin(model: Any, flags: ImportFlags) -> Any:
    if flags.begin_id is None:
        return model
    if isinstance(model, PriorConfig):
        raise refuse("--begin-id", flags.begin_id, "left out: a prior reads embeddings", "leave it out")
    return dataclasses.replace(model, begin_id=None if flags.begin_id == "none" else flags.begin_id)


def _with_tokenizer(model: Any, tokenizer: Tokenizer, flags: ImportFlags) -> Any:
    if isinstance(model, PriorConfig):
        raise refuse("--tokenizer", flags.tokenizer, "left out: a prior reads embeddings", "leave it out")
    if tokenizer.n_vocab > model.n_vocab:
        needs = f"at most the model's {model.n_vocab} ids (it has {tokenizer.n_vocab})"
        raise refuse("--tokenizer", flags.tokenizer, needs, "name the one that the model was trained with")
    return dataclasses.replace(model, end_id=tokenizer.end_id)


def _plan(flags: ImportFlags) -> int:
    from linnet.train.interchange.grok.importing import plan_import
    from linnet.train.interchange.plan import show

    if flags.kind != "grok-1":
        raise refuse("--plan", flags.kind, "used with grok-1", "leave it out: other models are small")
    print(show(plan_import(flags.file, flags.settings, flags.weights)))
    return 0


def _grok(flags: ImportFlags, file: Path, out: Path) -> int:
    from linnet.train.interchange.grok.importing import find_grok, import_grok, run_config

    found = find_grok(file, flags.settings)
    # A settings file that states a begin id is of a model that Linnet trained, with a tokenizer used as Linnet uses it.
    tokenizer = _tokenizer(flags, "released" if found.cfg.bos_id is None else None)
    print(f"Sizes: {found.settings or 'as published'}.")
    model = _with_begin(found.cfg if tokenizer is None else _with_tokenizer(found.cfg, tokenizer, flags), flags)
    finish = (lambda folder: None) if tokenizer is None else tokenizer.save
    import_grok(found, run_config(model, flags.source), out, flags.weights, finish=finish, say=print)
    front = "nothing" if model.bos_id is None else f"id {model.bos_id}"
    print(f"In front of every sequence: {front}.")
    print(f"The run is in {out}. Next: linnet sample {out}{needed_prompt(model)}; linnet serve {out}")
    return 0


@dataclasses.dataclass(frozen=True)
class ExportFlags:
    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    out: Path | None = None
    """The file (grok-hf: the folder); RUN.safetensors, RUN-transformer-vq/checkpoint_STEP, RUN.npz, RUN-hf or RUN.pth beside the run
    if not given."""
    format: Literal[
        "safetensors", "transformer-vq", "transformer-vq-npz", "grok-hf", "dalle2-prior", "dalle2-trainer"
    ] = "safetensors"
    """`safetensors`: weights, codebooks and config, read back bit for bit by `linnet import safetensors`; `transformer-vq`: the
    Flax msgpack file that the official code loads (weights, codebooks, optimizer state, step); `transformer-vq-npz` (or
    `transformer-vq` with --out FILE.npz): the official tree as .npz, weights and codebooks only; `grok-hf`: safetensors by the
    names of Grok-1's Hugging Face conversions, 8-bit weights as float32;
    `dalle2-prior`: a prior's averaged weights by DALLE2-pytorch's names, as the .pth that its tracker saves as `model` (or, with an
    --out that ends in .safetensors, the same state dict there); `dalle2-trainer`: a whole trainer checkpoint with optimizer state."""
    checkpoint: str = "best"
    """`best` (by validation loss; the latest if there is none), `latest`, or a step."""


def export_command(argv: list[str]) -> int:
    flags = parse(
        ExportFlags, argv, "export", "Writes a run's weights (the moving average where it keeps one) to one file."
    )
    from linnet import config as configs
    from linnet.cli.startup import prepare_jax
    from linnet.data.locations import for_other_machines
    from linnet.train.interchange.weights_file import export_safetensors
    from linnet.train.runs import open_run

    prepare_jax()
    if flags.format in ("dalle2-prior", "dalle2-trainer"):
        from linnet.cli.export_prior import export_prior

        return export_prior(flags)
    if flags.format.startswith("transformer-vq"):
        from linnet.cli.export_vq import export_vq

        return export_vq(flags.run, flags.out, flags.checkpoint, npz=flags.format.endswith("-npz"))
    run = open_run(flags.run, flags.checkpoint)
    suffix = {"safetensors": ".safetensors", "grok-hf": "-hf"}[flags.format]
    out = flags.out or flags.run.with_name(flags.run.name + suffix)
    needed = {"grok-hf": "moe"}.get(flags.format, run.cfg.family)
    if run.cfg.family != needed:
        raise refuse("--format", flags.format, f"one for {run.cfg.family} models", "use safetensors")
    if flags.format == "grok-hf":
        from linnet.train.interchange.grok.hf import export_conversion

        n = export_conversion(run.params, cast(Any, run.cfg.model), out)
        print(f"Wrote {n} file{'s' if n > 1 else ''} to {out} (step {run.step}).")
    else:
        about = configs.to_json(for_other_machines(run.cfg))
        mark = export_safetensors(run.params, run.buffers, about, out, _about_tokenizer(flags.run))
        print(f"Wrote {out} (step {run.step}, fingerprint {mark[:12]}).")
    return 0


def _about_tokenizer(run: Path) -> dict[str, Any] | None:
    from linnet.data.tokenizer import has_tokenizer, open_tokenizer

    if not has_tokenizer(run):
        return None
    tokenizer = open_tokenizer(str(run))
    return {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint, "rules": tokenizer.rules}
