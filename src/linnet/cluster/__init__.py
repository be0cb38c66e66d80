"""The processes of one run: who this one is (`place`), how they meet (`joining`), and who of them still lives (`pulse`)."""

from linnet.cluster.joining import blame, describe, join, leave, pulse
from linnet.cluster.last_word import EXIT_PEER_LOST
from linnet.cluster.place import Member

__all__ = ["EXIT_PEER_LOST", "Member", "blame", "describe", "join", "leave", "pulse"]
