"""Cost of a transformer's forward pass per unit of a sample."""

from __future__ import annotations

from raymm.scheduler.minibatch.costs import UnitCost


def transformer_cost(
    parameters: float, layers: int, hidden: int, *,
    tokens_per_unit: int = 1, causal: bool = False, units_attend: bool = True,
) -> UnitCost:
    """Return the FLOPs of a transformer's forward pass.

    Megatron-LM's count: 2 per parameter and token, and ``4 * layers * hidden`` per pair of tokens,
    half of it under a causal mask.

    Args:
        tokens_per_unit: e.g. 1025 for a 448-pixel tile in patches of 14.
        causal: True if tokens see only earlier tokens.
        units_attend: False if attention stays within a unit, as within an image tile.
    """
    linear = 2.0 * parameters * tokens_per_unit
    pairs = 4.0 * layers * hidden * tokens_per_unit**2 * (0.5 if causal else 1.0)
    return UnitCost(linear, pairs) if units_attend else UnitCost(linear + pairs, 0.0)
