"""Exceptions that raymm raises. This module imports nothing else of raymm, so every module may
raise and catch them.

Commands exit with 2 for an :class:`InputError` and with 1 for a :class:`RunError`, or with 70 if
the same run would fail in the same way again. Every other exception, and an :class:`InternalError`
that was not caught, is a defect and keeps its traceback. Most classes are also a ``ValueError`` or
a ``RuntimeError``. A kind of error has a separate class only where callers catch that kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

# Exceptions that a user's function, or a library that it calls, may raise. sys.exit() in one must
# neither end the program as a success nor look like the death of a data worker. Signals are not
# included: they raise KeyboardInterrupt.
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


class ConfigError(InputError, ValueError):
    """A configuration, or an option of a command, that cannot run, or a package that it needs and
    that is not installed. Names the field, its value and what is accepted."""


class ClusterError(InputError, RuntimeError):
    """A cluster that cannot run the request. Says what it lacks."""


class ModelError(InputError, ValueError):
    """A model, its weights, or one of its functions that cannot be used, with the reason.

    Attributes:
        row: the sample of a microbatch at fault, if one is.
    """

    row: int | None = None


class ProbeError(InputError, ValueError):
    """A model that cannot be cut into stages, or sharded, with the reason.

    Attributes:
        key: the input that a callback reads and that its stage does not have, if that is the
            reason.
    """

    def __init__(self, text: str, key: str | None = None) -> None:
        super().__init__(text)
        self.key = key


class NotRunError(ProbeError):
    """A model whose forward does not run as stages run it.

    Attributes:
        inputs: keyword arguments that a copy of an encoder does not take, if that is the reason.
    """

    def __init__(self, text: str, inputs: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.inputs = inputs


class DataError(InputError, ValueError):
    """Data, or a batch, that cannot be used or read. Names the file, field, sample or key.

    Attributes:
        modality: whose items are at fault, if one is.
        skipped: the samples of a step as they are reported, if none of them can be used.
    """

    modality: str | None = None
    skipped: list[Any] | None = None


class SampleError(DataError):
    """One sample cannot be used. ``data.on_error`` decides whether it is skipped. Code that does
    not know the sample leaves out its id; a caller that does raises another one.

    Args:
        reason: what is wrong; made one line.
        column: the column of the row at fault, if one is.
        path: the media file at fault, or None when the row itself is.
        sample_id: the sample's ``id`` (or its place, like ``FILE:LINE``, where the row has none).
        place: the data file and where in it the row is, like ``FILE:LINE``.

    Attributes:
        outside: True for a row that names a file outside of the folders that it may.
    """

    outside = False

    def __init__(
        self,
        reason: str,
        column: str | None = None,
        path: str | None = None,
        sample_id: str | None = None,
        place: str | None = None,
    ) -> None:
        text = reason
        if sample_id is not None:
            reason = " ".join(reason.split())  # libraries' messages may be long-winded
            where = f" ({place})" if place and place != sample_id else ""
            where += f", column {column!r}" if column else ""
            where += f", file {path}" if path else ""
            text = f"sample {sample_id!r}{where}: {reason}"
        super().__init__(text)
        self.reason, self.column, self.path = reason, column, path
        self.sample_id, self.place = sample_id, place

    def __reduce__(self) -> tuple[Any, ...]:
        values = self.reason, self.column, self.path, self.sample_id, self.place
        return SampleError, values, vars(self)


class CheckpointError(InputError, RuntimeError):
    """A checkpoint that cannot be read, written or resumed from. Names the file and the field."""


class PlanError(InputError, ValueError):
    """A plan that cannot run, or a cost profile, scaling surface, quota, mini-batch or distribution
    of tokens that a plan cannot be made with. Names the field, its value and what is accepted."""


class NoPlanError(PlanError):
    """No plan fits the request. A search with several candidates tries the next one."""


class RunError(Error):
    """A run ended, though nothing that was given was wrong.

    Attributes:
        repeats: whether the run, started again, would end like this again.
    """

    repeats = False


class Loss(Enum):
    """Something that a run needs and that is gone, other than a rank."""

    NODE = "node"
    PREEMPTED_NODE = "preempted node"
    """A node that ended as announced to Ray (spot instances, ``kubectl drain``)."""
    CLUSTER = "cluster"
    """The server that knows the cluster, or the driver's own node."""
    DATA_WORKER = "data worker"


class RunFileError(RunError, OSError):
    """A file of a run cannot be written, or read again: a full or failing disk, a storage that does
    not answer. Names the file."""


class NotFiniteError(RunError, RuntimeError):
    """What is not finite goes no further: too many steps in a row that cannot be applied, or
    parameters that no checkpoint should have. Names them."""

    repeats = True


class RunFailedError(RunError, RuntimeError):
    """Something that a run needs is gone: no setting was wrong, and it can be started again.

    Args:
        text: the message.
        kind: of what a process raised; None if no process raised an error.
        lost: what is gone, unless it is a rank.
        nodes: Ray's ids of nodes that are gone.
    """

    def __init__(
        self, text: str, kind: FailureKind | None = None, lost: Loss | None = None,
        nodes: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(text)
        self.kind, self.lost, self.nodes = kind, lost, nodes


class RankFailedError(RunFailedError):
    """A rank died, raised an error or hangs. Names the module, stage and rank. One that raised
    has the kind of its error, and repeats unless that passes."""

    def __init__(self, text: str, kind: FailureKind | None = None) -> None:
        super().__init__(text, kind)
        self.repeats = kind is not None and not kind.passes


class InternalError(Error):
    """What one part of raymm says to another, which catches it and says what it means for the
    user."""


class ChannelError(InternalError, RuntimeError):
    """A message between ranks never came, or is not as its metadata said: a rank may be lost."""


class ForwardLeft(Exception):  # noqa: N818  not an error: nothing is wrong
    """Leaves a model's forward before its end, as what it was called for has been computed.

    Args:
        value: that: the hidden state that the next stage continues with, or what a part returned.
        relays: outputs of blocks that the next stage gets as well.
        by: who raises it, for forwards within others.
    """

    def __init__(self, value: Any, relays: tuple[Any, ...] = (), by: object = None) -> None:
        super().__init__()
        self.value, self.relays, self.by = value, relays, by
