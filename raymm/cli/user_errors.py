"""Errors that say what a user can set right. Any other error is a defect and keeps its traceback,
but those of a run that failed (:class:`raymm.actors.faults.errors.RunFailedError`)."""

from raymm.actors.modules.cut import SharedBlocksError
from raymm.actors.modules.merge import MergeError
from raymm.actors.multiplexed.node import OutputError
from raymm.actors.probe.cut import ProbeError
from raymm.actors.quota.green_context import QuotaUnavailableError
from raymm.actors.quota.partition import QuotaError
from raymm.actors.rank.rank_group import ClusterError
from raymm.actors.sharding.sample_rows import DealtSamplesError
from raymm.actors.sharding.shared_items import SharedItemsError
from raymm.actors.sharding.tensor_rules import StyleError
from raymm.actors.weights.model_classes import ModelClassError
from raymm.actors.weights.source import SourceError
from raymm.costs.layer_count import LoadError
from raymm.data import DataError
from raymm.data.loading.in_memory import BatchError
from raymm.files.config_error import ConfigError
from raymm.kernels.hf.cross_attention import CrossAttentionError
from raymm.kernels.mask.mask import MaskError
from raymm.model.multimodal import ModelError
from raymm.scheduler.context_parallel.distribution import TokenDistributionError
from raymm.scheduler.context_parallel.traffic import AttentionTrafficError
from raymm.scheduler.context_parallel.workload import TokenWorkloadError
from raymm.scheduler.costs.devices import DeviceError
from raymm.scheduler.costs.layer_costs import ProfileError
from raymm.scheduler.costs.recomputation import RecomputationError
from raymm.scheduler.graph.strict_json import MultiplexError
from raymm.scheduler.minibatch.problem import MiniBatchError
from raymm.scheduler.plan.plan_error import PlanError
from raymm.scheduler.search.partition import PartitionError
from raymm.scheduler.search.stage_space import StageSearchError
from raymm.storage.checkpoint import CheckpointError
from raymm.storage.export import ExportError

USER_ERRORS = (
    AttentionTrafficError, BatchError, CheckpointError, ClusterError, ConfigError,
    CrossAttentionError, DataError, DealtSamplesError, DeviceError, ExportError, LoadError,
    MaskError, MergeError, MiniBatchError, ModelClassError, ModelError, MultiplexError,
    OutputError, PartitionError, PlanError, ProbeError, ProfileError, QuotaError,
    QuotaUnavailableError, RecomputationError, SharedBlocksError, SharedItemsError, SourceError,
    StageSearchError, StyleError, TokenDistributionError, TokenWorkloadError,
)
