"""Multi-process runs: cluster environment, startup and exit (`lifecycle`), and the heartbeat between processes."""

from linnet.parallel.cluster.environment import Member
from linnet.parallel.cluster.exit import EXIT_PEER_LOST
from linnet.parallel.cluster.lifecycle import (
    attribute_failure,
    current_heartbeat,
    describe,
    init_jax,
    initialize,
    shutdown,
)

__all__ = [
    "EXIT_PEER_LOST",
    "Member",
    "attribute_failure",
    "current_heartbeat",
    "describe",
    "init_jax",
    "initialize",
    "shutdown",
]
