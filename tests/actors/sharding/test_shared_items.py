"""Encoders with item tokens sharded over real processes.

Results equal those of a single process.
"""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

from raymm.actors.executor.split_backward import backward_input
from raymm.actors.modules.draws import Draws
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.modules.projector import Projector, ProjectorConfig
from raymm.actors.probe.cut import probe_encoder
from raymm.actors.sharding.context_method import attend_over
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.weights.source import LiveSource
from raymm.kernels.attention import attention
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.mask.patterns import documents, full
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
