"""Joining the other processes, before JAX looks for devices, and leaving them. A process that is alone does nothing here."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import time
from typing import Any

from linnet.core.errors import UserError
from linnet.parallel.cluster.environment import (
    ALONE,
    LOST_SECONDS,
    START_SECONDS,
    ClusterEnv,
    Member,
    Timeouts,
    find_cluster_env,
    find_timeouts,
)
from linnet.parallel.cluster.exit import exit_now, on_abort
from linnet.parallel.cluster.heartbeat import FAILED_SECONDS, Heartbeat
from linnet.parallel.cluster.peer_failure import is_peer_failure

_pulse: Heartbeat | None = None


def initialize() -> Member:
    """Meets the other processes, if the environment tells of any, and watches them from then on. Once in a process."""
    global _pulse
    if _pulse is not None:
        return _pulse.member
    place, bounds = find_cluster_env(os.environ), find_timeouts(os.environ)
    if place == ALONE:
        return describe()
    on_abort(lambda: _aborted(place, bounds))
    _initialize(place, bounds)
    service = _service()
    member = Member(index=service.process_id, count=service.num_processes, host=socket.gethostname())
    if member.count > 1:  # watched before the first device is asked for: all wait for all there, too
        address = str(service.coordinator_address)
        _pulse = Heartbeat(
            service.client, member, bounds, address, lambda words, after: exit_now(words, after=after)
        ).start()
        atexit.register(_end_together)  # runs before JAX's own end, which was registered earlier
    return member


def describe() -> Member:
    """Which process this is, of how many, and where."""
    return _pulse.member if _pulse is not None else Member(index=0, count=1, host=socket.gethostname())


def current_heartbeat() -> Heartbeat | None:
    """The signs of life, where there are several processes."""
    return _pulse


def attribute_failure(error: BaseException) -> None:
    """Where an error may come from another process's end, waits until the pulse has named that one and ended this process. Returns
    if nobody is gone: then the error is this process's own."""
    if _pulse is None or _pulse.broken or not is_peer_failure(error):
        return
    _pulse.broken = True
    time.sleep(_pulse.bounds.lost + 6 * _pulse.every)


def shutdown(code: int, error: BaseException | None = None) -> None:
    """Called with the exit code of a command. A process that failed tells why and goes: waiting for the others to come to the
    same end, as JAX does, would be in vain."""
    if _pulse is None or code in (0, 75):
        return
    if error is not None:
        attribute_failure(error)
    words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # if process 0 is gone, so is whoever would read it
        _pulse.fail(f"exit code {code}" if error is None else words)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    exit_now("This process of the cluster stops; the others will, too.", code, _linger(_pulse))


def _linger(pulse: Heartbeat) -> float:
    """The store goes with process 0."""
    return FAILED_SECONDS + 3 * pulse.every if pulse.member.index == 0 else 0.0


def _end_together() -> None:
    """Nobody leaves before all have come, so that nobody is missed; then nobody is watched any more."""
    assert _pulse is not None
    uncaught = getattr(sys, "last_value", None)
    if uncaught is not None:
        shutdown(1, uncaught)
    _service().client.wait_at_barrier("linnet/end", 24 * 3600 * 1000)  # the pulse ends this wait if somebody is gone
    _pulse.stop()


def _initialize(place: ClusterEnv, bounds: Timeouts) -> None:
    import jax

    # Without it the CPU's devices of other processes cannot be reached; other devices have their own ways.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    how: dict[str, Any] = {}
    if place.kind == "explicit":
        how = {
            "coordinator_address": place.coordinator,
            "num_processes": place.count,
            "process_id": place.index,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **how,
            initialization_timeout=round(bounds.start),
            heartbeat_timeout_seconds=max(15, round(3 * bounds.lost)),  # JAX's own, coarser: ours comes first
            shutdown_timeout_seconds=max(15, round(3 * bounds.lost)),
        )
    except (RuntimeError, ValueError, OSError) as error:
        # Of many kinds, all about the neighbourhood: a port that is taken, a host without a name, no right to ask Kubernetes.
        exit_now(f"The processes could not be brought together ({str(error).strip().splitlines()[0]}). {_CHECK}")


_CHECK = (
    f"Fix: see that all processes were started, with the same command, and can reach process 0; {START_SECONDS} sets how long they "
    f"wait for each other, {LOST_SECONDS} how soon a silent one counts as gone."
)


def _service() -> Any:
    """JAX's own state: its client of the coordination service, which Orbax uses, too. There is no public name for it, and the public
    ones for this process's number would look for devices first."""
    from jax._src import distributed

    return distributed.global_state


def _aborted(place: ClusterEnv, bounds: Timeouts) -> str | None:
    """What an abort of JAX's means, or None where it is about something else."""
    if _pulse is None:
        who = f"process {place.index} of {place.count}" if place.index is not None else "this process"
        return f"The processes did not come together within {bounds.start:g} s, or one was lost meanwhile: {who} stops. {_CHECK}"
    silent = _pulse.ears.silent(_pulse.late)
    if silent:
        return _pulse.gone(f"Gone: {silent[0]}.")
    return None if _reachable() else _pulse.no_answer()


def _reachable() -> bool:
    host, _, port = str(_service().coordinator_address).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True
