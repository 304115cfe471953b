"""Encoders with item tokens sharded over real processes, and rejected encoders.

Results equal those of a single process.
"""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from raymm.actors.executor.split_backward import backward_input
from raymm.actors.modules.draws import Draws
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.modules.projector import Projector, ProjectorConfig
from raymm.actors.probe.cut import probe_encoder
from raymm.actors.probe.items import probe_shared_items
from raymm.actors.sharding.context_method import attend_over, choose
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.weights.source import ConfigSource, LiveSource
from raymm.errors import ProbeError
from raymm.kernels.attention import attention
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.mask.patterns import causal, documents, full
from raymm.scheduler.context_parallel.traffic import AttentionShape
from tests.support import parity_models as pm
from tests.support.rank_processes import rank_processes

TOLERANCE = 1e-5
WIDTH = 24  # width of the projector's output
ITEMS = 3


def vit(**more) -> hf.ViTConfig:
    sizes = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    return hf.ViTConfig(**sizes, image_size=pm.IMAGE_SIZE, patch_size=8, **more)


def pixtral() -> hf.PixtralVisionConfig:
    """Return a model with images packed into one item, with separate masks; rotary tables."""
    return hf.PixtralVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        image_size=pm.IMAGE_SIZE, patch_size=8,
    )


def single_token() -> hf.SiglipVisionConfig:
    config = pm.siglip()
    config.patch_size = config.image_size
    return config


CONFIGS = {
    "siglip": pm.siglip, "clip": pm.clip, "vit": vit, "whisper": pm.whisper,
    "pixtral": pixtral, "single_token": single_token,
    "dropout": partial(vit, hidden_dropout_prob=0.2),
}  # fmt: skip
CLASSES = {hf.ViTConfig: hf.ViTModel, hf.PixtralVisionConfig: hf.PixtralVisionModel}
pm.MODEL_CLASSES.update(CLASSES)


def items(name: str) -> dict[str, torch.Tensor]:
    return pm.sounds(ITEMS) if name == "whisper" else pm.images(ITEMS)


def drop_features(inputs, output):
    return F.dropout(output, 0.2)


@dataclass(frozen=True)
class Case:
    """Encoder, with a projector or not, in stages that begin at ``cuts``.

    With ``split``, gradients of inputs are computed first, those of parameters when all stages have
    theirs.
    """

    name: str
    cuts: tuple[int, ...] = ()
    projector: bool = True
    frozen: bool = False
    split: bool = False

    def spec(self) -> EncoderSpec:
        config = CONFIGS[self.name]()
        source = replace(LiveSource.of(pm.build(config)), frozen=self.frozen)
        projector = None
        if self.projector:
            torch.manual_seed(1)
            width = getattr(config, "hidden_size", None) or config.d_model
            made = Projector(ProjectorConfig("mlp", width, WIDTH))
            projector = LiveSource.of(made)
        cut = probe_encoder(source, items(self.name)) if any(0 < c < 2 for c in self.cuts) else None
        return EncoderSpec(
            self.name, source, 2, projector, cut=cut,
            postprocess_projector=drop_features if self.name == "dropout" else None,
        )

    def gradient(self, shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def run_case(
    case: Case, exchange: Exchange | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[int]]:
    """Return output, gradients by name, and the number of tokens that stages send."""
    spec, context = case.spec(), MicrobatchContext(1, draws=Draws(3))
    edges = [0, *case.cuts, spec.num_layers]
    stages = [EncoderStage.build(spec, lo, hi) for lo, hi in zip(edges, edges[1:], strict=False)]
    torch.manual_seed(3)
    received, links = {}, []
    for number, stage in enumerate(stages):
        if exchange is not None:
            stage.share_tokens(exchange)
        sent = stage.run(items(case.name) if number == 0 else None, received, context)
        handed = sent.tensors[0].detach().requires_grad_(sent.tensors[0].requires_grad)
        links.append((sent.tensors[0], handed))
        received = {f"{case.name}.{number}": Message((handed,), sent.side)}
    output = links[-1][1].detach()
    grad = case.gradient(output.shape)
    inputs = [[], *([handed] for _, handed in links[:-1])]
    deferred = []
    for (sent, _), given in zip(reversed(links), reversed(inputs), strict=True):
        if case.split:
            found, later = backward_input([sent], [grad], given)
            deferred.append(later)
            grad = found[0] if given else None
        elif sent.requires_grad:
            sent.backward(grad)
            grad = given[0].grad if given else None
    for later in deferred:
        later.run()
    gradients = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    return output, gradients, [sent.shape[1] for sent, _ in links]


def run_shared(group, case: Case):
    return run_case(case, Exchange(group))


@pytest.fixture(scope="module")
def processes():
    with rank_processes() as running:
        yield running


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def check(case: Case, results) -> None:
    expected, gradients, _ = run_case(case, None)
    for output, _, _ in results:
        assert relative(output, expected) <= TOLERANCE
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0])
    assert gradients
    assert all(one.keys() == gradients.keys() for _, one, _ in results)
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        total = sum(one[name] for _, one, _ in results)
        if gradient.norm() < 1e-6 * largest:  # rounding: keys' biases, softmax over one key
            assert total.norm() < 1e-6 * largest, name
        else:
            assert relative(total, gradient) <= TOLERANCE, name


@pytest.mark.cells(6)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["siglip", "clip", "vit", "whisper", "pixtral"])
def test_whole_encoder_with_and_without_projector(processes, name, ranks):
    for projector in (True, False):
        case = Case(name, projector=projector)
        check(case, processes.run(run_shared, ranks, case=case))


@pytest.mark.cells(6)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["siglip", "clip", "vit", "whisper", "pixtral"])
def test_stages_send_only_local_tokens(processes, name, ranks):
    case = Case(name, cuts=(1,))
    results = processes.run(run_shared, ranks, case=case)
    check(case, results)
    first, last = zip(*(tokens for _, _, tokens in results), strict=True)
    assert len(set(last)) == 1 and sum(first) == last[0]
    assert max(first) - min(first) <= 1


def test_backward_in_two_passes(processes):
    case = Case("clip", cuts=(1, 2), split=True)
    check(case, processes.run(run_shared, 2, case=case))


def test_projector_in_a_separate_stage(processes):
    case = Case("clip", cuts=(1, 2))
    check(case, processes.run(run_shared, 3, case=case))


def test_fewer_tokens_than_processes(processes):
    case = Case("single_token", cuts=(1,))
    results = processes.run(run_shared, 3, case=case)
    check(case, results)
    assert [tokens for _, _, tokens in results] == [[1, 1]] * 3  # two of them are replicas


def test_frozen_encoder_under_a_trainable_projector(processes):
    case = Case("whisper", frozen=True)
    results = processes.run(run_shared, 2, case=case)
    check(case, results)
    assert all(name.startswith("projector.") for name in results[0][1])


def test_replicated_gradients_count_once(processes):
    first, *others = processes.run(run_shared, 3, case=Case("siglip"))
    tail = [name for name in first[1] if name.startswith("projector.")]
    assert tail and all(first[1][name].norm() > 0 for name in tail)
    assert all(one[1][name].count_nonzero() == 0 for one in others for name in tail)


def test_dropout_after_the_blocks_is_the_same_everywhere(processes):
    """Split five tokens over two processes: they use different amounts of random numbers."""
    one, other = processes.run(run_shared, 2, case=Case("dropout"))
    assert bool((one[0] == 0).any())
    assert torch.equal(one[0], other[0])


class Attention(nn.Module):
    is_causal = False

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(8, 24)

    def forward(self, hidden):
        query, key, value = self.qkv(hidden).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, lambda *_, **__: None
        )
        return attend(self, query, key, value, None)[0].flatten(2)


class TinyConfig(hf.PretrainedConfig):
    def __init__(self, mix: str = "", num_hidden_layers: int = 2, **rest) -> None:
        super().__init__(**rest)
        self.mix, self.num_hidden_layers = mix, num_hidden_layers


class TinyBlock(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.attention, self.mix = Attention(config), config.mix
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8) if self.mix == "norm" else nn.Identity()

    def forward(self, hidden_states):
        hidden = hidden_states + self.attention(hidden_states)
        if self.mix == "convolution":
            return hidden + self.convolution(hidden.transpose(1, 2)).transpose(1, 2)
        if self.mix == "mean":  # independent of the order of tokens
            return hidden + hidden.mean(dim=1, keepdim=True)
        return hidden


class TinyEncoder(hf.PreTrainedModel):
    """Encoder whose blocks mix tokens by attention and, on request, otherwise."""

    config_class = TinyConfig
    _supports_sdpa = True

    def __init__(self, config) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(TinyBlock(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, x):
        for _ in range(2 if self.config.mix == "twice" else 1):
            for block in self.blocks:
                hidden = x = block(x)
        return hidden


TINY = {"x": torch.randn(1, 7, 8, generator=torch.Generator().manual_seed(5))}


def test_probe_accepts_working_encoders():
    for name in ("siglip", "clip", "vit", "whisper", "pixtral"):
        probe_shared_items(LiveSource.of(pm.build(CONFIGS[name]())), items(name))
    probe_shared_items(ConfigSource(TinyEncoder, TinyConfig()), TINY)


@pytest.mark.parametrize(
    ("mix", "why"),
    [
        ("convolution", "something besides attention mixes tokens"),
        ("mean", "something besides attention mixes tokens"),
        ("norm", "a BatchNorm1d in its blocks mixes tokens in training"),
        ("twice", "runs its first block more than once"),
    ],
)
def test_probe_refuses_blocks_that_mix_tokens(mix, why):
    with pytest.raises(ProbeError, match=f"TinyEncoder cannot have cp above 1: .*{why}"):
        probe_shared_items(ConfigSource(TinyEncoder, TinyConfig(mix), frozen=False), TINY)


def test_probe_refuses_by_name():
    def refused(config_or_module, why, inputs=None, model_class=None):
        source = (
            LiveSource.of(config_or_module)
            if model_class is None
            else ConfigSource(model_class, config_or_module, frozen=False)
        )
        name = type(source.skeleton()).__name__
        with pytest.raises(ProbeError, match=f"^{name} cannot have cp above 1: .*{why}"):
            probe_shared_items(source, inputs)

    refused(nn.Sequential(nn.Conv2d(3, 4, 8)), "no list of blocks", pm.images(1))
    refused(pm.PlainCNN(), "does not take its attention from", pm.images(1))
    small = dict(num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32)
    # Rotary tables for patches only, in a sequence with other tokens.
    rotary = hf.DINOv3ViTConfig(**small, image_size=32, patch_size=8)
    refused(rotary, "does not run on a part of its tokens", None, hf.DINOv3ViTModel)
    refused(vit(attention_probs_dropout_prob=0.1), "attention dropout", None, hf.ViTModel)
    refused(vit(output_hidden_states=True), "hidden states of all its blocks", None, hf.ViTModel)
    speech = hf.Wav2Vec2Config(**small, num_conv_pos_embedding_groups=2, layerdrop=0.1)
    refused(speech, "leaves out layers at random in training", None, hf.Wav2Vec2Model)
    windows = hf.Swinv2Config(image_size=32, embed_dim=8, depths=[1, 1], num_heads=[1, 1])
    refused(windows, "does not take its attention from", None, hf.Swinv2Model)


def test_method_is_the_one_that_sends_least():
    def method(masks, sizes, heads, backward=True):
        edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        layout = ContextLayout(tuple(((a, b),) for a, b in zip(edges, edges[1:], strict=False)))
        shape = AttentionShape(sizes, sizes, *heads, 8, sequences=len(masks))
        return choose(masks, layout, layout, shape, backward=backward)

    assert method((full(8),), (4, 4), (4, 4)) == "ulysses"
    assert method((full(8),), (4, 4), (3, 3)) == "gather"  # heads that are not divisible by two
    assert method((documents([4, 4]),), (4, 4), (4, 4)) == "needed"  # nothing is sent
    assert method((documents([4, 4]), full(8)), (4, 4), (3, 3)) == "gather"
    # The first half's keys are sent in one direction and their gradients back; in the forward
    # alone, the process that owns them sends the same amount.
    assert method((causal(8),), (4, 4), (9, 1)) == "needed"
    assert method((causal(8),), (4, 4), (9, 1), backward=False) == "gather"
    assert method((full(1),), (0, 1), (3, 3)) == "needed"  # no process needs any


def attend_shared(group, length: int, heads: tuple[int, int], kind: str):
    exchange = Exchange(group)
    layout = ContextLayout.even(length, exchange.size)
    mask = {"full": full(length), "documents": documents([length // 2, length - length // 2])}[kind]
    whole = attention_inputs(length, heads)
    own = layout.positions(exchange.rank)
    local = [tensor[:, :, own] for tensor in whole]
    attend = attend_over(ContextGroup(exchange, layout, layout))
    return attend(*local, (mask,), scale=0.3, softcap=None), mask.shape


def attention_inputs(length: int, heads: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(2, h, length, 8, generator=generator) for h in (heads[0], *heads[1:] * 2)]


@pytest.mark.parametrize(("heads", "kind"), [((4, 2), "full"), ((3, 3), "full"),
                                             ((4, 4), "documents")])  # fmt: skip
def test_attend_over_is_attention(processes, heads, kind):
    results = processes.run(attend_shared, 2, length=11, heads=heads, kind=kind)
    mask = full(11) if kind == "full" else documents([5, 6])
    expected, _ = attention(*attention_inputs(11, heads), mask, scale=0.3)
    assert relative(torch.cat([out for out, _ in results], dim=2), expected) <= TOLERANCE
