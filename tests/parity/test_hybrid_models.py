"""Models whose layers mix tokens by other means than attention.

Packed samples equal separate rows, under layouts, too.
"""

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from raymm.kernels.hf.document_rows import DocumentRows, SharedRows
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import parity_models as pm
from tests.support.parity_check import (
    OPTIMIZER,
    check_gradients,
    check_reference,
    check_training,
    oracle_of,
)
from tests.support.parity_oracle import prepend

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}


def convolutions():
    return hf.Lfm2Config(
        **SIZES, layer_types=["conv", "full_attention"] * 2, block_ff_dim=48,
        block_auto_adjust_ff_dim=False,
    )


def delta_rule():
    return hf.Qwen3_5TextConfig(
        **SIZES, layer_types=["linear_attention", "full_attention"] * 2, head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8,
    )


def state_space():
    return hf.BambaConfig(**SIZES, **MAMBA, attn_layer_indices=[1, 3])


def both_in_a_block():
    return hf.FalconH1Config(**SIZES, **MAMBA, mamba_d_ssm=64, head_dim=8)


def around_a_layer():
    """Return a block that contains a state-space block."""
    return hf.Zamba2Config(
        **SIZES, layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=8, n_mamba_heads=8,
        mamba_headdim=8, mamba_ngroups=1, chunk_size=8, num_mem_blocks=1,
    )


def model_of(config, packing: bool = True, mask=None) -> MultimodalModule:
    vision = ModalityModule(pm.build(pm.siglip(), 1), "mlp")
    llm = ModalityModule(pm.build(config, 3))
    return MultimodalModule({"vision": vision}, llm, mask=mask, packing=packing)


def step() -> list[dict]:
    return [
        pm.batch([21, 9, 15], 4, vision=[0, 0, 2]), pm.batch([3, 11], 5),
        pm.batch([10], 7, vision=[0]),
    ]


@pytest.mark.parametrize(
    ("config", "mixers"),
    [
        (convolutions, {"Lfm2ShortConv"}),
        (state_space, {"BambaMixer"}),
        (both_in_a_block, {"FalconH1Mixer"}),
        (around_a_layer, {"Zamba2MambaMixer"}),
    ],
)
def test_packed_in_one_process(config, mixers):
    model = model_of(config())
    assert model.mixers == mixers
    check_reference(model, oracle_of(model, prepend), step())


def test_the_delta_rule_packed_in_one_process():
    """Accept somewhat larger errors than those of padding.

    Some gradients are small sums of large numbers: more padding alone changes them by more than
    1e-5.
    """
    model = model_of(delta_rule())
    assert model.mixers == {"Qwen3_5GatedDeltaNet"}
    rows = MultimodalModule(
        {}, ModalityModule(model.language_model.module), packing=False
    )
    packed = MultimodalModule({}, ModalityModule(model.language_model.module), packing=True)
    batch = pm.batch([21, 9, 15], 4)
    more = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 9)),
        "labels": torch.nn.functional.pad(batch["labels"], (0, 9), value=-100),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, 9)),
    }

    def gradients(of: MultimodalModule, inputs: dict) -> dict[str, torch.Tensor]:
        of.zero_grad()
        of(**inputs).backward()
        return {n: p.grad.clone() for n, p in of.named_parameters() if p.grad is not None}

    due, padded, got = gradients(rows, batch), gradients(rows, more), gradients(packed, batch)
    assert due.keys() == got.keys()
    for name, gradient in due.items():
        noise = max(1e-5, 5 * float((padded[name] - gradient).norm() / gradient.norm()))
        assert (got[name] - gradient).norm() <= noise * gradient.norm(), name
        assert noise < 1e-2


def test_masks_of_documents_in_one_process():
    model = model_of(convolutions(), packing=False, mask="causal")
    assert model.mixers == {"Lfm2ShortConv"}
    check_reference(model, oracle_of(model, prepend), step())


@pytest.mark.cells(1)
@pytest.mark.parametrize("llm", [ParallelSpec(pp=2), ParallelSpec(dp=2, sharding="fsdp")])
def test_packed_stages_and_shards(ray_cluster, llm):
    """Recompute, too: blocks run again without their surroundings."""
    model = model_of(convolutions())
    oracle = oracle_of(model, prepend)
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(ranks=(0,))}, llm, 3, recompute=llm.pp > 1
    )
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())
        check_training(parallel, oracle, [[step()]])


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("config", "packing", "mask"),
    [
        (convolutions, True, None), (convolutions, False, None),
        (state_space, False, "causal"), (both_in_a_block, True, None),
    ],
)  # fmt: skip
def test_shared_tokens(ray_cluster, config, packing, mask):
    """Shard every sample's tokens over two processes; other token mixers get all tokens."""
    model = model_of(config(), packing, mask)
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(ranks=(0,))}, ParallelSpec(pp=2, cp=2), 3, recompute=packing
    )
    oracle = oracle_of(model, prepend)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())
        check_training(parallel, oracle, [[step()]])


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_documents_are_unpacked_to_rows_and_back(lengths):
    """Compare with a loop over the documents."""
    total = max(map(sum, lengths))
    lengths = tuple((*row, *([total - sum(row)] if sum(row) < total else [])) for row in lengths)
    rows = DocumentRows(lengths)
    value = torch.arange(len(lengths) * total * 2).view(len(lengths), total, 2)
    split = rows.split(value)
    expected = [
        part for row, own in zip(value, lengths, strict=True) for part in row.split(list(own))
    ]
    assert len(split) == len(expected)
    for got, due in zip(split, expected, strict=True):
        assert torch.equal(got[: len(due)], due)
        assert torch.equal(got[len(due) :], due[-1].expand(len(got) - len(due), 2))
    assert torch.equal(rows.join((split, None))[0], value)
    other = torch.zeros(len(lengths) + 1, 3)
    assert rows.split(other) is other


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 3), st.randoms(use_true_random=False),
)
def test_sharded_rows_equal_one_process(lengths, processes, random):
    """Use any assignment of tokens to processes."""
    total = max(max(map(sum, lengths)), processes)
    lengths = tuple((*row, *([total - sum(row)] if sum(row) < total else [])) for row in lengths)
    owners = [*range(processes), *(random.randrange(processes) for _ in range(total - processes))]
    random.shuffle(owners)
    positions = [
        torch.tensor([n for n, owner in enumerate(owners) if owner == rank])
        for rank in range(processes)
    ]
    value = torch.arange(len(lengths) * total * 2).view(len(lengths), total, 2)
    alone = DocumentRows(lengths)
    for rank, own in enumerate(positions):
        rows = SharedRows(
            lengths, positions, rank, lambda _: torch.cat([value[:, p] for p in positions], dim=1)
        )
        split = rows.split((value[:, own], None, torch.zeros(len(lengths) + 1, 3)))
        assert torch.equal(split[0], alone.split(value)) and split[1] is None
        assert torch.equal(rows.join([split[0]])[0], value[:, own])
