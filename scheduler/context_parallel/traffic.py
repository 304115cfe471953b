"""Bytes that context-parallel attention sends, per rank, and the method that sends the least.

Only payload is counted, as in ``raymm.kernels.collectives.p2p.Exchange``; the methods are those of
``raymm.kernels.context_parallel.attention``. The table shows the mean over ranks, for any layout
(as in LV-XAttn §3.2). ``n`` is the number of ranks, ``Sq`` rows and ``Skv`` keys of the whole
sequence, ``Hq`` and ``Hk`` heads, ``D`` the head dim, ``e`` bytes per activation and ``a`` bytes
per accumulator.

=========  ===========================================  ======================================
method     forward                                      backward
=========  ===========================================  ======================================
gather     (n-1)/n Skv Hk D 2e                          (n-1)/n Skv Hk D (2e + 2a)
needed     as gather, with F/n instead of (n-1)/n Skv; F is the number of keys on other ranks
           that a rank's rows see, summed over ranks
ring       as gather                                    as gather
ulysses    (n-1)/n^2 D e (2 Sq Hq + 2 Skv Hk)           as forward
rotate     (n-1)/n Sq Hq [D (e + a) + 4]                (n-1)/n Sq Hq [D (2e + a) + 8]
=========  ===========================================  ======================================

(The 4 is an fp32 LSE; the 8 is the LSE and rowsum(dO * O).) Single ranks of a ragged layout differ
from the mean; the functions return the bytes of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import index

from raymm.errors import PlanError

LSE_BYTES = 4  # LSE and rowsum(dO * O) are always fp32

Pairs = Sequence[Sequence[int]]


@dataclass(frozen=True)
class AttentionShape:
    """Shape of one attention call over the ranks of a group.

    Attributes:
        query_tokens: rows of every rank, in the group's order.
        query_heads, key_heads, head_dim: Hq, Hk, D.
        activation_bytes: e, bytes per element of Q, K, V, O.
        accumulator_bytes: a, bytes per element of a sum over ranks.
        sequences: number of sequences in a batch with one layout.

    Raises:
        PlanError: a size is too small, the numbers of query and key sizes differ, or key heads do
            not divide the query heads.
    """

    query_tokens: tuple[int, ...]
    key_tokens: tuple[int, ...]
    query_heads: int
    key_heads: int
    head_dim: int
    activation_bytes: int = 2
    accumulator_bytes: int = 4
    sequences: int = 1

    def __post_init__(self) -> None:
        for name in ("query_tokens", "key_tokens"):
            sizes = tuple(index(size) for size in getattr(self, name))
            if not sizes or min(sizes) < 0:
                raise PlanError(
                    f"{name} must be one number of at least 0 per rank, got {sizes}"
                )
            object.__setattr__(self, name, sizes)
        if len(self.query_tokens) != len(self.key_tokens):
            raise PlanError(
                f"query_tokens and key_tokens must have one entry per rank, got "
                f"{len(self.query_tokens)} and {len(self.key_tokens)}"
            )
        for name in (
            "query_heads", "key_heads", "head_dim", "activation_bytes", "accumulator_bytes",
            "sequences",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise PlanError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.query_heads % self.key_heads:
            raise PlanError(
                f"query_heads must be a multiple of key_heads = {self.key_heads}, got "
                f"{self.query_heads}"
            )

    @classmethod
    def even(cls, ranks: int, queries: int, keys: int, **rest: int) -> AttentionShape:
        """Return a shape whose Sq ``queries`` and Skv ``keys`` are split in contiguous parts that
        differ by at most one token. ``rest`` has the other fields."""
        if ranks < 1:
            raise PlanError(f"ranks must be at least 1, got {ranks}")
        return cls(_even(queries, ranks), _even(keys, ranks), **rest)

    @property
    def ranks(self) -> int:
        return len(self.query_tokens)


@dataclass(frozen=True)
class MethodBytes:
    """Bytes that one method sends.

    Attributes:
        forward, backward: bytes sent by every rank; empty if the method is refused.
        refused: reason why the method cannot be used, or empty.
    """

    method: str
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    refused: str = ""

    @property
    def per_rank(self) -> tuple[int, ...]:
        """Bytes of both passes, by rank."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))

    @property
    def largest(self) -> int:
        """Bytes of both passes of the rank that sends most, which the other ranks wait for."""
        return max(self.per_rank)

    @property
    def total(self) -> int:
        """Bytes of both passes of all ranks."""
        return sum(self.per_rank)


@dataclass(frozen=True)
class MethodChoice:
    """Chosen method, and the bytes of all methods considered, in the order in which ties are
    broken."""

    method: str
    table: tuple[MethodBytes, ...] = field(repr=False)

    @property
    def chosen(self) -> MethodBytes:
        return next(row for row in self.table if row.method == self.method)

    def describe(self) -> str:
        """Return one line per method: mean bytes per rank forward and backward, and the largest of
        a rank. An asterisk marks the chosen method."""
        lines = [f"  {'method':8} {'forward':>14} {'backward':>14} {'largest rank':>14}"]
        for row in self.table:
            mark = "*" if row.method == self.method else " "
            if row.refused:
                lines.append(f"{mark} {row.method:8} {row.refused}")
                continue
            means = (sum(values) / len(values) for values in (row.forward, row.backward))
            numbers = " ".join(f"{number:14,.0f}" for number in (*means, row.largest))
            lines.append(f"{mark} {row.method:8} {numbers}")
        return "\n".join(lines)


def method_bytes(
    shape: AttentionShape, method: str, needed_keys: Pairs | None = None
) -> MethodBytes:
    """Return the bytes that every rank sends, forward and backward, with one of :data:`METHODS`.

    Args:
        needed_keys: (n, n), only for ``needed``: rows of rank ``r`` see ``needed_keys[r][s]`` keys
            of rank ``s`` in some sequence. The diagonal is not read.

    Raises:
        PlanError: unknown method, heads that ``ulysses`` cannot split, ``needed`` without
            ``needed_keys``, or ``needed_keys`` of the wrong shape or out of range.
    """
    if method not in METHODS:
        raise PlanError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    refused = refusal(shape, method, needed_keys)
    if refused:
        raise PlanError(f"method {method!r}: {refused}")
    pairs = None if needed_keys is None else _checked(shape, needed_keys)
    forward, backward = _BYTES[method](shape, pairs)
    times = shape.sequences
    return MethodBytes(
        method, tuple(times * b for b in forward), tuple(times * b for b in backward)
    )


def refusal(shape: AttentionShape, method: str, needed_keys: Pairs | None = None) -> str:
    """Return the reason why a method cannot be used for this shape; empty if it can."""
    if method == "ulysses" and (shape.query_heads % shape.ranks or shape.key_heads % shape.ranks):
        return (
            f"splits heads: query_heads = {shape.query_heads} and key_heads = "
            f"{shape.key_heads} must be multiples of {shape.ranks} ranks"
        )
    if method == "needed" and needed_keys is None:
        return "needs needed_keys, which the attention mask provides"
    return ""


def choose_method(
    shape: AttentionShape,
    needed_keys: Pairs | None = None,
    *,
    backward: bool = True,
    methods: Sequence[str] | None = None,
) -> MethodChoice:
    """Choose the method whose busiest rank sends the fewest bytes. Ties are broken by the fewest
    bytes in total, then by the order of :data:`METHODS`.

    Args:
        needed_keys: as in :func:`method_bytes`; without them ``needed`` is not considered.
        backward: False to count the backward pass as 0 bytes.
        methods: accepted methods (default: all); those that cannot be used are skipped.

    Raises:
        PlanError: unknown method, or none can be used; the message has the reasons.
    """
    allowed = METHODS if methods is None else tuple(methods)
    unknown = [method for method in allowed if method not in METHODS]
    if unknown or not allowed:
        raise PlanError(
            f"methods must be some of {', '.join(METHODS)}, got {list(allowed)}"
        )
    table = []
    for method in (method for method in METHODS if method in allowed):
        refused = refusal(shape, method, needed_keys)
        if refused:
            table.append(MethodBytes(method, refused=refused))
            continue
        row = method_bytes(shape, method, needed_keys)
        table.append(row if backward else MethodBytes(method, row.forward, (0,) * shape.ranks))
    usable = [row for row in table if not row.refused]
    if not usable:
        reasons = "; ".join(f"{row.method} {row.refused}" for row in table)
        raise PlanError(f"methods {list(allowed)}: none can be used: {reasons}")
    # min keeps the first of equal rows.
    best = min(usable, key=lambda row: (row.largest, row.total))
    return MethodChoice(best.method, tuple(table))


def _even(tokens: int, ranks: int) -> tuple[int, ...]:
    edges = [tokens * rank // ranks for rank in range(ranks + 1)]
    return tuple(b - a for a, b in zip(edges, edges[1:], strict=False))


def _checked(shape: AttentionShape, needed_keys: Pairs) -> list[list[int]]:
    pairs = [[index(count) for count in row] for row in needed_keys]
    if len(pairs) != shape.ranks or any(len(row) != shape.ranks for row in pairs):
        raise PlanError(
            f"needed_keys must be ({shape.ranks}, {shape.ranks}), got rows of "
            f"{[len(row) for row in pairs]}"
        )
    for rank, row in enumerate(pairs):
        for peer, count in enumerate(row):
            if peer != rank and not 0 <= count <= shape.key_tokens[peer]:
                raise PlanError(
                    f"needed_keys[{rank}][{peer}] must be 0 to {shape.key_tokens[peer]}, the "
                    f"keys of rank {peer}, got {count}"
                )
    return pairs


def _others_but(sizes: Sequence[int], rank: int) -> int:
    return sum(sizes) - sizes[rank % len(sizes)]


def _needed(shape: AttentionShape, pairs: list[list[int]]):
    """Return the bytes by rank, forward and backward: keys and values go to the ranks that need
    them in both passes, and their gradients go back."""
    ranks = range(shape.ranks)
    unit = 2 * shape.key_heads * shape.head_dim
    sent = [unit * sum(pairs[r][me] for r in ranks if r != me) for me in ranks]
    received = [unit * sum(pairs[me][r] for r in ranks if r != me) for me in ranks]
    e, a = shape.activation_bytes, shape.accumulator_bytes
    return (
        [e * keys for keys in sent],
        [e * keys + a * gradients for keys, gradients in zip(sent, received, strict=True)],
    )


def _gather(shape: AttentionShape, _: object):
    return _needed(shape, [list(shape.key_tokens)] * shape.ranks)


def _carousel(tokens: Sequence[int], payload: int, result: int) -> list[int]:
    """Return the bytes that each rank passes along a ring: every payload and result, except the
    payload of the next rank and the results for its own payload, which end there."""
    return [
        payload * _others_but(tokens, me + 1) + result * _others_but(tokens, me)
        for me in range(len(tokens))
    ]


def _ring(shape: AttentionShape, _: object):
    unit = 2 * shape.key_heads * shape.head_dim
    keys, gradients = unit * shape.activation_bytes, unit * shape.accumulator_bytes
    return _carousel(shape.key_tokens, keys, 0), _carousel(shape.key_tokens, keys, gradients)


def _rotate(shape: AttentionShape, _: object):
    """Forward: Q circulates, O and LSE return. Backward: Q, dO, LSE and rowsum(dO * O) circulate,
    dQ returns."""
    heads, dim = shape.query_heads, shape.head_dim
    row, sums = dim * shape.activation_bytes, dim * shape.accumulator_bytes
    tokens = shape.query_tokens
    return (
        _carousel(tokens, heads * row, heads * (sums + LSE_BYTES)),
        _carousel(tokens, heads * (2 * row + 2 * LSE_BYTES), heads * sums),
    )


def _ulysses(shape: AttentionShape, _: object):
    """Return the bytes of both all-to-alls: local tokens of other ranks' heads go out, other ranks'
    tokens of local heads return. Forward: Q, K, V and O; backward: dO, dQ, dK and dV."""
    unit = shape.head_dim * shape.activation_bytes
    forward, backward = [], []
    for me in range(shape.ranks):
        (rows_out, rows_home), (keys_out, keys_home) = (
            (
                unit * heads // shape.ranks * (shape.ranks - 1) * tokens[me],
                unit * heads // shape.ranks * _others_but(tokens, me),
            )
            for heads, tokens in (
                (shape.query_heads, shape.query_tokens),
                (shape.key_heads, shape.key_tokens),
            )
        )
        forward.append(rows_out + 2 * keys_out + rows_home)
        backward.append(rows_out + rows_home + 2 * keys_home)
    return forward, backward


_BYTES: dict[str, Callable[..., tuple[list[int], list[int]]]] = {
    "gather": _gather,
    "needed": _needed,
    "ulysses": _ulysses,
    "ring": _ring,
    "rotate": _rotate,
}
METHODS = tuple(_BYTES)
"""Known methods, in the order in which ties are broken."""
