"""Exchange of items between samples, to measure whether a model uses them."""

import torch

from raymm.data.samples.collate import Microbatch


def shuffle_modality(
    microbatch: Microbatch, name: str, generator: torch.Generator | None = None, rows: int = 1
) -> Microbatch:
    """Return a copy of a microbatch in which other samples get the items of one modality.

    ``sample_index`` is unchanged, so each sample keeps its number of items. No item stays with its
    sample, unless a sample owns more than half of the items; then as few as possible stay. A
    microbatch without the modality is returned unchanged.

    Args:
        microbatch: from ``collate``; not modified.
        rows: consecutive rows that share the items of a sample, such as 2 for pairs of answers. All
            rows of a sample get the items of the same other sample.
    """
    if name not in microbatch:
        return microbatch
    inputs = microbatch[name]
    owners = inputs["sample_index"].tolist()
    copies = [[i for i, row in enumerate(owners) if row % rows == copy] for copy in range(rows)]
    owner = [owners[item] // rows for item in copies[0]]
    # A ring of all items in which samples, and the items of each sample, are in random order.
    # Rotating it by the largest number of items of a sample moves every item to another sample.
    rank = torch.randperm(max(owner) + 1, generator=generator).tolist()
    item_order = torch.randperm(len(owner), generator=generator).tolist()
    ring = sorted(item_order, key=lambda item: rank[owner[item]])
    shift = max(owner.count(sample) for sample in set(owner)) % len(ring)
    source = torch.empty(len(owners), dtype=torch.int64)
    for items in map(torch.tensor, copies):
        source[items[ring]] = items[ring[shift:] + ring[:shift]]
    moved = {k: value if k == "sample_index" else value[source] for k, value in inputs.items()}
    return {**microbatch, name: moved}
