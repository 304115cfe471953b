"""Errors that end a run. They import nothing: whoever may raise or catch them can."""

from __future__ import annotations


class RunFailedError(RuntimeError):
    """Something that a run needs is gone: no setting was wrong, and it can be started again."""


class RankFailedError(RunFailedError):
    """A rank died or raised, or does not go on. Names the module, stage and rank."""


class ClusterLostError(RunFailedError):
    """A node that the run needs, or the server that knows the cluster, is gone."""
