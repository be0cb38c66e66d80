"""Process index and count, read from the environment before JAX is imported.

Sources in order of precedence: Linnet's own variables (set by `linnet launch` or by hand), Slurm, a TPU pod, an indexed Kubernetes
Job. Incomplete settings are an error: a process that wrongly assumed a single-process run would write into the shared run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from linnet.core.errors import UserError, invalid

COORDINATOR, PROCESSES, PROCESS_ID = "LINNET_COORDINATOR", "LINNET_PROCESSES", "LINNET_PROCESS_ID"
LOST_SECONDS, START_SECONDS = "LINNET_LOST_SECONDS", "LINNET_START_SECONDS"
LAUNCHER = "LINNET_LAUNCHER"
"""Process id of `linnet launch`. The cluster's processes exit when it is gone, because nothing else would stop or restart them."""

SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")

Kind = Literal["alone", "explicit", "slurm", "tpu", "kubernetes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    index: int
    count: int
    host: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterEnv:
    """Cluster settings found in the environment. For kinds other than alone and explicit, JAX detects the rest."""

    kind: Kind
    coordinator: str | None = None
    index: int | None = None
    count: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds without a heartbeat after which a process counts as lost (`lost`), and until all must have connected (`start`)."""

    lost: float
    start: float


ALONE = ClusterEnv(kind="alone")


def find_cluster_env(environ: Mapping[str, str], devices: Path = Path("/dev")) -> ClusterEnv:
    """Detect the cluster environment. `devices` is the folder with the device files of TPU chips."""
    if any(name in environ for name in (COORDINATOR, PROCESSES, PROCESS_ID)):
        return _explicit(environ)
    if "SLURM_STEP_NODELIST" in environ and environ.get("SLURM_NTASKS", "1") != "1":
        return _slurm(environ)
    if _is_tpu(environ, devices):
        return ClusterEnv(kind="tpu")
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        return _kubernetes(environ)
    return ALONE


def find_timeouts(environ: Mapping[str, str]) -> Timeouts:
    return Timeouts(lost=_seconds(environ, LOST_SECONDS, 30.0), start=_seconds(environ, START_SECONDS, 300.0))


def _explicit(environ: Mapping[str, str]) -> ClusterEnv:
    count = _integer(environ, PROCESSES)
    if count is None:
        found = ", ".join(name for name in (COORDINATOR, PROCESS_ID) if name in environ)
        raise UserError(
            f"{found} is set, but {PROCESSES} is not. Fix: set {PROCESSES} to the number of processes, or none."
        )
    if count < 1:
        raise invalid(PROCESSES, count, "at least 1", "set it to the number of processes")
    if count == 1:  # overrides Slurm and Kubernetes: the tasks of a sweep are not a cluster
        return ALONE
    index = _integer(environ, PROCESS_ID)
    if index is None:
        raise UserError(
            f"{PROCESSES} is {count}, but {PROCESS_ID} is not set. Fix: set it to 0 to {count - 1}, each once."
        )
    if not 0 <= index < count:
        raise invalid(PROCESS_ID, index, f"0 to {count - 1} ({PROCESSES} is {count})", "number the processes from 0")
    address = environ.get(COORDINATOR, "")
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise invalid(COORDINATOR, address, "the HOST:PORT of process 0", "use one that all processes can reach")
    return ClusterEnv(kind="explicit", coordinator=address, index=index, count=count)


def _slurm(environ: Mapping[str, str]) -> ClusterEnv:
    missing = [name for name in SLURM if name not in environ]
    if missing:
        raise UserError(
            f"this is a Slurm step of {environ['SLURM_NTASKS']} tasks, but {', '.join(missing)} is not set. "
            f"Fix: start with srun, or set {PROCESSES}=1 to run alone."
        )
    count, index = _integer(environ, "SLURM_NTASKS"), _integer(environ, "SLURM_PROCID")
    assert count is not None
    assert index is not None
    if not 0 <= index < count:
        raise invalid("SLURM_PROCID", index, f"0 to {count - 1} (SLURM_NTASKS is {count})", "start with srun")
    return ClusterEnv(kind="slurm", index=index, count=count)


def _is_tpu(environ: Mapping[str, str], devices: Path) -> bool:
    """Return whether this machine has TPU chips and libtpu. JAX detects their pod, even if it is a single machine."""
    here = any(devices.glob("accel[0-9]*")) or any(devices.glob("vfio/[0-9]*"))
    wanted = environ.get("JAX_PLATFORMS", "tpu")
    return here and "tpu" in wanted and importlib.util.find_spec("libtpu") is not None


def _kubernetes(environ: Mapping[str, str]) -> ClusterEnv:
    if importlib.util.find_spec("kubernetes") is None:
        raise UserError(
            "this is a pod of an indexed Job, but the package kubernetes, with which JAX finds the others, is not installed. "
            f"Fix: set {COORDINATOR}, {PROCESSES} and {PROCESS_ID} in the Job (docs/scale.md has one), {PROCESSES}=1 if each pod "
            "works alone, or pip install kubernetes."
        )
    index = _integer(environ, "JOB_COMPLETION_INDEX")
    return ClusterEnv(kind="kubernetes", index=index)


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise invalid(name, value, "a whole number", "set it to one, or unset it") from None


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    value = environ.get(name)
    try:
        seconds = default if value is None else float(value)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 86400.0:
        raise invalid(name, value, "1 to 86400 seconds", f"unset it, for {default:g}")
    return seconds
