"""The tracker section of DALLE2-pytorch's settings: the checkpoint to load, the files to write, and remarks on ignored settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from linnet.convert.dalle2.schema import DallE2Config, Load, Log, Save
from linnet.core.errors import UserError, invalid
from linnet.core.local_path import check_local

WANDB_NAMES = ("entity", "project", "run_name", "run_id")


def has_wandb() -> bool:
    return importlib.util.find_spec("wandb") is not None


def find_loaded_file(parts: DallE2Config) -> Path | None:
    """Return the local checkpoint to start from; remote loaders raise."""
    load, old = parts.tracker.load, parts.load
    if load is not None and load.load_from is not None and not load.only_auto_resume:
        return _local_file("tracker.load.load_from", load.load_from, "tracker.load.file_path", load.file_path)
    if old.source is not None or old.resume:
        return _local_file("load.source", old.source or "none", "load.file_path", old.file_path)
    return None


def _local_file(field: str, kind: str, where: str, path: str | None) -> Path:
    if kind not in ("local", "file"):
        fix = f"download the checkpoint, and use local with {where}; or leave it out"
        raise invalid(field, kind, "local: Linnet downloads nothing", fix)
    if path is None:
        raise UserError(f"{where} is missing, though {field} is {kind}. Fix: name the checkpoint there.")
    check_local(where, path)
    return Path(path).expanduser()


def export_targets(parts: DallE2Config) -> tuple[str, ...]:
    """Return the local savers as `train.exports`. Paths are relative to the working directory, as in the reference."""
    found: list[str] = []
    for save in _local_savers(parts):
        for when, target in (("latest", save.save_latest_to), ("best", save.save_best_to)):
            if target is None or target is False:
                continue
            field = f"tracker.save.save_{when}_to"
            if not isinstance(target, str) or not target:
                raise invalid(field, target, "a path, or false", "name a .pth file")
            check_local(field, target)
            found.append(f"{when}:{save.save_type}:{Path(target).expanduser().absolute()}")
    return tuple(found)


def _local_savers(parts: DallE2Config) -> list[Save]:
    return [save for save in parts.tracker.save if save.save_to == "local"]


def tracker_remarks(parts: DallE2Config) -> Iterator[str]:
    """Yield remarks on tracker settings that are applied differently or ignored."""
    tracker = parts.tracker
    log = tracker.log or Log(wandb_entity=tracker.wandb_entity, wandb_project=tracker.wandb_project)
    if tracker.overwrite_data_path:
        yield "tracker.overwrite_data_path is ignored: an existing run is resumed, never overwritten."
    if tracker.kind == "wandb" and not has_wandb():
        yield (
            "The tracker is wandb, which is not installed, so metrics go to metrics.jsonl only. For both: "
            "pip install 'linnet-lm[wandb]'."
        )
    named = ", ".join(f"wandb_{name}" for name in WANDB_NAMES if getattr(log, f"wandb_{name}") is not None)
    if named and tracker.kind == "wandb" and has_wandb():
        yield f"{named} of the tracker are not used: set WANDB_ENTITY and WANDB_PROJECT; a run is named after its folder."
    elif named and tracker.kind != "wandb":
        yield f"{named} of the tracker are not used: it is {tracker.kind}."
    if log.resume or log.auto_resume or log.wandb_resume or (tracker.load and tracker.load.only_auto_resume):
        yield "The tracker's resume settings are not used: the same command resumes a run, in its folder and in wandb."
    if log.verbose or tracker.verbose:
        yield "The tracker's verbose is not used: progress is shown unless --quiet."
    if tracker.init_config:
        yield "tracker.init_config is not used: the tracker gets the run's config."
    if (load := tracker.load) is not None and load.load_from is None and load != Load(only_auto_resume=True):
        yield "tracker.load names no load_from, so nothing is loaded."
    if parts.load.source is None and not parts.load.resume and (parts.load.file_path or parts.load.run_path):
        yield "load names no source, so nothing is loaded."
    yield from _savers(parts)


def _savers(parts: DallE2Config) -> Iterator[str]:
    for target in export_targets(parts):
        when, content, path = target.split(":", 2)
        yield f"tracker.save: the {when} {content} is written to {path}, besides the run's own checkpoints."
    if parts.tracker.save and not export_targets(parts):
        yield (
            "tracker.save names no local file (save_latest_to or save_best_to), so checkpoints are kept in the run's folder alone. "
            "`linnet export RUN --format dalle2-trainer` writes one for the reference."
        )
    remote = sorted({save.save_to for save in parts.tracker.save} - {"local"})
    if remote:
        yield f"tracker.save to {' and '.join(remote)} is ignored: nothing is uploaded."
    local = _local_savers(parts)
    if any(save.save_meta_to is not None for save in local):
        yield "tracker.save.save_meta_to is ignored: the settings are config.json in the run's folder."
    if any(save.save_all for save in local):
        yield "tracker.save.save_all is ignored: use {epoch} or {samples_seen} in save_latest_to to keep several."
    odd = [n for n in ("huggingface_repo", "token_path", "wandb_run_path") if any(getattr(save, n) for save in local)]
    if odd:
        yield f"{', '.join(odd)} of tracker.save are not used: it saves to local files."
