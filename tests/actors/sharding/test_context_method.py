"""The method that sends the fewest bytes."""

from raymm.actors.sharding.context_method import choose
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.mask.patterns import causal, documents, full
from raymm.scheduler.context_parallel.traffic import AttentionShape


def test_method_is_the_one_that_sends_least():
    def method(masks, sizes, heads, backward=True):
        edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        layout = ContextLayout(tuple(((a, b),) for a, b in zip(edges, edges[1:], strict=False)))
        shape = AttentionShape(sizes, sizes, *heads, 8, sequences=len(masks))
        return choose(masks, layout, layout, shape, backward=backward)

    assert method((full(8),), (4, 4), (4, 4)) == "ulysses"
    assert method((full(8),), (4, 4), (3, 3)) == "gather"  # heads that are not divisible by two
    assert method((documents([4, 4]),), (4, 4), (4, 4)) == "needed"  # nothing is sent
    assert method((documents([4, 4]), full(8)), (4, 4), (3, 3)) == "gather"
    # The first half's keys are sent in one direction and their gradients back; in the forward
    # alone, the process that owns them sends the same amount.
    assert method((causal(8),), (4, 4), (9, 1)) == "needed"
    assert method((causal(8),), (4, 4), (9, 1), backward=False) == "gather"
    assert method((full(1),), (0, 1), (3, 3)) == "needed"  # no process needs any
