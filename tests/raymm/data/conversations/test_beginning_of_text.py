"""Each row begins exactly once with the tokenizer's beginning of text.

This holds for any microbatch, and for tokens from the chat template, the tokenizer or the
processor.
"""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from raymm.data import DataConfig, local_steps

BOS, HEADER, END = "<bos>", "<start>", "<end>"
TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text if p.type == 'text' else '<|image|>' }}"
    "{% endfor %}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_, bos_token=BOS, eos_token=END, pad_token="<pad>",
        additional_special_tokens=[HEADER, "<|image|>", "<fake>", "<image>"],
    )
    number = fast.convert_tokens_to_ids(BOS)
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, number)]
    )
    return fast


def processor(kind, template):
    if kind == "mllama":  # it adds the beginning of text itself
        return transformers.MllamaProcessor(
            transformers.MllamaImageProcessor(size={"height": 28, "width": 28}), tokenizer(),
            chat_template=template,
        )
    return transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 28}), tokenizer(), patch_size=14,
        vision_feature_select_strategy="full", image_token="<image>", chat_template=template,
    )


@pytest.mark.parametrize("kind", ["llava", "mllama"])
@pytest.mark.parametrize("prefix", ["", "{{ bos_token }}"])
@pytest.mark.parametrize("text_first", [True, False])
def test_each_row_has_one_beginning_of_text(tmp_path, kind, prefix, text_first):
    folder = tmp_path / "model"
    made = processor(kind, prefix + TEMPLATE)
    made.save_pretrained(folder)
    chat = {"messages": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."},
    ]}  # fmt: skip
    rows = [{"text": "A cat."}, chat] if text_first else [chat, {"text": "A cat."}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        train=str(file), processor=str(folder), batch_size=2, microbatches=1, shuffle=False
    )
    (microbatch,) = next(iter(local_steps(config, steps=1))).microbatches
    bos = made.tokenizer.bos_token_id
    for ids, labels, mask in zip(
        microbatch["input_ids"], microbatch["labels"], microbatch["attention_mask"], strict=True
    ):
        own = ids[mask.bool()]
        assert own[0] == bos and int((own == bos).sum()) == 1
        learned = made.tokenizer.decode(labels[labels != -100])
        assert learned in ("A cat.", "Hello.<end>")
        assert torch.equal(labels[labels != -100], ids[labels != -100])
