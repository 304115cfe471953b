"""Probe of expert parallelism: can a model's experts be sharded over processes?"""

from __future__ import annotations

from raymm.actors.experts.parallel import check_experts
from raymm.actors.experts.routing import expert_count, experts
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.probe.small_model import small_model
from raymm.actors.weights.source import ModuleSource
from raymm.errors import ModelError, ProbeError
from raymm.plural import plural


@plain_torch()
def probe_experts(source: ModuleSource, ep: int, name: str) -> tuple[str, ...]:
    """Return the dotted names of the modules with experts, after a trial on a small copy; none for
    ep 1.

    Raises:
        ProbeError: the model, called ``name`` in errors, has no experts that can be sharded.
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
                f"ep of {name!r} is {ep}, but {where!r} has {plural(count, 'expert')}; accepted: "
                f"1, or at most {count}"
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
