"""Order in which processes create the process groups that they share.

Every process creates its own groups one after another, in the order of their numbers. This ends for
any numbering: the members of the first group that does not exist yet have no earlier group left to
create. The numbering only decides how long it takes, because a group waits for the earlier groups
of its members.
"""

from __future__ import annotations

from collections.abc import Sequence


def rendezvous_order(groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of ``groups`` (lists of processes) in an order that lets as many as
    possible be created at a time. Each group goes into the first round in which none of its members
    has another group (first fit, as in edge colouring). The number of rounds is at best the largest
    number of groups of one process; for pairs it is always less than twice that."""
    used: dict[int, int] = {}  # per process, a bit for every round in which it has a group
    rounds = []
    for members in groups:
        busy = 0
        for process in members:
            busy |= used.get(process, 0)
        free = ~busy & (busy + 1)  # the lowest bit that is not set
        for process in members:
            used[process] = used.get(process, 0) | free
        rounds.append(free)
    return sorted(range(len(groups)), key=rounds.__getitem__)


def longest_chain(groups: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest chain of groups, in creation order, in which each group
    waits for the one before."""
    ends: dict[int, int] = {}
    longest = 0
    for members in groups:
        end = 1 + max((ends.get(process, 0) for process in members), default=0)
        ends.update(dict.fromkeys(members, end))
        longest = max(longest, end)
    return longest
