"""How a rank chooses its next task: the part of a schedule that is searched for."""

from __future__ import annotations

from dataclasses import dataclass

# Gradients are never farther away than this.
ANY_DISTANCE = 1_000_000


@dataclass(frozen=True)
class Policy:
    """Preferences of list scheduling. Which are best depends on the graph and its costs.

    Attributes:
        priority: rank of each kind of task (forward, recompute, backward, weight); low goes
            first. Among tasks of one kind the oldest microbatch goes first; then, for
            forwards the stage nearest to the loss, for others the one farthest from it.
        patience: a weight gradient or recomputation is not started if something of a better
            kind is known to become ready within this fraction of its duration.
        hops: how far away the gradient may still be when a recomputation starts: it must have
            left the stage that many edges downstream. A rank with several stages must not
            fill its memory for a gradient that comes late.
        beyond_depth: whether forwards may run further ahead than the stage's depth, as far
            as memory goes.
    """

    priority: tuple[int, int, int, int]
    patience: float = 0.0
    hops: int = ANY_DISTANCE
    beyond_depth: bool = False

    def __post_init__(self) -> None:
        if len(self.priority) != 4 or any(type(rank) is not int for rank in self.priority):
            raise ValueError(
                f"priority is {self.priority!r}; it needs a whole number for each of forward, "
                "recompute, backward and weight"
            )
        if not 0 <= self.patience <= 1:
            raise ValueError(f"patience is {self.patience!r}; it must be between 0 and 1")
        if type(self.hops) is not int or self.hops < 1:
            raise ValueError(f"hops is {self.hops!r}; it must be a whole number, at least 1")
        if type(self.beyond_depth) is not bool:
            raise ValueError(f"beyond_depth is {self.beyond_depth!r}; it must be true or false")


# What 1F1B does when it is free: a forward, as other ranks wait for it, while it may run
# ahead; else a backward, which lets it run ahead again.
ONE_F_ONE_B = Policy((0, 1, 1, 2))

# Policies worth trying, found on the 27 models of Cornstarch v1 with every part of them frozen
# or not: from all combinations of many more, those that between them came within a percent
# of the best everywhere.
_ONE_STAGE_PER_RANK = (
    Policy((0, 1, 1, 3)), Policy((0, 1, 1, 3), 0.5), Policy((0, 1, 1, 3), 1.0),
    Policy((0, 1, 1, 3), 0.5, beyond_depth=True), Policy((1, 1, 0, 3), beyond_depth=True),
    Policy((1, 2, 0, 3)), Policy((0, 0, 0, 1)),
)
_SEVERAL_STAGES_PER_RANK = (
    Policy((1, 2, 0, 3), 0.5, 4), Policy((1, 1, 0, 3), 0.5, 4), Policy((1, 2, 0, 3), 0.0, 2),
    Policy((0, 0, 0, 1), 1.0, 4), Policy((1, 2, 0, 3), 0.0, 4), Policy((1, 1, 0, 3), 0.0, 3),
    Policy((1, 0, 0, 3), 0.0, 2, True), Policy((0, 1, 1, 3), 0.0, 4),
    Policy((0, 0, 0, 1), 1.0, 4, True), Policy((1, 1, 0, 3), 0.0, 2),
    Policy((1, 2, 0, 3), 0.0, 4, True), Policy((1, 0, 0, 3), 0.5, 2),
    Policy((1, 0, 0, 3), 0.0, 4, True), Policy((0, 0, 0, 1), 0.25, 4, True),
    Policy((0, 1, 1, 3), 0.0, 2), Policy((0, 1, 1, 3)), Policy((1, 0, 0, 3), 0.25, 4),
    Policy((1, 1, 0, 3), 0.0, 4), Policy((1, 0, 0, 3), 0.0, 3), Policy((0, 1, 2, 3), 1.0, 4),
)


def policies(several_stages_per_rank: bool) -> tuple[Policy, ...]:
    """Policies worth trying for the zero-bubble schedule."""
    return _SEVERAL_STAGES_PER_RANK if several_stages_per_rank else _ONE_STAGE_PER_RANK
