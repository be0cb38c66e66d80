"""Startup of a multi-process run, before JAX initializes its devices, and its shutdown. No effect with a single process."""

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
    """Connect to the other processes, if the environment defines any, and start the heartbeat. Later calls have no effect."""
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
    if member.count > 1:  # before devices are initialized, because that too waits for all processes
        address = str(service.coordinator_address)
        _pulse = Heartbeat(
            service.client, member, bounds, address, lambda words, after: exit_now(words, after=after)
        ).start()
        atexit.register(_end_together)  # runs before JAX's own exit handler, which was registered earlier
    return member


def describe() -> Member:
    """Return the index and host of this process, and the process count."""
    return _pulse.member if _pulse is not None else Member(index=0, count=1, host=socket.gethostname())


def current_heartbeat() -> Heartbeat | None:
    """Return the heartbeat, or None with a single process."""
    return _pulse


def attribute_failure(error: BaseException) -> None:
    """If the error may be caused by a lost peer, wait for the heartbeat to report that peer and exit this process. Returns if no
    peer is lost: then the error is this process's own."""
    if _pulse is None or _pulse.broken or not is_peer_failure(error):
        return
    _pulse.broken = True
    time.sleep(_pulse.bounds.lost + 6 * _pulse.every)


def shutdown(code: int, error: BaseException | None = None) -> None:
    """Exit with the code of a failed command; return for a single process and for codes 0 and 75. A failed process reports its error
    and exits at once: the peers would never reach the exit barrier at which JAX waits for them."""
    if _pulse is None or code in (0, 75):
        return
    if error is not None:
        attribute_failure(error)
    words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # if process 0 is gone, there is nothing to report to
        _pulse.fail(f"exit code {code}" if error is None else words)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    exit_now("This process of the cluster stops; the others will, too.", code, _linger(_pulse))


def _linger(pulse: Heartbeat) -> float:
    """Return how long to wait before exit: process 0 stays while the others read the verdict, because it runs the store."""
    return FAILED_SECONDS + 3 * pulse.every if pulse.member.index == 0 else 0.0


def _end_together() -> None:
    """Barrier at exit, so that no process mistakes a normal exit for a failure; then stop the heartbeat."""
    assert _pulse is not None
    uncaught = getattr(sys, "last_value", None)
    if uncaught is not None:
        shutdown(1, uncaught)
    _service().client.wait_at_barrier("linnet/end", 24 * 3600 * 1000)  # the heartbeat ends this wait if a peer is lost
    _pulse.stop()


def _initialize(place: ClusterEnv, bounds: Timeouts) -> None:
    import jax

    # CPU devices of other processes are only reachable with gloo; other backends have their own transports.
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
            # Longer than the timeout of Linnet's own heartbeat, which should fire first.
            heartbeat_timeout_seconds=max(15, round(3 * bounds.lost)),
            shutdown_timeout_seconds=max(15, round(3 * bounds.lost)),
        )
    except (RuntimeError, ValueError, OSError) as error:
        # Various environment errors: a port in use, an unresolvable host, missing Kubernetes permissions.
        exit_now(f"The processes could not be brought together ({str(error).strip().splitlines()[0]}). {_CHECK}")


_CHECK = (
    f"Fix: see that all processes were started, with the same command, and can reach process 0; {START_SECONDS} sets how long they "
    f"wait for each other, {LOST_SECONDS} how soon a silent one counts as gone."
)


def _service() -> Any:
    """Return JAX's distributed state, for its coordination service client (which Orbax uses too). There is no public API for it, and
    `jax.process_index` would initialize the devices first."""
    from jax._src import distributed

    return distributed.global_state


def _aborted(place: ClusterEnv, bounds: Timeouts) -> str | None:
    """Return the message for an abort by JAX, or None if it is unrelated to the cluster."""
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
