"""The probe of expert parallelism: can a model's experts be dealt out over processes?"""

from __future__ import annotations

from raymm.actors.experts.parallel import check_experts
from raymm.actors.experts.routing import expert_count, experts
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.probe.small_model import small_model
from raymm.actors.weights.source import ModuleSource
from raymm.errors import ModelError, ProbeError


@plain_torch()
def probe_experts(source: ModuleSource, ep: int, name: str) -> tuple[str, ...]:
    """The modules of a model that hold a layer's experts, by dotted name, tried on a small copy.

    Args:
        source: of the model.
        ep: processes among which experts are to be dealt out; of 1, there are none to name.
        name: of the module, for errors.

    Raises:
        ProbeError: it has no experts that can be dealt out; by name.
    """
    if ep == 1:
        return ()
    skeleton = source.skeleton()
    holders = experts(skeleton)
    if not holders:
        raise ProbeError(
            f"ep of {name!r} is {ep}, but {type(skeleton).__name__} has no experts (modules whose "
            "parameters stack all experts of a layer, as in transformers); accepted: 1"
        )
    for where, module in holders.items():
        if (count := expert_count(module)) < ep:
            raise ProbeError(
                f"ep of {name!r} is {ep}, but {where!r} has {count} experts; accepted: 1, or at "
                f"most {count}"
            )
    for where, module in experts(small_model(source)).items():
        try:
            check_experts(module)
        except ModelError as error:
            raise ProbeError(
                f"ep of {name!r} is {ep}, but the experts {where!r} of {type(skeleton).__name__} "
                f"cannot be sharded: {error}; accepted: 1"
            ) from error
    return tuple(holders)
