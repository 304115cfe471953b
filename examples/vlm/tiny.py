"""A tiny model of a kind, with its processor and a few samples:

    python -m examples.vlm.tiny qwen2_5_vl --out tiny
    raymm train --model tiny/model --data tiny/train.jsonl

The model has random weights and the shape of published ones: class, processor, chat template and
files are theirs, its layers few and narrow.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the imports below take seconds
    print("loading torch and transformers", flush=True)

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import raymm  # noqa: F401 (filters a warning of torch that no user can act on)
from examples.vlm.drawn import draw, words, write_texts
from examples.vlm.kinds import ID, KINDS, TEXT_KINDS, Kind

_CHATML = ("<|pad|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ 'ITEM' }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make(kind: str, out: Path, samples: int = 48, seed: int = 0) -> tuple[Path, Path]:
    """Write a folder ``model`` and a file ``train.jsonl``.

    Args:
        kind: one of :data:`examples.vlm.kinds.KINDS` or :data:`examples.vlm.kinds.TEXT_KINDS`.
        out: a folder.
        samples: that the file has.
        seed: of weights and samples.

    Returns:
        Folder of the model and file of the samples.
    """
    spec, folder = (KINDS | TEXT_KINDS)[kind], out / "model"
    tokenizer = make_tokenizer(spec)
    config = _with_ids(_with_text(spec.config, tokenizer), tokenizer)
    template = TEMPLATE.replace("ITEM", repr(spec.item)[1:-1])
    if spec.text:
        data, config = write_texts(out, samples, seed), config["text_config"]
        processor, tokenizer.chat_template = tokenizer, template
    else:
        data = draw(out, spec.sound, samples, seed)
        processor = getattr(transformers, spec.processor)(
            **{name: part() for name, part in spec.parts.items()}, tokenizer=tokenizer,
            chat_template=template, **spec.options,
        )
    model_class = getattr(transformers, spec.model)
    torch.manual_seed(seed)
    model_class(model_class.config_class(**config)).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder, data


def make_tokenizer(kind: Kind) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer of what samples say, with the kind's special tokens."""
    special = [*_CHATML, *kind.tokens, *kind.named.values()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(words(), trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_CHATML[0], eos_token=_CHATML[2],
        extra_special_tokens=dict(kind.named),
    )


def _with_text(config: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    text = {
        "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
    }
    return {**config, "text_config": {**config["text_config"], **text}}


def _with_ids(value: Any, tokenizer: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_ids(each, tokenizer) for name, each in value.items()}
    if isinstance(value, str) and value.startswith(ID):
        return tokenizer.convert_tokens_to_ids(value.removeprefix(ID))
    return value


def main() -> None:
    """Write a tiny model and rows, and print the command that trains it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kind", choices=sorted(KINDS | TEXT_KINDS))
    parser.add_argument("--out", default="tiny", help="a folder (default: tiny)")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    print(f"making a tiny {arguments.kind}", flush=True)
    folder, data = make(
        arguments.kind, Path(arguments.out), arguments.samples, arguments.seed
    )
    print(f"model {folder}\ndata  {data}\n\nraymm train --model {folder} --data {data}")


if __name__ == "__main__":
    main()
