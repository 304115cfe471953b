"""Errors that say what a user can set right. Any other error is a defect and keeps its traceback,
but those of a run that failed (:class:`raymm.actors.errors.RunFailedError`)."""

from raymm.actors.group import ClusterError
from raymm.actors.multiplexed.node import OutputError
from raymm.actors.quota.green_context import QuotaUnavailableError
from raymm.actors.quota.partition import QuotaError
from raymm.actors.stages.cut import SharedBlocksError
from raymm.actors.stages.dealt_samples import DealtSamplesError
from raymm.actors.stages.merge import MergeError
from raymm.actors.stages.model_classes import ModelClassError
from raymm.actors.stages.probe import ProbeError
from raymm.actors.stages.shared_items import SharedItemsError
from raymm.actors.stages.source import SourceError
from raymm.actors.stages.tensor_rules import StyleError
from raymm.checkpoint import CheckpointError
from raymm.config_error import ConfigError
from raymm.data import DataError
from raymm.export import ExportError
from raymm.kernels.hf_cross_attention import CrossAttentionError
from raymm.kernels.mask import MaskError
from raymm.layer_count import LoadError
from raymm.microbatches import BatchError
from raymm.model import ModelError
from raymm.scheduler.attention_traffic import AttentionTrafficError
from raymm.scheduler.costs import ProfileError
from raymm.scheduler.devices import DeviceError
from raymm.scheduler.minibatch import MiniBatchError
from raymm.scheduler.multiplex.strict_json import MultiplexError
from raymm.scheduler.partition import PartitionError
from raymm.scheduler.plan_error import PlanError
from raymm.scheduler.recomputation import RecomputationError
from raymm.scheduler.stage_space import StageSearchError
from raymm.scheduler.token_distribution import TokenDistributionError
from raymm.scheduler.token_workload import TokenWorkloadError

USER_ERRORS = (
    AttentionTrafficError, BatchError, CheckpointError, ClusterError, ConfigError,
    CrossAttentionError, DataError, DealtSamplesError, DeviceError, ExportError, LoadError,
    MaskError, MergeError, MiniBatchError, ModelClassError, ModelError, MultiplexError,
    OutputError, PartitionError, PlanError, ProbeError, ProfileError, QuotaError,
    QuotaUnavailableError, RecomputationError, SharedBlocksError, SharedItemsError, SourceError,
    StageSearchError, StyleError, TokenDistributionError, TokenWorkloadError,
)
