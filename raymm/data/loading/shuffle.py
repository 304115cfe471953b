"""Give every sample another sample's images: what a model that ignores them would not notice."""

import torch

from raymm.data.samples.collate import Microbatch


def shuffle_modality(
    microbatch: Microbatch, name: str, generator: torch.Generator | None = None, rows: int = 1
) -> Microbatch:
    """Return a copy of a microbatch in which other samples get the items of one modality.

    ``sample_index`` stays, so each sample keeps its number of items. No item stays with its
    sample, unless some sample owns more than half of them (then as few as possible stay; with
    a single item nothing can move). A microbatch without the modality is returned as it is.

    Args:
        microbatch: as from ``collate``; not changed.
        name: the modality.
        generator: of the random order; torch's default one if None.
        rows: consecutive rows of each sample, every one of which has the sample's items: 2 for
            pairs of answers. All rows of a sample get the items of the same other sample.
    """
    if name not in microbatch:
        return microbatch
    part = microbatch[name]
    owners = part["sample_index"].tolist()
    copies = [[i for i, row in enumerate(owners) if row % rows == copy] for copy in range(rows)]
    owner = [owners[item] // rows for item in copies[0]]
    # Items of one sample side by side, samples and items in random order. Rotating that ring by
    # the largest sample's count moves every item out of its own sample's run.
    rank = torch.randperm(max(owner) + 1, generator=generator).tolist()
    within = torch.randperm(len(owner), generator=generator).tolist()
    ring = sorted(within, key=lambda item: rank[owner[item]])
    shift = max(owner.count(sample) for sample in set(owner)) % len(ring)
    source = torch.empty(len(owners), dtype=torch.int64)
    for items in map(torch.tensor, copies):
        source[items[ring]] = items[ring[shift:] + ring[:shift]]
    moved = {k: value if k == "sample_index" else value[source] for k, value in part.items()}
    return {**microbatch, name: moved}
