"""The errors that raymm raises. This file imports nothing of raymm, so that every room may raise
and catch them.

Commands end with 2 for an :class:`InputError`, with 1 for a :class:`RunError`, or 70 for one that
repeats; any other error, an :class:`InternalError` that nobody caught among them, is a defect, and
keeps its traceback. Most are a ``ValueError`` or a ``RuntimeError`` as well. A kind has a class of
its own where somebody catches just that kind; for all others the message says everything.
"""

from __future__ import annotations

from enum import Enum

# What a function of the user's may raise, and a library that it calls. sys.exit() in one must not
# end the program as if all had gone well, nor a data worker as if it had died; a signal is no such
# thing: it raises KeyboardInterrupt.
USER_CODE_RAISES = (Exception, SystemExit)


class FailureKind(Enum):
    """Kind of what a process raised: the first two may pass by themselves, so a run retries.

    :mod:`raymm.actors.faults.failure_kind` judges.
    """

    RESOURCE = "resource"
    """The process found no memory, thread, file descriptor or disk space, or its disk failed."""
    CONNECTION = "connection"
    """A server or a network did not answer, or ended a connection."""
    DEFECT = "defect"
    """A programming error in raymm's own code."""
    USER = "user"
    """Everything else: the code, model or data of the run."""

    @property
    def passes(self) -> bool:
        """True if the same work may succeed a little later."""
        return self in (FailureKind.RESOURCE, FailureKind.CONNECTION)


class Error(Exception):
    """Whatever raymm itself says is wrong."""


class InputError(Error):
    """What was given cannot be used: a configuration, a model, data, a batch, a plan, a checkpoint,
    a cluster. Names the field, its value, and what is accepted."""


class RunError(Error):
    """A run ended, though nothing that was given was wrong.

    Attributes:
        repeats: whether the run, started again, would end like this again.
    """

    repeats = False


class RunFailedError(RunError, RuntimeError):
    """Something that a run needs is gone: no setting was wrong, and it can be started again.

    Attributes:
        kind: of what a process raised; None if no process raised an error.
    """

    def __init__(self, text: str, kind: FailureKind | None = None) -> None:
        super().__init__(text)
        self.kind = kind


class RankFailedError(RunFailedError):
    """A rank died or raised, or does not go on. Names the module, stage and rank."""


class RankRaisedError(RankFailedError):
    """Code that a rank runs raised an error, and not because another rank was lost."""

    def __init__(self, text: str, kind: FailureKind = FailureKind.USER) -> None:
        super().__init__(text, kind)
        self.repeats = not kind.passes


class ClusterLostError(RunFailedError):
    """A node that the run needs, or the server that knows the cluster, is gone."""


class NodeLostError(ClusterLostError):
    """A node with processes of the run is gone; others may be there. Names it.

    Attributes:
        nodes: Ray's ids of nodes that are gone.
    """

    def __init__(self, text: str, nodes: frozenset[str] = frozenset()) -> None:
        super().__init__(text)
        self.nodes = nodes


class NodePreemptedError(NodeLostError):
    """A node is gone, as Ray had been told that it would (spot instances, ``kubectl drain``)."""


class InternalError(Error):
    """What one part of raymm says to another, which catches it and says what it means for the
    user."""
