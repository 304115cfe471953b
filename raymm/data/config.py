"""The ``data:`` section of a run's configuration."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

# A microbatch keeps its text tensors under these names, beside the modalities.
TEXT_KEYS = ("input_ids", "attention_mask", "labels")
RESERVED_NAMES = ("text", *TEXT_KEYS)

NonEmpty = Annotated[str, Field(min_length=1)]


class ModalityDataConfig(BaseModel):
    """Where a modality's files are named and what turns one file into tensors.

    Attributes:
        column: column of the row that holds one path or a list of paths.
        processor: ``"pkg.mod:fn"``, a function from a path to the dict of tensors of ONE item;
            or a local folder of a Hugging Face image processor or feature extractor.
    """

    model_config = ConfigDict(extra="forbid")

    column: NonEmpty
    processor: NonEmpty


class DataConfig(BaseModel):
    """Data of a run. Paths are read by the driver and by every data worker's node.

    Attributes:
        train: JSON or JSONL file with the training samples.
        heldout: the same for evaluation, or None.
        tokenizer: local folder of a Hugging Face tokenizer.
        modalities: by name, as in the model's ``encoders``.
        batch_size: samples per step, over all microbatches.
        microbatches: microbatches per step; divides ``batch_size``.
        max_length: text tokens kept per sample.
        shuffle: a new seeded permutation each epoch; else file order.
        seed: of the permutations.
        num_workers: Ray actors that decode and tokenize. The stream does not depend on it.
        prefetch_steps: steps loaded ahead of the one in use.
        on_error: what to do with a sample that cannot be used (corrupt image or audio, no label
            token within ``max_length``): "raise", or "skip" and report it in ``Step.skipped``.
        worker_cpus: CPUs that each data worker reserves in Ray (a fraction is fine).
        worker_timeout: seconds to wait for a step before the run ends with an error.
    """

    model_config = ConfigDict(extra="forbid")

    train: NonEmpty
    heldout: NonEmpty | None = None
    tokenizer: NonEmpty
    modalities: dict[str, ModalityDataConfig] = Field(default_factory=dict)
    batch_size: int = Field(gt=0)
    microbatches: int = Field(gt=0)
    max_length: int = Field(default=512, ge=2)
    shuffle: bool = True
    seed: int = Field(default=0, ge=0)
    num_workers: int = Field(default=1, ge=1)
    prefetch_steps: int = Field(default=2, ge=1)
    on_error: Literal["raise", "skip"] = "raise"
    worker_cpus: float = Field(default=0.1, ge=0)
    worker_timeout: float = Field(default=300.0, gt=0)

    @field_validator("modalities")
    @classmethod
    def _names_are_free(cls, modalities):
        for name in modalities:
            if name in RESERVED_NAMES:
                raise ValueError(
                    f"a modality cannot be named {name!r}; taken by the text: {RESERVED_NAMES}"
                )
        return modalities

    @model_validator(mode="after")
    def _microbatches_divide(self):
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be divisible by "
                f"microbatches ({self.microbatches})"
            )
        return self

    @property
    def columns(self) -> dict[str, str]:
        """Modality name -> column of its paths."""
        return {name: modality.column for name, modality in self.modalities.items()}
