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

# Exceptions that a user's function, or a library that it calls, may raise. A call of sys.exit() in
# such a function must neither end the program as a success nor look like the death of a data
# worker. Signals are not included: they raise KeyboardInterrupt.
USER_CODE_RAISES = (Exception, SystemExit)


class FailureKind(Enum):
    """Kind of an error of a process. The first two kinds may be temporary, so a run retries.

    :mod:`raymm.actors.faults.failure_kind` classifies errors.
    """

    RESOURCE = "resource"
    """Memory, threads, file descriptors or disk space ran out, or a disk failed."""
    CONNECTION = "connection"
    """A server or a network did not respond, or closed a connection."""
    DEFECT = "defect"
    """A programming error in raymm's own code."""
    USER = "user"
    """Everything else: the code, model or data of the run."""

    @property
    def passes(self) -> bool:
        """True if the same work may succeed a little later."""
        return self in (FailureKind.RESOURCE, FailureKind.CONNECTION)


class Error(Exception):
    """Base class of the errors that raymm reports."""


class InputError(Error):
    """Input that cannot be used: a configuration, model, data, batch, plan, checkpoint or cluster.
    Names the field, its value, and what is accepted."""


class ConfigError(InputError, ValueError):
    """A configuration or a command option that cannot run, or needs a package that is not
    installed. Names the field, its value and what is accepted."""


class ClusterError(InputError, RuntimeError):
    """A cluster that cannot run the request. Names what the cluster lacks."""


class ModelError(InputError, ValueError):
    """A model, its weights, or one of its functions that cannot be used, with the reason.

    Attributes:
        row: the sample of a microbatch at fault; None if unknown.
    """

    row: int | None = None


class ProbeError(InputError, ValueError):
    """A model that cannot be cut into stages, or sharded, with the reason.

    Attributes:
        key: the input that a callback reads but its stage lacks, if that is the reason.
    """

    def __init__(self, text: str, key: str | None = None) -> None:
        super().__init__(text)
        self.key = key


class NotRunError(ProbeError):
    """A model whose forward fails as stages run it.

    Attributes:
        inputs: keyword arguments that an encoder's replica does not accept, if that is the reason.
    """

    def __init__(self, text: str, inputs: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.inputs = inputs


class DataError(InputError, ValueError):
    """Data, or a batch, that cannot be used or read. Names the file, field, sample or key.

    Attributes:
        modality: the modality of the items at fault; None if unknown.
        skipped: reports of a step's samples, if none of them can be used.
    """

    modality: str | None = None
    skipped: list[Any] | None = None

    def of_items(self, modality: str) -> DataError:
        """Record the modality of the items at fault, and return the error."""
        self.modality = modality
        return self


class SampleError(DataError):
    """A sample that cannot be used; ``data.on_error`` decides whether it is skipped. Code that does
    not know the sample omits its id, and a caller that does raises another error.

    Args:
        reason: reduced to one line.
        column: the column of the row at fault; None if unknown.
        path: the media file at fault; None if the row itself is.
        sample_id: the sample's ``id``, or its place where the row has none.
        place: the row's data file and position, like ``FILE:LINE``.

    Attributes:
        outside: True for a row that names a file outside of the allowed folders.
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
            reason = " ".join(reason.split())  # messages of libraries may have several lines
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
    """A run that ended although its input was valid.

    Attributes:
        repeats: True if the same run would end in the same way again.
    """

    repeats = False


class Loss(Enum):
    """A part of a run, other than a rank, that was lost."""

    NODE = "node"
    PREEMPTED_NODE = "preempted node"
    """A node that ended as announced to Ray (spot instances, ``kubectl drain``)."""
    CLUSTER = "cluster"
    """Ray's GCS server, or the driver's own node."""
    DATA_WORKER = "data worker"


class RunFileError(RunError, OSError):
    """A file of a run that cannot be written or read again: a full or failing disk, or a storage
    that does not respond. Names the file."""


class NotFiniteError(RunError, RuntimeError):
    """Non-finite values: too many consecutive skipped steps, or parameters that must not be saved
    in a checkpoint. Names them."""

    repeats = True


class RunFailedError(RunError, RuntimeError):
    """A part of a run was lost. No setting was wrong, and the run can be started again.

    Args:
        kind: kind of the error of a process; None if no process raised one.
        lost: the lost part; None for a rank.
        nodes: Ray's ids of lost nodes.
    """

    def __init__(
        self, text: str, kind: FailureKind | None = None, lost: Loss | None = None,
        nodes: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(text)
        self.kind, self.lost, self.nodes = kind, lost, nodes

    def end_for_good(self) -> None:
        """Record that the same run would end in the same way again."""
        self.repeats = True


class RankFailedError(RunFailedError):
    """A rank that died, raised an error or hangs. Names the module, stage and rank. After an error,
    ``kind`` is its kind, and ``repeats`` is True unless that kind may be temporary."""

    def __init__(self, text: str, kind: FailureKind | None = None) -> None:
        super().__init__(text, kind)
        self.repeats = kind is not None and not kind.passes


class InternalError(Error):
    """An error between parts of raymm. The part that catches it explains the effect to the user."""


class ChannelError(InternalError, RuntimeError):
    """A message between ranks that never arrived, or differs from its metadata; a rank may be
    lost."""


class ForwardLeft(Exception):  # noqa: N818  not an error: nothing is wrong
    """Leaves a model's forward early, once the required value is computed.

    Args:
        value: the hidden state that the next stage continues with, or the output of a part.
        relays: outputs of blocks that the next stage also receives.
        by: the raiser, for nested forwards.
    """

    def __init__(self, value: Any, relays: tuple[Any, ...] = (), by: object = None) -> None:
        super().__init__()
        self.value, self.relays, self.by = value, relays, by
