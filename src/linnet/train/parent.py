"""Fine-tuning: resolving `--from`, and starting a run from the parent's weights.

A parent is a run (one of its checkpoints), a run of imported weights, or a file written by `linnet export`. It is read once, when the
fine-tuned run starts; after that the run has its own checkpoint of step 0 and no longer depends on the parent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh

from linnet.config import codec
from linnet.config.schema import RunConfig
from linnet.config.tuning import Parent
from linnet.core import quant
from linnet.core.errors import UserError, invalid
from linnet.core.local_path import check_local
from linnet.core.params import Spec, is_spec
from linnet.core.pytree import replace
from linnet.core.special_tokens import N_BYTE_IDS
from linnet.models.base import ModelFamily
from linnet.parallel import sharding
from linnet.runs import base_weights, stored_trainer, weights_file
from linnet.runs import weights as stored_weights
from linnet.runs.checkpoint import reader
from linnet.runs.checkpoint.manager import Checkpoints
from linnet.runs.folder import RunFolder
from linnet.runs.load import checkpoint_step, open_state
from linnet.runs.state import TrainState, init_state_from, model_weights, served_weights
from linnet.tokenizers.base import BytesTokenizer, Tokenizer
from linnet.tokenizers.load import has_tokenizer, open_tokenizer

Kind = Literal["run", "weights", "file"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Description of a parent, available without reading its weights."""

    path: Path
    kind: Kind
    cfg: RunConfig
    step: int
    fingerprint: str

    def parent(self, keep_optimizer: bool = False) -> Parent:
        path, step, fingerprint = str(self.path.absolute()), self.step, self.fingerprint
        return Parent(path=path, step=step, fingerprint=fingerprint, optimizer=keep_optimizer)


def find_origin(path: Path, which: str = "best") -> Origin:
    """Resolve the path given to `--from`. `which`: best, latest or a step, for a run with checkpoints."""
    check_local("--from", path)
    if path.is_file():
        return _file_origin(path)
    if not path.exists():
        raise UserError(
            f"--from {path}: there is no such run or file. Fix: name a run folder, or a file of `linnet export`."
        )
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise UserError(
            f"--from {path}: the folder is not a run (it has no config.json). Fix: name a run made by `linnet train` or `import`."
        )
    cfg = codec.load(folder.config)
    if stored_weights.is_weights_only(path):
        return Origin(path=path, kind="weights", cfg=cfg, step=0, fingerprint=stored_weights.fingerprint(path))
    step = checkpoint_step(path, which)
    return Origin(path=path, kind="run", cfg=cfg, step=step, fingerprint=_run_fingerprint(folder, cfg, step))


def _file_origin(path: Path) -> Origin:
    if path.suffix != ".safetensors":
        raise UserError(
            f"--from {path}: not a file of `linnet export`. Fix: import it first (`linnet import KIND {path} --out RUN`), then "
            "use --from RUN."
        )
    cfg, fingerprint = weights_file.read_header(path)
    return Origin(path=path, kind="file", cfg=cfg, step=0, fingerprint=fingerprint)


def _run_fingerprint(folder: RunFolder, cfg: RunConfig, step: int) -> str:
    """Hash the checksums of the weights that would be used. No array is read."""
    kinds = ("params/", "ema/", "buffers/")
    rows = reader.checksums(Checkpoints(folder.checkpoints, keep=1).path(step))
    described = {name: row for name, row in rows.items() if name.startswith(kinds)}
    if cfg.lora.rank:
        described |= {f"base/{name}": row for name, row in base_weights.checksums(folder.path).items()}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def tokenizer_of(cfg: RunConfig) -> Tokenizer | None:
    """Return the parent's tokenizer, or None if unknown: an exported file has no tokenizer, and some models read no tokens."""
    if cfg.parent is None or not cfg.reads_tokens:
        return None
    path = Path(cfg.parent.path)
    if path.is_dir() and has_tokenizer(path):
        return open_tokenizer(str(path))
    return BytesTokenizer() if cfg.lm.n_vocab == N_BYTE_IDS else None


# Checks.


def check_file_tokenizer(cfg: RunConfig, data: dict[str, Any] | None) -> None:
    """Check that the data was made with the tokenizer whose fingerprint the exported file records.

    The file does not contain the tokenizer itself; ids of another tokenizer would decode to different text. `data`: kind and
    fingerprint of the data's tokenizer.
    """
    if cfg.parent is None or not cfg.reads_tokens or data is None or not Path(cfg.parent.path).is_file():
        return
    file = Path(cfg.parent.path)
    known = weights_file.exported_tokenizer(file)
    if known is None and cfg.lm.n_vocab == N_BYTE_IDS:
        known = {"kind": BytesTokenizer().kind, "fingerprint": BytesTokenizer().fingerprint}
    theirs = str((known or {}).get("fingerprint", ""))
    if theirs != data["fingerprint"]:
        recorded = f"{(known or {}).get('kind')}, {theirs[:12]}" if theirs else "not recorded in the file"
        raise UserError(
            f"the data at {cfg.data.source!r} was made with another tokenizer ({data['kind']}, {data['fingerprint'][:12]}) than the "
            f"model in {file} ({recorded}). Fix: import the file with its tokenizer, `linnet import safetensors {file} "
            "--tokenizer TOKENIZER --out RUN`, prepare the data with `linnet data prepare SOURCE --tokenizer RUN --out DIR`, "
            "and use --from RUN --data.source DIR."
        )


def check_kind(cfg: RunConfig, kind: str | None) -> None:
    """Check that the data is of the same kind (text or images) as the parent's.

    Bytes of text and pixel values share the same ids, so only the parent's data.json tells them apart.
    """
    if cfg.parent is None or kind is None:
        return
    try:
        theirs = json.loads((Path(cfg.parent.path) / "data.json").read_text()).get("kind")
    except (OSError, ValueError, AttributeError):
        return  # an export, or an import that was never trained
    if theirs not in (None, kind):
        needs = f"{theirs}, which {cfg.parent.path} was trained on (this is {kind})"
        raise invalid("data.source", cfg.data.source, needs, "name such a source, or start from another run")


def check_parent(cfg: RunConfig) -> None:
    """Raise if the run cannot start from its parent, before anything is written."""
    assert cfg.parent is not None
    origin = find_origin(Path(cfg.parent.path), str(cfg.parent.step))
    if origin.fingerprint != cfg.parent.fingerprint:
        raise UserError(
            f"{cfg.parent.path} is no longer what this run was to start from (fingerprint {origin.fingerprint[:12]}, expected "
            f"{cfg.parent.fingerprint[:12]}). Fix: restore it, or start again with `linnet train --from` and another --out."
        )
    check_model(origin, cfg)
    if origin.kind == "weights" and not cfg.lora.rank:
        stored_weights.check_trainable(origin.path)
    if origin.kind == "file" and not cfg.lora.rank:
        weights_file.check_trainable(origin.path)
    if cfg.parent.optimizer:
        _check_kept_optimizer(origin, cfg)


def check_model(origin: Origin, cfg: RunConfig) -> None:
    """Check that the model equals the parent's, except for settings that change neither the weights nor their meaning."""
    if cfg.family != origin.cfg.family:
        fix = "leave --family out, or train from random weights without --from"
        raise invalid("family", cfg.family, f"{origin.cfg.family}, as in {origin.path}", fix)
    theirs = dataclasses.asdict(origin.cfg.model)
    for name, value in dataclasses.asdict(cfg.model).items():
        if value != theirs[name] and name not in type(cfg.model).FREE_WHEN_TUNED:
            flag = f"--model.{name.replace('_', '-')}"
            needs = f"{theirs[name]!r}, as in {origin.path}: a fine-tuned run keeps the model it starts from"
            raise invalid(
                f"model.{name}", value, needs, f"leave {flag} out, or train from random weights without --from"
            )


def _check_kept_optimizer(origin: Origin, cfg: RunConfig) -> None:
    if origin.kind != "run" and not _has_trainer(origin):
        needs = "a run or an import that has optimizer state"
        raise invalid("--keep-optimizer", str(origin.path), needs, "leave it out: the optimizer starts fresh")
    if cfg.lora.rank or origin.cfg.lora.rank:
        raise invalid(
            "--keep-optimizer", True, "left out with adapters: their optimizer state is their own", "leave it out"
        )
    ours, theirs = cfg.optim, origin.cfg.optim
    for name in ("name", "decay_by_lr"):  # they determine the structure of the optimizer state
        if getattr(ours, name) != getattr(theirs, name):
            needs = f"{getattr(theirs, name)!r}, as in {origin.path}, with --keep-optimizer"
            raise invalid(f"optim.{name}", getattr(ours, name), needs, "leave one of the two out")


def _has_trainer(origin: Origin) -> bool:
    return origin.kind == "weights" and stored_trainer.has_trainer(origin.path)


# Initialization.


def init_from_parent(
    family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Return the state of step 0 with the parent's weights, on the mesh. All processes must call it together."""
    assert cfg.parent is not None
    origin = find_origin(Path(cfg.parent.path), str(cfg.parent.step))
    if origin.kind == "run":
        return _init_from_run(family, cfg, optimizer, mesh, origin)
    if cfg.parent.optimizer and _has_trainer(origin):
        state, _ = stored_trainer.resume_trainer(origin.path, family, cfg, optimizer, mesh)
        return replace(state, step=state.step * 0, opt_state=_reset_schedule(state.opt_state))
    if origin.kind == "weights":
        return init_from_weights(family, cfg, optimizer, mesh, origin.path)
    to_mesh = _to_mesh(family, mesh)
    params, buffers, _ = weights_file.import_safetensors(origin.path)
    params = jax.tree.map(to_mesh, family.param_specs(cfg.model), params, is_leaf=is_spec)
    buffers = jax.tree.map(to_mesh, family.buffer_specs(cfg.model), buffers, is_leaf=is_spec)
    return init_state_from(family, cfg, optimizer, params, mesh, buffers)


def init_from_weights(
    family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh, path: Path
) -> TrainState:
    """Return the state of step 0 with imported weights, read leaf by leaf.

    8-bit weights, which only adapters can be trained on, are converted to float32.
    """
    specs = family.param_specs(cfg.model)
    return init_state_from(
        family, cfg, optimizer, stored_weights.read_weights(path, specs, to_device=_to_mesh(family, mesh)), mesh
    )


def _to_mesh(family: ModelFamily, mesh: Mesh) -> Callable[[Spec, Any], jax.Array]:
    """Return a function that converts a weight to its dtype and puts it on the mesh."""
    return lambda spec, leaf: sharding.host_to_global(quant.to_array(leaf, spec.dtype), spec.axes, mesh, family.rules)


def _init_from_run(
    family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh, origin: Origin
) -> TrainState:
    assert cfg.parent is not None
    part = None if cfg.parent.optimizer else served_weights
    _, state, _ = open_state(origin.path, str(origin.step), mesh, part=part)
    if not cfg.parent.optimizer:
        params, buffers = model_weights(state)
        return init_state_from(family, cfg, optimizer, params, mesh, buffers)
    kept = _reset_schedule(state.opt_state)
    ema = state.ema if cfg.train.ema_decay is not None else None
    return init_state_from(family, cfg, optimizer, state.params, mesh, state.buffers, opt_state=kept, ema=ema)


def _reset_schedule(opt_state: Any) -> Any:
    """Reset the step count of the learning-rate schedule; keep the moments and their counts."""

    def is_schedule(x: Any) -> bool:
        return isinstance(x, optax.ScaleByScheduleState)

    def one(x: Any) -> Any:
        return jax.tree.map(lambda count: count * 0, x) if is_schedule(x) else x

    return jax.tree.map(one, opt_state, is_leaf=is_schedule)
