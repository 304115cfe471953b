"""Bytes that context-parallel attention sends, per rank, and the method that sends the least.

Payload only, as ``raymm.kernels.collectives.p2p.Exchange`` counts it; the methods are those of
``raymm.kernels.context_parallel.attention``. With ``n`` ranks, ``Sq`` rows and ``Skv`` keys of the
whole sequence, ``Hq`` and ``Hk`` heads, head dim ``D``, ``e`` bytes per activation and ``a`` per
accumulator, the mean over ranks, whatever the layout, is (LV-XAttn §3.2 counts likewise):

=========  ===========================================  ======================================
method     forward                                      backward
=========  ===========================================  ======================================
gather     (n-1)/n Skv Hk D 2e                          (n-1)/n Skv Hk D (2e + 2a)
needed     the same for F/n instead of (n-1)/n Skv: F keys on other ranks that a rank's rows
           see, summed over ranks
ring       as gather                                    as gather
ulysses    (n-1)/n^2 D e (2 Sq Hq + 2 Skv Hk)           as forward
rotate     (n-1)/n Sq Hq [D (e + a) + 4]                (n-1)/n Sq Hq [D (2e + a) + 8]
=========  ===========================================  ======================================

(4 and 8: an fp32 LSE, and beside it rowsum(dO * O).) Single ranks of a ragged layout differ from
the mean; these functions return each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import index

from raymm.errors import PlanError

LSE_BYTES = 4  # LSE and rowsum(dO * O) are fp32, whatever the accumulator

Pairs = Sequence[Sequence[int]]


@dataclass(frozen=True)
class AttentionShape:
    """One attention call over the ranks of a group.

    Attributes:
        query_tokens: rows of every rank, in the group's order.
        key_tokens: keys of every rank.
        query_heads, key_heads, head_dim: Hq, Hk, D.
        activation_bytes: e, of one element of Q, K, V, O.
        accumulator_bytes: a, of one element of a sum over ranks.
        sequences: B, of a batch with one layout.

    Raises:
        PlanError: sizes below what is accepted, as many key sizes as there are not
            query sizes, query heads that are no multiple of key heads.
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
        """Sq ``queries`` and Skv ``keys`` in contiguous parts that differ by at most one token;
        the other fields by name.

        Args:
            ranks: that share the tokens.
            queries: Sq, of all ranks.
            keys: Skv, of all ranks.
            rest: the other fields.
        """
        if ranks < 1:
            raise PlanError(f"ranks must be at least 1, got {ranks}")
        return cls(_even(queries, ranks), _even(keys, ranks), **rest)

    @property
    def ranks(self) -> int:
        """n."""
        return len(self.query_tokens)


@dataclass(frozen=True)
class MethodBytes:
    """What one method sends.

    Attributes:
        method: its name.
        forward, backward: bytes sent by every rank; empty where it is refused.
        refused: why it cannot be used, or empty.
    """

    method: str
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    refused: str = ""

    @property
    def per_rank(self) -> tuple[int, ...]:
        """Both passes, of every rank."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))

    @property
    def largest(self) -> int:
        """Both passes, of the rank that sends most: what the others wait for."""
        return max(self.per_rank)

    @property
    def total(self) -> int:
        """Both passes, of all ranks."""
        return sum(self.per_rank)


@dataclass(frozen=True)
class MethodChoice:
    """Which method, and the bytes that decided it.

    Attributes:
        method: the one chosen.
        table: all that were considered, in the order in which ties are broken.
    """

    method: str
    table: tuple[MethodBytes, ...] = field(repr=False)

    @property
    def chosen(self) -> MethodBytes:
        """The row of the chosen method."""
        return next(row for row in self.table if row.method == self.method)

    def describe(self) -> str:
        """One line per method: mean bytes per rank forward and backward, the largest of a rank;
        an asterisk before the chosen one."""
        lines = [f"  {'method':8} {'forward':>14} {'backward':>14} {'largest rank':>14}"]
        for row in self.table:
            mark = "*" if row.method == self.method else " "
            if row.refused:
                lines.append(f"{mark} {row.method:8} {row.refused}")
                continue
            means = (sum(part) / len(part) for part in (row.forward, row.backward))
            numbers = " ".join(f"{number:14,.0f}" for number in (*means, row.largest))
            lines.append(f"{mark} {row.method:8} {numbers}")
        return "\n".join(lines)


def method_bytes(
    shape: AttentionShape, method: str, needed_keys: Pairs | None = None
) -> MethodBytes:
    """What every rank sends, forward and backward.

    Args:
        shape: of the call.
        method: one of :data:`METHODS`.
        needed_keys: for ``needed`` only, (n, n): ``needed_keys[r][s]`` of the keys of rank ``s``
            are seen by some row of rank ``r`` in some sequence; the diagonal is not read.

    Raises:
        PlanError: an unknown method, heads that ``ulysses`` cannot deal out,
            ``needed`` without ``needed_keys``, or these of another shape or out of range.
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
    """Why a method cannot be used for this shape; empty if it can.

    Args:
        shape: what is attended to.
        method: one of :data:`METHODS`.
        needed_keys: how many keys each rank needs of each, if known.
    """
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
    """The method whose busiest rank sends the fewest bytes; of equal ones the fewest in all,
    then the first of :data:`METHODS`: one attention over all keys before one per hop.

    Args:
        shape: of the call.
        needed_keys: as :func:`method_bytes` takes them; without them ``needed`` is left out.
        backward: whether there is a backward pass; if not, its bytes are 0.
        methods: which may be chosen (default: all); those that cannot be used are passed over.

    Raises:
        PlanError: an unknown method, or none that can be used: with the reasons.
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
    # min keeps the first of equal ones.
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
        for other, count in enumerate(row):
            if other != rank and not 0 <= count <= shape.key_tokens[other]:
                raise PlanError(
                    f"needed_keys[{rank}][{other}] must be 0 to {shape.key_tokens[other]}, the "
                    f"keys of rank {other}, got {count}"
                )
    return pairs


def _others_but(sizes: Sequence[int], rank: int) -> int:
    return sum(sizes) - sizes[rank % len(sizes)]


def _needed(shape: AttentionShape, pairs: list[list[int]]):
    """Keys and values to those who need them, forward and again backward; gradients of what
    was taken back to where it came from."""
    ranks = range(shape.ranks)
    unit = 2 * shape.key_heads * shape.head_dim
    sent = [unit * sum(pairs[r][me] for r in ranks if r != me) for me in ranks]
    taken = [unit * sum(pairs[me][r] for r in ranks if r != me) for me in ranks]
    e, a = shape.activation_bytes, shape.accumulator_bytes
    return (
        [e * keys for keys in sent],
        [e * keys + a * back for keys, back in zip(sent, taken, strict=True)],
    )


def _gather(shape: AttentionShape, _: object):
    return _needed(shape, [list(shape.key_tokens)] * shape.ranks)


def _carousel(tokens: Sequence[int], payload: int, result: int) -> list[int]:
    """Along a ring a rank passes on every payload but that of the next rank, which is at home
    there, and every result but those of its own payload, which end with it."""
    return [
        payload * _others_but(tokens, me + 1) + result * _others_but(tokens, me)
        for me in range(len(tokens))
    ]


def _ring(shape: AttentionShape, _: object):
    unit = 2 * shape.key_heads * shape.head_dim
    keys, gradients = unit * shape.activation_bytes, unit * shape.accumulator_bytes
    return _carousel(shape.key_tokens, keys, 0), _carousel(shape.key_tokens, keys, gradients)


def _rotate(shape: AttentionShape, _: object):
    """Forward: Q out, O and LSE home. Backward: Q, dO, LSE and rowsum(dO * O) out, dQ home."""
    heads, dim = shape.query_heads, shape.head_dim
    row, sums = dim * shape.activation_bytes, dim * shape.accumulator_bytes
    tokens = shape.query_tokens
    return (
        _carousel(tokens, heads * row, heads * (sums + LSE_BYTES)),
        _carousel(tokens, heads * (2 * row + 2 * LSE_BYTES), heads * sums),
    )


def _ulysses(shape: AttentionShape, _: object):
    """A rank's own tokens of the others' heads go out, the others' tokens of its own heads go
    home: Q, K, V and O forward; dO, dQ, dK and dV backward."""
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
"""Methods that are known, first those that win ties."""
