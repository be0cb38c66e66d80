"""`linnet import` and `linnet export`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.cli.convert_flags import ExportFlags, ImportFlags
from linnet.cli.import_vq import check_unused_flags
from linnet.cli.parse import parse
from linnet.cli.sample_flags import needed_prompt
from linnet.config.schema import PairsConfig, RunConfig
from linnet.core.errors import UserError, invalid
from linnet.models.model_config import TokenModelConfig

if TYPE_CHECKING:
    from linnet.tokenizers.base import EncodingRules, Tokenizer


def import_command(argv: list[str]) -> int:
    flags = parse(
        ImportFlags,
        argv,
        "import",
        "Convert a checkpoint of another program into a run, which can then be evaluated, sampled, served and trained further.",
    )
    from linnet.parallel.cluster import init_jax
    from linnet.runs.load import write_run
    from linnet.runs.weights import model_leaves, write_stored_run
    from linnet.runs.weights_file import import_safetensors, is_float32

    if flags.kind != "transformer-vq":
        check_unused_flags(flags)
    if flags.plan:
        return _plan(flags)
    if flags.kind == "dalle2-prior":
        from linnet.cli.import_prior import import_prior

        return import_prior(flags)
    if flags.text_encodings:
        needs = "left out: only dalle2-prior has token encodings"
        raise invalid("--text-encodings", flags.text_encodings, needs, "leave it out")
    if flags.release is not None:
        raise invalid("--release", flags.release, "left out: only dalle2-prior has releases", "leave it out")
    if flags.file is None or flags.out is None:
        raise invalid("FILE" if flags.file is None else "--out", None, "given", "name what to import, and --out RUN")
    if (flags.out / "config.json").exists():
        raise UserError(f"{flags.out} already contains a run, which is not overwritten. Fix: choose another --out.")
    init_jax()
    if flags.kind == "grok-1":
        return _grok(flags, flags.file, flags.out)
    training: dict[str, Any] = {}
    if flags.kind == "safetensors":
        from linnet.config import codec

        params, buffers, values = import_safetensors(flags.file)
        values.pop("version")
        cfg = codec.exported_from_dict(values)
        tokenizer = _exported_tokenizer(flags, flags.file, cfg)
    else:
        tokenizer = _tokenizer(flags, "released")
        from linnet.cli.import_vq import import_vq

        imported = import_vq(flags, flags.file)
        cfg, params, buffers = imported.cfg, imported.params, imported.buffers
        training = {"step": imported.step, "opt_state": imported.opt_state}
        for remark in imported.remarks:
            print(remark)
    if flags.source is not None:
        from linnet.runs.relocated import ELSEWHERE

        places = ELSEWHERE if isinstance(cfg.data, PairsConfig) else {}
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, source=flags.source, **places))
    if tokenizer is not None:
        cfg = dataclasses.replace(cfg, model=_with_tokenizer(cfg.model, tokenizer, flags))
    cfg = dataclasses.replace(cfg, model=_with_begin(cfg.model, flags))
    if is_float32(params):
        write_run(flags.out, cfg, params, buffers, **training)
        if tokenizer is not None:
            tokenizer.save(flags.out)
    else:  # weights below float32 cannot be trained, so they are stored without an optimizer
        finish = (lambda folder: None) if tokenizer is None else tokenizer.save
        write_stored_run(flags.out, cfg, model_leaves(params), finish, print)
    print(
        f"The run is in {flags.out}. Next: linnet eval {flags.out}; linnet sample {flags.out}{needed_prompt(cfg.model)}"
    )
    return 0


def _tokenizer(flags: ImportFlags, rules: EncodingRules | None) -> Tokenizer | None:
    """Open `--tokenizer`. `rules` apply to a file; a folder with a saved tokenizer has its own."""
    from linnet.tokenizers.load import open_tokenizer

    if flags.tokenizer is None:
        return None
    return open_tokenizer(flags.tokenizer, rules=None if Path(flags.tokenizer).is_dir() else rules)


def _exported_tokenizer(flags: ImportFlags, file: Path, cfg: RunConfig) -> Tokenizer | None:
    """Open the tokenizer with the rules of the exported run. Exports from before the setting existed are exact, except Grok-1."""
    from linnet.runs.weights_file import exported_tokenizer

    if not cfg.reads_tokens:
        return _tokenizer(flags, None)
    known = exported_tokenizer(file) or {}
    rules = known.get("rules", "released" if cfg.lm.bos_id is None else "exact")
    tokenizer = _tokenizer(flags, "released" if rules == "released" else "exact")
    if tokenizer is not None and known.get("fingerprint") not in (None, tokenizer.fingerprint):
        print(f"Note: the exported run had another tokenizer ({known.get('kind')}, {str(known['fingerprint'])[:12]}).")
    return tokenizer


def _with_begin(model: Any, flags: ImportFlags) -> Any:
    if flags.begin_id is None:
        return model
    if not isinstance(model, TokenModelConfig):
        raise invalid("--begin-id", flags.begin_id, "left out: this model reads embeddings", "leave it out")
    return dataclasses.replace(model, begin_id=None if flags.begin_id == "none" else flags.begin_id)


def _with_tokenizer(model: Any, tokenizer: Tokenizer, flags: ImportFlags) -> Any:
    if not isinstance(model, TokenModelConfig):
        raise invalid("--tokenizer", flags.tokenizer, "left out: this model reads embeddings", "leave it out")
    if tokenizer.n_vocab > model.n_vocab:
        needs = f"at most the model's {model.n_vocab} ids (it has {tokenizer.n_vocab})"
        raise invalid("--tokenizer", flags.tokenizer, needs, "name the one that the model was trained with")
    return dataclasses.replace(model, end_id=tokenizer.eos_id)


def _plan(flags: ImportFlags) -> int:
    from linnet.convert.grok.import_plan import format_plan
    from linnet.convert.grok.importer import plan_import

    if flags.kind != "grok-1":
        raise invalid("--plan", flags.kind, "used with grok-1", "leave it out: other models are small")
    print(format_plan(plan_import(flags.file, flags.settings, flags.weights)))
    return 0


def _grok(flags: ImportFlags, file: Path, out: Path) -> int:
    from linnet.convert.grok.importer import find_grok, import_grok, run_config

    found = find_grok(file, flags.settings)
    # A settings file with a BOS id belongs to a model trained by Linnet, so its tokenizer is opened with Linnet's default rules.
    tokenizer = _tokenizer(flags, "released" if found.cfg.bos_id is None else None)
    print(f"Model sizes: {found.settings or 'those of the release'}.")
    model = _with_begin(found.cfg if tokenizer is None else _with_tokenizer(found.cfg, tokenizer, flags), flags)
    finish = (lambda folder: None) if tokenizer is None else tokenizer.save
    import_grok(found, run_config(model, flags.source), out, flags.weights, finish=finish, log=print)
    print(f"BOS id, prepended to every sequence: {'none' if model.bos_id is None else model.bos_id}.")
    print(f"The run is in {out}. Next: linnet sample {out}{needed_prompt(model)}; linnet serve {out}")
    return 0


def export_command(argv: list[str]) -> int:
    flags = parse(
        ExportFlags,
        argv,
        "export",
        "Write a run's weights (the EMA weights, if it has them) in a format that other programs read.",
    )
    from linnet.config import codec
    from linnet.data.sources.locations import without_local_paths
    from linnet.parallel.cluster import init_jax
    from linnet.runs.folder import RunFolder
    from linnet.runs.load import open_run
    from linnet.runs.weights_file import export_safetensors

    cfg = codec.load(RunFolder(flags.run).config)
    if flags.format not in ("safetensors", *cfg.model.EXPORT_FORMATS):
        raise invalid("--format", flags.format, f"one for {cfg.family} models", "use safetensors")
    init_jax()
    if flags.format in ("dalle2-prior", "dalle2-trainer"):
        from linnet.cli.export_prior import export_prior

        return export_prior(flags)
    if flags.format.startswith("transformer-vq"):
        from linnet.cli.export_vq import export_vq

        return export_vq(flags.run, flags.out, flags.checkpoint, npz=flags.format.endswith("-npz"))
    run = open_run(flags.run, flags.checkpoint)
    suffix = {"safetensors": ".safetensors", "grok-hf": "-hf"}[flags.format]
    out = flags.out or flags.run.with_name(flags.run.name + suffix)
    if flags.format == "grok-hf":
        from linnet.convert.grok.hf import export_conversion
        from linnet.models.moe.config import MoEConfig

        n = export_conversion(run.params, run.cfg.model_as(MoEConfig), out)
        print(f"Wrote {n} file{'s' if n > 1 else ''} to {out} (step {run.step}).")
    else:
        description = codec.to_json(without_local_paths(run.cfg))
        fingerprint = export_safetensors(run.params, run.buffers, description, out, _describe_tokenizer(flags.run))
        print(f"Wrote {out} (step {run.step}, fingerprint {fingerprint[:12]}).")
    return 0


def _describe_tokenizer(run: Path) -> dict[str, Any] | None:
    from linnet.tokenizers.load import has_tokenizer, open_tokenizer

    if not has_tokenizer(run):
        return None
    tokenizer = open_tokenizer(str(run))
    return {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint, "rules": tokenizer.rules}
