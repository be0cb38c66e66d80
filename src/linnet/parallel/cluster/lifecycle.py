"""Startup of JAX and of multi-process runs, before devices are initialized, and their shutdown.

JAX and the launcher (`linnet launch`, Slurm, Kubernetes) do most of this: JAX detects the cluster and connects its processes, the
launcher restarts them. Linnet adds a clear message in every process when one is lost, and an exit code that asks for a restart.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import sys
import time
from typing import Any

from linnet.core.errors import UserError
from linnet.core.files import cache_folder
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

RUNTIME_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED|ABORTED|CANCELLED|FAILED_PRECONDITION): ")

_heartbeat: Heartbeat | None = None


def init_jax() -> None:
    """Enable the persistent compilation cache (JAX_COMPILATION_CACHE_DIR moves or disables it), then connect to the other processes,
    if any, which must happen before devices are initialized. A cache folder that the caller has set is kept."""
    import jax

    chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]  # its stubs omit the flags
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and chosen is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    initialize()


def initialize() -> Member:
    """Connect to the other processes, if the environment defines any, and start the heartbeat. Later calls have no effect."""
    global _heartbeat
    if _heartbeat is not None:
        return _heartbeat.member
    env, timeouts = find_cluster_env(os.environ), find_timeouts(os.environ)
    if env == ALONE:
        return describe()
    on_abort(lambda: _explain_abort(env, timeouts))
    _connect(env, timeouts)
    service = _service()
    member = Member(index=service.process_id, count=service.num_processes, host=socket.gethostname())
    if member.count > 1:  # before devices are initialized, because that too waits for all processes
        address = str(service.coordinator_address)
        _heartbeat = Heartbeat(
            service.client, member, timeouts, address, lambda message, delay: exit_now(message, delay=delay)
        ).start()
        atexit.register(_end_together)  # runs before JAX's own exit handler, which was registered earlier
    return member


def describe() -> Member:
    """Return the index and host of this process, and the process count."""
    return _heartbeat.member if _heartbeat is not None else Member(index=0, count=1, host=socket.gethostname())


def current_heartbeat() -> Heartbeat | None:
    """Return the heartbeat, or None with a single process."""
    return _heartbeat


def is_peer_failure(error: BaseException | None) -> bool:
    """Return whether the error, or one in its chain of causes, has a status of the JAX runtime, as after a broken connection.

    The exception class does not tell: it can be a ValueError or a JaxRuntimeError. The error may also be this process's own.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if RUNTIME_STATUS.match(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def attribute_failure(error: BaseException) -> None:
    """If the error may be caused by a lost peer, wait for the heartbeat to report that peer and exit this process. Returns if no
    peer is lost: then the error is this process's own."""
    if _heartbeat is None or _heartbeat.broken or not is_peer_failure(error):
        return
    _heartbeat.broken = True
    time.sleep(_heartbeat.timeouts.lost + 6 * _heartbeat.interval)


def shutdown(code: int, error: BaseException | None = None) -> None:
    """Exit with the code of a failed command; return for a single process and for codes 0 and 75. A failed process reports its error
    and exits at once: the peers would never reach the exit barrier at which JAX waits for them."""
    if _heartbeat is None or code in (0, 75):
        return
    if error is not None:
        attribute_failure(error)
    reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # if process 0 is lost, there is nothing to report to
        _heartbeat.fail(f"exit code {code}" if error is None else reason)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    # Process 0 stays while the others read the verdict, because it runs the store.
    delay = FAILED_SECONDS + 3 * _heartbeat.interval if _heartbeat.member.index == 0 else 0.0
    exit_now("This process of the cluster stops, and so will the others.", code, delay)


def _end_together() -> None:
    """Barrier at exit, so that no process mistakes a normal exit for a failure; then stop the heartbeat."""
    assert _heartbeat is not None
    uncaught = getattr(sys, "last_value", None)
    if uncaught is not None:
        shutdown(1, uncaught)
    _service().client.wait_at_barrier("linnet/end", 24 * 3600 * 1000)  # the heartbeat ends this wait if a peer is lost
    _heartbeat.stop()


def _connect(env: ClusterEnv, timeouts: Timeouts) -> None:
    import jax

    # CPU devices of other processes are only reachable with gloo; other backends have their own transports.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    settings: dict[str, Any] = {}
    if env.kind == "explicit":
        settings = {
            "coordinator_address": env.coordinator,
            "num_processes": env.count,
            "process_id": env.index,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **settings,
            initialization_timeout=round(timeouts.start),
            # Longer than the timeout of Linnet's own heartbeat, which should act first.
            heartbeat_timeout_seconds=max(15, round(3 * timeouts.lost)),
            shutdown_timeout_seconds=max(15, round(3 * timeouts.lost)),
        )
    except (RuntimeError, ValueError, OSError) as error:
        # Various environment errors: a port in use, an unresolvable host, missing Kubernetes permissions.
        exit_now(f"The processes could not connect to each other ({str(error).strip().splitlines()[0]}). {_FIX}")


_FIX = (
    f"Fix: check that all processes were started with the same command and can reach process 0; {START_SECONDS} sets how long they "
    f"wait for each other, {LOST_SECONDS} after how many seconds without a heartbeat a process counts as lost."
)


def _service() -> Any:
    """Return JAX's distributed state, for its coordination service client (which Orbax uses too). There is no public API for it, and
    `jax.process_index` would initialize the devices first."""
    from jax._src import distributed

    return distributed.global_state


def _explain_abort(env: ClusterEnv, timeouts: Timeouts) -> str | None:
    """Return the message for an abort by JAX, or None if it is unrelated to the cluster."""
    if _heartbeat is None:
        who = f"process {env.index} of {env.count}" if env.index is not None else "this process"
        return (
            f"The processes did not connect within {timeouts.start:g} s, or one was lost meanwhile: {who} stops. {_FIX}"
        )
    missed = _heartbeat.detector.missed(_heartbeat.late_seconds)
    if missed:
        return _heartbeat.exit_message(f"Lost: {missed[0]}.")
    return None if _is_coordinator_reachable() else _heartbeat.coordinator_lost_message()


def _is_coordinator_reachable() -> bool:
    host, _, port = str(_service().coordinator_address).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True
