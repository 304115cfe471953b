"""Give every sample another sample's images: what a model that ignores them would not notice."""

import torch

from raymm.data.samples.collate import Microbatch


def shuffle_modality(
    microbatch: Microbatch, name: str, generator: torch.Generator | None = None
) -> Microbatch:
    """A copy of a microbatch in which the items of one modality are dealt to other samples.

    ``sample_index`` stays, so each sample keeps its number of items. No item stays with its
    sample, unless some sample owns more than half of them (then as few as possible stay; with
    a single item nothing can move). A microbatch without the modality is returned as it is.

    Args:
        microbatch: as from ``collate``; not changed.
        name: the modality.
        generator: of the random order; torch's default one if None.
    """
    if name not in microbatch:
        return microbatch
    part = microbatch[name]
    owner = part["sample_index"].tolist()
    # Items of one sample side by side, samples and items in random order. Rotating that ring by
    # the largest sample's count moves every item out of its own sample's run.
    rank = torch.randperm(max(owner) + 1, generator=generator).tolist()
    within = torch.randperm(len(owner), generator=generator).tolist()
    ring = sorted(within, key=lambda item: rank[owner[item]])
    shift = max(owner.count(sample) for sample in set(owner)) % len(ring)
    source = torch.empty(len(ring), dtype=torch.int64)
    source[ring] = torch.tensor(ring[shift:] + ring[:shift])
    moved = {k: value if k == "sample_index" else value[source] for k, value in part.items()}
    return {**microbatch, name: moved}
