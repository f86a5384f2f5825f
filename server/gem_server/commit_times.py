"""The times of a commit's steps. Traces and metrics are made of it when the commit has ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CommitTimes:
    """Seconds of the server's clock; 0: the commit did not get so far.

    Attributes:
        began: Its header had arrived.
        upload_asked, upload_began, received: Its gradient asked for a turn on the network, had it, and was complete.
        queued, rule_began, applied: It had its ticket, the rule began with it, and the rule had ended.
        held, released: Its reply began to wait for other workers' commits, and waited no longer.
        ready: Its result was made: the commit was applied, and on the disk if there is a log.
        send_began, sent: θ had its turn on the network, and was sent.
        ended: It was answered, or its call had ended.
    """

    began: float = 0.0
    upload_asked: float = 0.0
    upload_began: float = 0.0
    received: float = 0.0
    queued: float = 0.0
    rule_began: float = 0.0
    applied: float = 0.0
    held: float = 0.0
    released: float = 0.0
    ready: float = 0.0
    send_began: float = 0.0
    sent: float = 0.0
    ended: float = 0.0

    @property
    def queue_seconds(self) -> float:
        """From its ticket until the rule began."""
        return self.rule_began - self.queued

    @property
    def rule_seconds(self) -> float:
        """The seconds that the rule took to apply it."""
        return self.applied - self.rule_began

    @property
    def server_seconds(self) -> float:
        """From header to reply, without what its reply waited for other workers."""
        return self.ended - self.began - (self.released - self.held)
