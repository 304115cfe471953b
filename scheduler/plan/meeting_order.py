"""In which order processes make the groups that they share with others.

Every process makes the groups that it is a member of, and no others, in the order of their numbers,
and is done with one before it begins the next. Whatever the numbers are, that ends: all members of
the first group that is not made yet have nothing left to make before it. What the numbers decide
is how long it takes, as a group waits for the groups that its members make before.
"""

from __future__ import annotations

from collections.abc import Sequence


def meeting_order(groups: Sequence[Sequence[int]]) -> list[int]:
    """The groups by their places in ``groups``, such that as many as can be are made at a time.

    Each goes into the first round in which none of its members has another one (first fit), as
    colours are given to edges of a graph: the rounds are no more than the groups that one
    process is in where that is possible, and for pairs always fewer than twice as many.

    Args:
        groups: processes of each.
    """
    taken: dict[int, int] = {}  # per process, a bit for every round in which it has a group
    rounds = []
    for members in groups:
        busy = 0
        for process in members:
            busy |= taken.get(process, 0)
        free = ~busy & (busy + 1)  # the lowest bit that is not set
        for process in members:
            taken[process] = taken.get(process, 0) | free
        rounds.append(free)
    return sorted(range(len(groups)), key=rounds.__getitem__)


def longest_chain(groups: Sequence[Sequence[int]]) -> int:
    """Groups, in the order in which they are made, of which each waits for the one before: the most
    that are made one after another."""
    ends: dict[int, int] = {}
    longest = 0
    for members in groups:
        end = 1 + max((ends.get(process, 0) for process in members), default=0)
        ends.update(dict.fromkeys(members, end))
        longest = max(longest, end)
    return longest
