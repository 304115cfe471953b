"""Backward of a stage in two passes: gradients of its inputs now, gradients of its parameters
later.

Zero-bubble schedules send the gradient of a stage's input before they compute the stage's weight
gradients (B_d, then B_w). Both passes together do exactly the work of one
``torch.autograd.backward``, for any module: the autograd graph is split, not the module.

Graph nodes that lead to an input form the *gradient chain*. Pass one runs the chain. The engine
skips edges out of the chain, which lead to parameters only (the weight's edge of a matrix product),
and the gradients that flow into their nodes are kept. Pass two runs those nodes again, each for the
skipped edges only, and all nodes between them and the parameters.

If one node lies above another on the way to the same parameter, pass two would count the lower
node's part twice. Where this is possible (a norm's weight used twice, a bias shared by several
layers), and for custom autograd functions, which may not distinguish their edges, pass one computes
the parameter's whole gradient. A weight that matrix products share (a tied head, recurrent layers)
is not affected: each use has its own transpose node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[torch.Tensor | None, ...]


class _Boundary(NamedTuple):
    """Node of the gradient chain with edges to parameters.

    Attributes:
        height: length of the node's longest path to an input.
        parameters: parameters that these edges lead to, if no other boundary does; else empty.
    """

    node: Node
    height: int
    cuts: tuple[GradientEdge, ...]
    parameters: tuple[torch.Tensor, ...]


def backward_input(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
) -> tuple[Gradients, DeferredWeights]:
    """Run pass one: compute gradients of ``inputs``, which are leaves that require grad.

    Args:
        outputs: outputs that do not require grad are ignored.
        gradients: gradient of each output; None for a scalar means one.
        inputs: leaves. All other leaves of the graph that require grad are parameters.

    Returns:
        The gradient of each input (None if no output depends on it), and the deferred pass two. The
        graph lives until :meth:`DeferredWeights.run`. Gradients that cannot be deferred have been
        accumulated into ``parameter.grad``.
    """
    pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if t.requires_grad]
    roots = [get_gradient_edge(t) for t, _ in pairs]
    leaves = [get_gradient_edge(t) for t in inputs]
    split = _Split([edge.node for edge in roots], {edge.node for edge in leaves})
    deferred = DeferredWeights(split)
    for edge, (tensor, gradient) in zip(roots, pairs, strict=True):
        if edge.node in split.due:
            received = torch.ones_like(tensor) if gradient is None else gradient
            deferred.add(edge, received)
    targets = [*inputs, *(_variable(node) for node in split.early)]
    computed: Gradients = ()
    if targets and pairs:
        computed = torch.autograd.grad(
            [t for t, _ in pairs], targets, [g for _, g in pairs],
            retain_graph=bool(split.due), allow_unused=True,
        )
    with torch.no_grad():
        for node, gradient in zip(split.early, computed[len(inputs) :], strict=True):
            if gradient is not None:
                cast(Callable[..., Any], node)(gradient)  # accumulates, as the engine would
    return computed[: len(inputs)] or (None,) * len(inputs), deferred


def _variable(node: Node) -> torch.Tensor:
    return cast(Any, node).variable


class DeferredWeights:
    """Pass two, which computes the parameters' gradients."""

    def __init__(self, split: _Split) -> None:
        self._boundaries = split.boundaries
        self._due = split.shared_parameters
        self._roots: list[tuple[GradientEdge, torch.Tensor]] = []
        self._captured: dict[int, Gradients] = {}
        self._hooks = [
            boundary.node.register_prehook(_capture(self._captured, index))
            for index, boundary in enumerate(self._boundaries)
        ]

    def add(self, edge: GradientEdge, gradient: torch.Tensor) -> None:
        self._roots.append((edge, gradient))

    def run(self) -> None:
        """Accumulate gradients into ``parameter.grad`` and free the graph; can run once. Nodes run
        from the outputs to the inputs, so that activations are freed along the way."""
        levels = _levels(self._boundaries)
        self._boundaries = ()
        while levels:
            level = levels.pop()
            self._run_level(level)
            for index, _ in level:
                self._hooks[index].remove()
                self._captured.pop(index, None)
        if self._roots:
            edges, gradients = zip(*self._roots, strict=True)
            self._roots = []
            torch.autograd.backward(edges, gradients, inputs=self._due)

    def _run_level(self, level: list[tuple[int, _Boundary]]) -> None:
        """Run a level, where no node is above another, in at most two engine runs."""
        for alone in (True, False):
            roots: list[GradientEdge] = []
            gradients: list[torch.Tensor] = []
            targets: list[torch.Tensor] = []
            cuts: list[GradientEdge] = []
            for index, boundary in level:
                if bool(boundary.parameters) != alone:
                    continue
                for number, gradient in enumerate(self._captured.get(index, ())):
                    if gradient is not None:
                        roots.append(GradientEdge(boundary.node, number))
                        gradients.append(gradient)
                targets += boundary.parameters
                cuts += boundary.cuts
            if roots and alone:
                torch.autograd.backward(roots, gradients, inputs=targets)
            elif roots:
                cut_gradients = torch.autograd.grad(roots, cuts, gradients, allow_unused=True)
                for edge, gradient in zip(cuts, cut_gradients, strict=True):
                    if gradient is not None:
                        self.add(edge, gradient)


def _capture(captured: dict[int, Gradients], index: int):
    """Return a hook that keeps what flows into a node in pass one and repeats it in pass two; a
    tensor's own hooks would otherwise be applied twice."""

    def hook(gradients: Gradients) -> Gradients:
        return captured.setdefault(index, gradients)

    return hook


class _Split:
    """Assignment of graph nodes to the passes, found in one walk over the graph.

    Attributes:
        early: AccumulateGrad nodes of parameters that pass one must compute.
        due: nodes outside the gradient chain that lead to other parameters.
        boundaries: nodes of the chain with edges to ``due``, in any order.
        shared_parameters: parameters that several boundaries or outputs lead to.
    """

    def __init__(self, roots: Sequence[Node], inputs: set[Node]) -> None:
        order, self._edges = _walk(roots)
        self.height: dict[Node, int] = {}
        for node in order:
            below = [self.height[c.node] for c in self._edges[node] if c.node in self.height]
            if node in inputs:
                self.height[node] = 0
            elif below:
                self.height[node] = 1 + max(below)
        outside = [node for node in order if node not in self.height]
        leads = self._leading(outside, set())
        parents: dict[Node, set[Node]] = {}
        for node in self.height:
            for edge in self._edges[node]:
                if edge.node in leads:
                    parents.setdefault(edge.node, set()).add(node)
        free = [node for node in roots if node not in self.height]
        early = self._early(parents, free)
        self.early = [node for node in early if _is_leaf(node)]
        self.due = self._leading(outside, early) if early else leads
        self._assign(outside, parents, free)

    def _leading(self, outside: Iterable[Node], excluded: set[Node]) -> set[Node]:
        """Return the nodes (given children first) that lead to a parameter that is not excluded."""
        leads: set[Node] = set()
        for node in outside:
            if _is_leaf(node) and node not in excluded:
                leads.add(node)
            elif any(edge.node in leads for edge in self._edges[node]):
                leads.add(node)
        return leads

    def _early(self, parents: dict[Node, set[Node]], free: list[Node]) -> set[Node]:
        """Return the nodes whose parameters pass one must compute, and all nodes below them: nodes
        that the chain enters in several places, directly and through another node, or from a custom
        function."""
        several = {
            node for node, above in parents.items()
            if len(above) > 1 or any(isinstance(upper, BackwardCFunction) for upper in above)
        }
        entries = [*parents, *free]
        inner = self._below(edge.node for node in entries for edge in self._edges[node])
        several |= parents.keys() & (inner | set(free))
        return self._below(several)

    def _below(self, nodes: Iterable[Node]) -> set[Node]:
        seen: set[Node] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += [edge.node for edge in self._edges[node]]
        return seen

    def _assign(
        self, outside: list[Node], parents: dict[Node, set[Node]], free: list[Node]
    ) -> None:
        """Find the boundaries, and the boundaries that share no parameters."""
        owner: dict[Node, Node | None] = dict.fromkeys(free)
        for node, above in parents.items():
            if node in self.due:
                (owner[node],) = above
        sharing: set[Node | None] = {None}
        for node in reversed(outside):  # parents first
            if node not in owner or node not in self.due:
                continue
            for edge in self._edges[node]:
                if edge.node not in self.due:
                    continue
                first_owner = owner.setdefault(edge.node, owner[node])
                if first_owner is not owner[node]:
                    sharing |= {first_owner, owner[node]}
                    owner[edge.node] = None
        parameters: dict[Node, list[torch.Tensor]] = {}
        self.shared_parameters: list[torch.Tensor] = []
        for node in outside:
            if node in self.due and _is_leaf(node):
                only = owner[node]
                if only is None or only in sharing:
                    self.shared_parameters.append(_variable(node))
                else:
                    parameters.setdefault(only, []).append(_variable(node))
        cuts: dict[Node, list[GradientEdge]] = {}
        for node in parents:
            if node in self.due:
                (above,) = parents[node]
                cuts[above] = [e for e in self._edges[above] if e.node in self.due]
        self.boundaries = tuple(
            _Boundary(
                node, self.height[node], tuple(dict.fromkeys(edges)),
                () if node in sharing else tuple(parameters[node]),
            )
            for node, edges in cuts.items()
        )


def _levels(boundaries: Sequence[_Boundary]) -> list[list[tuple[int, _Boundary]]]:
    """Group boundaries by height, lowest first. At the same height no boundary is above another."""
    levels: dict[int, list[tuple[int, _Boundary]]] = {}
    for index, boundary in enumerate(boundaries):
        levels.setdefault(boundary.height, []).append((index, boundary))
    return [levels[height] for height in sorted(levels)]


def _walk(roots: Iterable[Node]) -> tuple[list[Node], dict[Node, tuple[GradientEdge, ...]]]:
    """Return all nodes below the roots, children before parents, and their edges."""
    edges: dict[Node, tuple[GradientEdge, ...]] = {}
    order: list[Node] = []
    waiting = [(node, False) for node in roots]
    while waiting:
        node, finished = waiting.pop()
        if finished:
            order.append(node)
        elif node not in edges:
            edges[node] = tuple(GradientEdge(n, i) for n, i in node.next_functions if n is not None)
            waiting.append((node, True))
            waiting += [(edge.node, False) for edge in edges[node] if edge.node not in edges]
    return order, edges


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"
