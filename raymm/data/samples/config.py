"""Section ``data:`` of the configuration of a run."""

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from raymm.data.remote.urls import is_url, parse
from raymm.data.samples.headers import Limits
from raymm.data.samples.rows import TEXT_ROLES
from raymm.data.samples.source_config import FormName, SourceConfig, as_sources, check_weights
from raymm.data.video.container import MAX_RATE
from raymm.data.video.frames import FrameSampling
from raymm.files.section import MOST_COUNT, Count, Seconds, Section, Seed, Text

# Names of the text tensors of a microbatch, next to the modalities.
TEXT_KEYS = ("input_ids", "attention_mask", "labels")
RESERVED_NAMES = (*TEXT_ROLES, *TEXT_KEYS)
# Kinds of items that the processor of a Hugging Face VLM accepts, and the names of its arguments.
KINDS = {"image": "images", "video": "videos", "audio": "audio"}
# Tower of a Hugging Face VLM that encodes items of a kind.
TOWER_OF = {"image": "vision", "video": "vision", "audio": "audio"}

# Upper bound on data workers (Ray actors), far above the size of a cluster.
MOST_WORKERS = 10_000
# Upper bound on the frames of an item.
MOST_FRAMES = 100_000
# Limit on bytes, pixels or sound samples of an item.
Size = Annotated[int, Field(ge=1, le=2**60)]


class VideoConfig(Section):
    """Selection of the frames of a video file that become an item. Frames are upright RGB.

    Attributes:
        fps: frames per second, from the beginning; None for ``max_frames`` frames of every file at
            equal distances (repeated in a short file), which stack into one tensor.
        max_frames: limit on the frames of an item; if ``fps`` gives more, this many at equal
            distances.
        max_pixels: width times height of a frame; larger frames are scaled down while decoding.
    """

    fps: float | None = Field(default=None, gt=0, le=MAX_RATE)
    max_frames: int = Field(default=32, ge=1, le=MOST_FRAMES)
    max_pixels: Size = 2**19

    @property
    def sampling(self) -> FrameSampling:
        return FrameSampling(self.fps, self.max_frames, self.max_pixels)


class ModalityDataConfig(Section):
    """Column of the items of a modality, and their conversion to tensors.

    Attributes:
        column: column of the row that holds the items: a path, bytes, {"path", "bytes"} or a list
            of them (``raymm.data.samples.row_media``). For tar shards, a file extension
            (``raymm.data.readers.tar_shards``). Without a column, items come only from parts of
            messages: {"type": "image", "image": ...}. A row has its items in the column or in
            parts, not both.
        processor: ``"pkg.mod:fn"``, a function from one item to its dict of tensors; or a local
            folder of a Hugging Face image processor, feature extractor, or both. Not accepted with
            ``data.processor``, which processes items of all kinds.
        input: argument of the function. ``"file"``: the path of the item, or a binary file
            (``io.BytesIO``) for an item without a path; Pillow, soundfile, ``read_image`` and
            ``read_audio`` accept both. ``"bytes"``: the encoded item. ``"image"``: an upright RGB
            ``PIL.Image``.
        frames: every item is a list of frames: a list in the column is one item, a list of lists is
            several items. The processor receives a list.
        video: items are video files: the frames to decode, a :class:`VideoConfig`, or True for its
            defaults. A function receives a ``raymm.data.Clip``, a folder a list of images. Without
            ``video``, the sound track of a video file is read, so two modalities may have the same
            column.
        fps: frames per second of items that are lists of frames, with ``data.processor``. Needed if
            the processor writes the times of frames into the text, or computes positions from them.
        part: type of the parts of this modality in list-form messages; by default the name of the
            modality or the column (also without a final s), and ``image`` for ``vision``.
        placeholder: token that represents this modality in the text; by default that of
            ``model.merge``.
        placeholder_tokens: encoder tokens per item; each placeholder in the text is repeated this
            many times. If None, the text must have as many placeholders as the encoder returns
            tokens.
    """

    column: Text | None = None
    processor: Text | None = None
    input: Literal["file", "bytes", "image"] = "file"
    frames: bool = False
    video: VideoConfig | None = None
    fps: float | None = Field(default=None, gt=0, le=MAX_RATE)
    part: Text | None = None
    placeholder: Text | None = None
    placeholder_tokens: Count | None = None

    @field_validator("video", mode="before")
    @classmethod
    def _defaults_alone(cls, value):
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _frames_come_from_one_place(self):
        if self.video is not None and self.frames:
            raise ValueError("video and frames are both given; accepted: one of them")
        if self.video is not None and self.input != "file":
            raise ValueError(f"input is {self.input!r}; accepted with video: 'file'")
        return self


class RebalanceConfig(Section):
    """Conditions for planning the remaining steps again with costs measured during training.

    Attributes:
        every: steps between two evaluations of the measured costs.
        gain: smallest predicted speed-up of the remaining steps for which they are planned again:
            0.02 for 2 percent.
    """

    every: Count = 50
    gain: float = Field(default=0.02, ge=0, lt=1)


class BatchingConfig(Section):
    """Assignment of samples to steps and microbatches.

    Attributes:
        method: ``"random"``: a permutation is cut into steps of ``batch_size`` samples, which are
            sorted by modality and cut into microbatches of equal size. The other methods plan an
            epoch from the sizes of all samples, which are scanned before the run starts.
            ``"balanced"``: the microbatches of a step are equal in every modality and in cost
            (``raymm.scheduler.minibatch.balanced``), with different numbers of samples.
            ``"length_grouped"``: the same number of samples, of similar length.
        budgets: modality, or ``"text"`` -> units that no microbatch exceeds. The default is
            slightly above the average of ``batch_size / microbatches`` samples.
        units: modality -> ``"pkg.mod:fn"``, a function from the (M, 3) int64 array of its items
            (width, height and frames of an image; length, Hz and channels of a sound) to (M,) whole
            units. By default, the units of an item are its tokens from the encoder. Units of
            ``"text"`` are tokens of the language model. With ``data.processor``, the array holds
            the number of input values of each item, 1 and 1.
        alike: allowed difference in size between the microbatches of a step, relative to their
            mean, in exchange for a better mix: 0 to 1 (``plan_balanced``).
        source_weight: weight of the mix of sources, relative to sizes.
        cache: folder of stored scans; by default below ``~/.cache/raymm``.
        rebalance: plan the rest of an epoch again with measured seconds instead of units if that is
            faster: steps between evaluations, a :class:`RebalanceConfig`, or True for its defaults.
    """

    method: Literal["random", "balanced", "length_grouped"] = "random"
    budgets: dict[str, Count] = Field(default_factory=dict)
    units: dict[str, Text] = Field(default_factory=dict)
    alike: float | None = Field(default=None, ge=0, le=1)
    source_weight: float | None = Field(default=None, ge=0, le=MOST_COUNT)
    cache: Text | None = None
    rebalance: RebalanceConfig | None = None

    @field_validator("rebalance", mode="before")
    @classmethod
    def _every_alone(cls, value):
        if isinstance(value, bool):
            return {} if value else None
        return {"every": value} if type(value) is int else value

    @model_validator(mode="after")
    def _options_are_of_the_method(self):
        balanced_options = [n for n in ("budgets", "alike", "source_weight") if n in self.options]
        balanced_options += ["rebalance"] if self.rebalance is not None else []
        if self.method != "balanced" and balanced_options:
            raise ValueError(f"{balanced_options[0]} needs method 'balanced', not {self.method!r}")
        if self.method == "random" and (self.units or self.cache):
            raise ValueError("units and cache are not accepted with method 'random'")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Options of the planner that are set."""
        options = {
            "budgets": self.budgets or None,
            "alike": self.alike,
            "source_weight": self.source_weight,
        }
        return {name: value for name, value in options.items() if value is not None}


class DataConfig(Section):
    """Data of a run. The driver and the nodes of all data workers must be able to read the paths.

    Attributes:
        train: training samples: a path, a :class:`SourceConfig`, or a list of both.
        heldout: the same for evaluation, or None.
        heldout_fraction: fraction of the rows of each training source to hold out for evaluation,
            instead of ``heldout``: at least one row, drawn with ``seed``. These rows are not
            trained on; a resumed run holds out the same rows.
        tokenizer: folder of a Hugging Face tokenizer, or the id of a model on the hub, ``ORG/NAME``
            or ``ORG/NAME@REVISION``; by default that of ``processor``.
        processor: folder or id, as for ``tokenizer``, of the processor of a Hugging Face VLM
            (``AutoProcessor``) with its chat template, which makes all inputs of the model.
        modalities: by name, as in the ``encoders`` of the model; with ``processor``, those of
            ``image``, ``video`` (frames) and ``audio`` that the rows have.
        batch_size: samples per step, over all microbatches.
        microbatches: microbatches per step; divides ``batch_size``.
        max_length: text tokens kept per sample.
        preferences: True for rows with a prompt, a chosen and a rejected answer; each becomes two
            rows of its microbatch. In a configuration, ``model.loss`` sets it. ``"chosen"``: only
            the chosen answer, like a row with one answer.
        row_form: form of all rows, a key of :data:`raymm.data.samples.row_forms.FORMS`:
            ``messages``, ``conversations``, ``preference``, ``prompt_completion``, ``alpaca``,
            ``query_response`` or ``text``; or the import path of a function, ``module:function``,
            that converts a row without its columns of media to a row of one of these forms. By
            default the columns of each row decide.
        ignore_columns: columns of rows, and keys of message parts, that are not used on purpose.
            Any other unused column is an error.
        shuffle: True for a new seeded permutation each epoch, False for file order.
        batching: assignment of samples to steps: a method, or a :class:`BatchingConfig`. Held-out
            data is always one pass in a fixed order.
        seed: seed of the permutations.
        num_workers: Ray actors that decode and tokenize. The stream does not depend on their
            number.
        prefetch_steps: steps loaded ahead of the current one.
        on_error: action for an unusable sample (malformed row, corrupt image or audio, an item
            above a limit, no label token within ``max_length``, placeholders that do not match the
            items): "raise", or "skip" and report it in ``Step.skipped``.
        media_folders: folders in which rows may name files, in addition to the folder of their
            source; ``[/]`` for anywhere on this machine. URLs (``https://HOST/FOLDER``,
            ``s3://BUCKET``) allow rows to name files below them by URL.
        max_image_pixels, max_audio_samples, max_item_bytes, max_row_group_bytes, max_video_seconds,
            max_video_frames, max_text_characters: limits of an item, and of the text of a row,
            checked before decoding or tokenizing: see :class:`raymm.data.samples.headers.Limits`.
        worker_cpus: CPUs that each data worker reserves in Ray; may be a fraction.
        worker_timeout: seconds to wait for a step before the run ends with an error.
        trust_remote_code: run Python files from the folders of tokenizer and processors
            (``auto_map``); in a configuration, ``model.trust_remote_code`` sets it for all.
        vocabulary: number of token ids with embeddings; by default that of the model.
        chat_template_kwargs: variables for the chat template of every row, such as
            ``{enable_thinking: false}``; those in a row's column of that name take precedence.
        ignore_message_keys: keys of messages that the chat template need not write. Any other key
            that the template does not write is an error.
        towers: tower of a Hugging Face VLM -> argument -> name of that tensor in the output of the
            processor; by default those of the model.
    """

    train: list[SourceConfig] = Field(min_length=1)
    heldout: list[SourceConfig] | None = Field(default=None, min_length=1)
    heldout_fraction: float | None = Field(default=None, gt=0, lt=1)
    tokenizer: Text = ""
    processor: Text | None = None
    modalities: dict[str, ModalityDataConfig] = Field(default_factory=dict)
    batch_size: Count
    microbatches: Count
    max_length: int = Field(default=512, ge=2, le=MOST_COUNT)
    preferences: bool | Literal["chosen"] = False
    row_form: FormName | None = None
    ignore_columns: list[Text] = Field(default_factory=list)
    shuffle: bool = True
    batching: BatchingConfig = Field(default_factory=BatchingConfig)
    seed: Seed = 0
    num_workers: int = Field(default=1, ge=1, le=MOST_WORKERS)
    prefetch_steps: Count = 2
    on_error: Literal["raise", "skip"] = "raise"
    media_folders: list[Text] = Field(default_factory=list)
    max_image_pixels: Size = Limits.max_image_pixels
    max_audio_samples: Size = Limits.max_audio_samples
    max_item_bytes: Size = Limits.max_item_bytes
    max_row_group_bytes: Size = Limits.max_row_group_bytes
    max_video_seconds: Size = Limits.max_video_seconds
    max_video_frames: Size = Limits.max_video_frames
    max_text_characters: Size = Limits.max_text_characters
    worker_cpus: float = Field(default=0.1, ge=0, le=MOST_COUNT)
    worker_timeout: Seconds = 300.0
    trust_remote_code: bool = False
    vocabulary: Count | None = None
    chat_template_kwargs: dict[Text, Any] = Field(default_factory=dict)
    ignore_message_keys: list[Text] = Field(default_factory=list)
    towers: dict[Text, dict[Text, Text]] = Field(default_factory=dict)

    @field_validator("train", "heldout", mode="before")
    @classmethod
    def _list_of_sources(cls, value):
        return value if value is None else as_sources(value)

    @field_validator("batching", mode="before")
    @classmethod
    def _method_alone(cls, value):
        return {"method": value} if isinstance(value, str) else value

    @field_validator("media_folders")
    @classmethod
    def _folders_or_urls(cls, folders):
        return [str(parse(folder)) if is_url(folder) else folder for folder in folders]

    @field_validator("modalities")
    @classmethod
    def _names_are_free(cls, modalities):
        for name in modalities:
            if name in RESERVED_NAMES:
                raise ValueError(
                    f"a modality cannot be named {name!r}; reserved names: {RESERVED_NAMES}"
                )
        return modalities

    @model_validator(mode="after")
    def _rows_are_held_out_once(self):
        if self.heldout_fraction is None:
            return self
        train_sources = [
            source.model_copy(update={"weight": None, "repeat": 1.0}) for source in self.train
        ]
        if self.heldout not in (None, train_sources):
            raise ValueError("heldout and heldout_fraction are both given; accepted: one of them")
        self.heldout = train_sources
        return self

    @model_validator(mode="after")
    def _processors_fit(self):
        if self.processor is None:
            if not self.tokenizer:
                raise ValueError("tokenizer is not given; accepted: a local folder, or a processor")
            for name, modality in self.modalities.items():
                if modality.processor is None:
                    raise ValueError(f"modalities.{name}.processor is not given")
                if modality.fps is not None:
                    raise ValueError(f"modalities.{name}.fps needs data.processor")
            return self
        self.tokenizer = self.tokenizer or self.processor
        for name, modality in self.modalities.items():
            if name not in KINDS:
                raise ValueError(
                    f"modalities has {name!r}; accepted with a processor: {', '.join(KINDS)}"
                )
            for field in ("video", "fps"):
                if getattr(modality, field) is not None and name != "video":
                    raise ValueError(
                        f"modalities.{name}.{field} is given; with a processor, only modality "
                        "'video' accepts this field"
                    )
            if modality.processor is not None or modality.placeholder_tokens is not None:
                raise ValueError(
                    f"modalities.{name} has a processor or placeholder_tokens; "
                    "accepted with data.processor: neither"
                )
        return self

    @model_validator(mode="after")
    def _microbatches_divide(self):
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be divisible by "
                f"microbatches ({self.microbatches})"
            )
        return self

    @model_validator(mode="after")
    def _batching_fits(self):
        batching = self.batching
        if self.preferences and batching.method != "random":
            raise ValueError(
                "preferences (rows with two answers) are not supported with batching "
                f"{batching.method!r}; accepted: batching 'random'"
            )
        if batching.method != "random" and not self.shuffle:
            raise ValueError(
                f"shuffle must be true with batching {batching.method!r}, which does not keep the "
                "order of files"
            )
        for field, accepted in (
            ("budgets", [*self.modalities, "text"]), ("units", list(self.modalities))
        ):
            if unknown := sorted(set(getattr(batching, field)) - set(accepted)):
                raise ValueError(
                    f"batching.{field}: unknown modality {unknown[0]!r}; accepted: "
                    f"{', '.join(accepted)}"
                )
        planned_as: list[str | None] = list(self.planned_as.values())
        if shared := [n for n in batching.budgets if planned_as.count(self.planned_as.get(n)) > 1]:
            raise ValueError(
                f"batching.budgets.{shared[0]} is given, but with rebalance all items of a tower "
                "are planned together; remove this budget or rebalance"
            )
        return self

    @property
    def planned_as(self) -> dict[str, str]:
        """Name under which each modality is planned: the tower of a Hugging Face VLM if costs are
        measured, which they are by tower; else the modality itself."""
        by_tower = self.processor is not None and self.batching.rebalance is not None
        return {name: TOWER_OF[name] if by_tower else name for name in self.modalities}

    @model_validator(mode="after")
    def _sources_fit(self):
        accepted = [*TEXT_ROLES, *self.modalities]
        for split in ("train", "heldout"):
            for number, source in enumerate(getattr(self, split) or ()):
                if unknown := sorted(set(source.columns) - set(accepted)):
                    raise ValueError(
                        f"{split}.{number}.columns: unknown key {unknown[0]!r}; accepted: "
                        f"{', '.join(accepted)}"
                    )
            names = Counter(source.name for source in getattr(self, split) or () if source.name)
            if twice := [name for name, count in names.items() if count > 1]:
                raise ValueError(f"{split}: two sources have the name {twice[0]!r}")
        return self

    @model_validator(mode="after")
    def _weights_fit(self):
        check_weights(self.train, self.heldout or (), self.batching.method)
        return self

    def sources(self, split: str) -> list[SourceConfig]:
        """Return the sources of ``"train"`` or ``"heldout"``; an empty list if not set."""
        value = getattr(self, split)
        if value is None:
            return []
        return [SourceConfig.model_validate(source) for source in as_sources(value)]

    @property
    def limits(self) -> Limits:
        return Limits(
            self.max_image_pixels,
            self.max_audio_samples,
            self.max_item_bytes,
            self.max_row_group_bytes,
            self.max_video_seconds,
            self.max_video_frames,
            self.max_text_characters,
        )

    def sampling(self, modality: str) -> FrameSampling | None:
        """Return the frame selection for video files of a modality; None if their sound is read."""
        video = self.modalities[modality].video
        if video is None and self.processor is not None and modality == "video":
            video = VideoConfig()
        return None if video is None else video.sampling

    @property
    def columns(self) -> dict[str, str]:
        """Modality -> column of its items, for modalities that have a column."""
        return {
            name: modality.column
            for name, modality in self.modalities.items() if modality.column is not None
        }
