"""Shapes of published chat templates, each with a small tokenizer with its special tokens.

Templates that TRL ships come from the installed package (``trl/chat_templates``). The others are in
``benchmarks/shared/templates/``: they are written for this repository and render the same text as
the published template of the model.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_OWN = Path(__file__).parent / "templates"
_WORDS = (
    "user assistant system tool model ipython Say something. What is in the picture? A red circle.",
    "How is the weather in Paris? It is sunny, 21 degrees. Hello. And in Rome? Let me think.",
    '{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}',
)
_VOCABULARY = 400


@dataclass(frozen=True)
class Shape:
    """Chat template with the special tokens of its model.

    Attributes:
        source: file in ``benchmarks/shared/templates/``, or ``trl:NAME`` for one that TRL ships.
        special: special tokens other than ``bos``, ``eos`` and ``pad``.
        added: tokens of the vocabulary that are not special (decoding keeps them).
        bos: token that the tokenizer adds at the start of a text; None for none.
        eos: end of a turn or a text.
        takes: ``"texts"``, ``"parts"`` or ``"either"``: contents that the template renders.
        tools: True if the template renders ``tools`` and ``tool_calls``.
        thinks: True if the template removes the thoughts of earlier turns.
        alternates: True if two user turns in a row, or a first turn of the assistant, are an error.
        system: True if the template renders a system message, even with media.
    """

    source: str
    special: tuple[str, ...]
    eos: str
    added: tuple[str, ...] = ()
    bos: str | None = None
    takes: str = "either"
    tools: bool = False
    thinks: bool = False
    alternates: bool = False
    system: bool = True

    @property
    def template(self) -> str:
        """Return the Jinja text of the template."""
        return template_text(self.source)

    @property
    def training(self) -> str | None:
        """Return TRL's variant of the template with generation blocks; None if TRL has none."""
        file = _file(f"{self.source}_training") if self.source.startswith("trl:") else None
        return None if file is None or not file.is_file() else file.read_text(encoding="utf-8")


_CHATML = ("<|endoftext|>", "<|im_start|>")
_QWEN_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")
_LLAMA = (
    "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>",
)
_MISTRAL = ("[INST]", "[/INST]")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_ADDED = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<tool_response>", "</tool_response>", *_THINK,
)
_GLM_MEDIA = tuple(
    f"<|{name}|>" for kind in ("image", "video")
    for name in (f"begin_of_{kind}", kind, f"end_of_{kind}")
)

SHAPES: dict[str, Shape] = {
    "chatml": Shape("chatml", _CHATML, "<|im_end|>", takes="texts"),
    "llama3_1": Shape(
        "trl:llama3_1", _LLAMA, "<|eot_id|>", bos="<|begin_of_text|>", takes="texts", tools=True
    ),
    "llama3_2_vision": Shape(
        "llama3_2_vision", (*_LLAMA, "<|image|>"), "<|eot_id|>", bos="<|begin_of_text|>",
        tools=True, system=False,
    ),
    "gemma3": Shape(
        "trl:gemma3", ("<start_of_turn>",), "<end_of_turn>", bos="<bos>", alternates=True
    ),
    "mistral_v3": Shape(
        "mistral_v3",
        (*_MISTRAL, "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"),
        "</s>", bos="<s>", takes="texts", tools=True, alternates=True,
    ),
    "mistral_small": Shape(
        "mistral_small",
        (*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "</s>", bos="<s>",
    ),
    "qwen2_5": Shape(
        "trl:qwen2_5", _CHATML, "<|im_end|>", added=_QWEN_ADDED, takes="texts", tools=True
    ),
    "qwen2_5_vl": Shape("trl:qwen2_5_vl", (*_CHATML, *_QWEN_VISION), "<|im_end|>"),
    "qwen3": Shape(
        "trl:qwen3", _CHATML, "<|im_end|>", added=(*_QWEN_ADDED, *_THINK), takes="texts",
        tools=True, thinks=True,
    ),
    "qwen3_vl": Shape(
        "trl:qwen3_vl", (*_CHATML, *_QWEN_VISION), "<|im_end|>", added=_QWEN_ADDED, tools=True
    ),
    "qwen3_5_think": Shape(
        "trl:qwen3_5_think", (*_CHATML, *_QWEN_VISION), "<|im_end|>",
        added=(*_QWEN_ADDED, *_THINK), tools=True, thinks=True,
    ),
    "glm4moe": Shape(
        "trl:glm4moe", _GLM, "<|endoftext|>", added=_GLM_ADDED, tools=True, thinks=True
    ),
    "glm4_5v": Shape(
        "glm4_5v", (*_GLM, *_GLM_MEDIA), "<|endoftext|>", added=_GLM_ADDED, tools=True, thinks=True
    ),
    "internvl": Shape("internvl", _CHATML, "<|im_end|>"),
    "llava_onevision": Shape(
        "llava_onevision", (*_CHATML, "<image>", "<video>"), "<|im_end|>", takes="parts"
    ),
    "llava_next": Shape("trl:llava_next", ("<image>",), "</s>", bos="<s>", takes="parts"),
    "idefics3": Shape(
        "trl:idefics3", ("<image>", "<fake_token_around_image>", "<global-img>"),
        "<end_of_utterance>", bos="<|begin_of_text|>", takes="parts",
    ),
    "smolvlm": Shape(
        "trl:smolvlm", ("<image>", "<video>", "<fake_token_around_image>", "<global-img>"),
        "<end_of_utterance>", bos="<|im_start|>", takes="parts",
    ),
    "qwen2_audio": Shape(
        "qwen2_audio", (*_CHATML, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"), "<|im_end|>"
    ),
}  # fmt: skip


def template_text(source: str) -> str:
    """Return the text of a template.

    Args:
        source: same as :attr:`Shape.source`.
    """
    return _file(source).read_text(encoding="utf-8")


def make_tokenizer(
    shape: Shape, more: Sequence[str] = (), named: Mapping[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer with the special tokens and the template of a shape.

    Args:
        shape: one of :data:`SHAPES`.
        more: additional special tokens, for a processor.
        named: attribute of the tokenizer -> special token.
    """
    named = dict(named or {})
    pad = "<|pad|>"
    special = dict.fromkeys(
        [pad, *filter(None, [shape.bos]), shape.eos, *shape.special, *more, *named.values()]
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(_WORDS, trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=list(special), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in shape.added]
    )
    if shape.bos is not None:  # Llama, Gemma and Mistral add it before any text
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{shape.bos} $A", pair=f"{shape.bos} $A {shape.bos} $B",
            special_tokens=[(shape.bos, tokenizer.token_to_id(shape.bos))],
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=pad, eos_token=shape.eos, bos_token=shape.bos,
            extra_special_tokens=named, chat_template=shape.template,
        )


def _file(source: str) -> Path:
    if not source.startswith("trl:"):
        return _OWN / f"{source}.jinja"
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        raise ImportError(f"template {source!r} needs TRL: pip install trl")
    return Path(spec.origin).parent / "chat_templates" / f"{source.removeprefix('trl:')}.jinja"
