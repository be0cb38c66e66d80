"""The processes of one run: who this one is (`place`), how they meet (`joining`), and who of them still lives (`pulse`)."""

from linnet.parallel.cluster.environment import Member
from linnet.parallel.cluster.exit import EXIT_PEER_LOST
from linnet.parallel.cluster.lifecycle import attribute_failure, current_heartbeat, describe, initialize, shutdown

__all__ = ["EXIT_PEER_LOST", "Member", "attribute_failure", "current_heartbeat", "describe", "initialize", "shutdown"]
