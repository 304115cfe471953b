import pytest

from raymm.data import Sample
from raymm.data.conversations.text import TextEncoder
from raymm.errors import DataError, SampleError
from tests.support.sample_files import build_tokenizer

X = -100


def sample(messages=None, text=None):
    if messages is not None:
        messages = [{"role": role, "content": content} for role, content in messages]
    return Sample(0, "the-id", messages, text, {})


def encode_text(tokenizer, sample, max_length):
    """Encode a sample without modalities or placeholders."""
    return TextEncoder(tokenizer, max_length).encode(sample)


def ids(tokenizer, text):
    return tokenizer.convert_tokens_to_ids(text.split(" "))


def test_assistant_turns_have_labels_to_their_ends():
    tokenizer = build_tokenizer()
    turns = [("user", "what is"), ("assistant", "a cat"), ("user", "is it"), ("assistant", "yes")]
    input_ids, labels = encode_text(tokenizer, sample(turns), 100)
    spelled = (
        "<|im_start|> user what is <|im_end|> \n <|im_start|> assistant a cat <|im_end|> \n "
        "<|im_start|> user is it <|im_end|> \n <|im_start|> assistant yes <|im_end|> \n"
    )
    assert input_ids == ids(tokenizer, spelled)
    answer, last = ids(tokenizer, "a cat <|im_end|> \n"), ids(tokenizer, "yes <|im_end|> \n")
    assert labels == [X] * 8 + answer + [X] * 8 + last


def test_a_template_without_end_of_turn_learns_the_whole_turn():
    template = (
        "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' \n ' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tokenizer = build_tokenizer(template)
    _, labels = encode_text(tokenizer, sample([("user", "it"), ("assistant", "a cat")]), 100)
    assert labels == [X] * 4 + ids(tokenizer, "a cat \n")


def test_plain_text_learns_everything_but_the_first_token():
    tokenizer = build_tokenizer()
    input_ids, labels = encode_text(tokenizer, sample(text="a cat says yes"), 3)
    assert input_ids == ids(tokenizer, "a cat says")
    assert labels == [X] + input_ids[1:]


@pytest.mark.parametrize(
    "bad",
    [sample(text="a"), sample(text=""), sample([("user", "what")])],
)
def test_no_label_at_all(bad):
    with pytest.raises(SampleError, match="'the-id'.*no label token"):
        encode_text(build_tokenizer(), bad, 100)


def test_a_row_without_labels_reports_the_masks():
    masked = sample([("user", "what is"), ("assistant", "a cat")])
    masked.messages[1]["loss"] = False
    with pytest.raises(SampleError, match="no label token.*'loss': false"):
        encode_text(build_tokenizer(), masked, 100)


def test_truncation_never_removes_every_label_silently():
    turns = [("user", "what is this what is this"), ("assistant", "a cat")]
    assert encode_text(build_tokenizer(), sample(turns), 13)[1][-1] != X
    with pytest.raises(SampleError, match="'the-id'.*first 12 of 16 tokens.*max_length is 12"):
        encode_text(build_tokenizer(), sample(turns), 12)


def test_a_template_that_drops_the_question_is_refused():
    template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] if loop.last else 'of' }} "
        "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    )
    turns = [("user", "what"), ("assistant", "a cat")]
    with pytest.raises(SampleError, match=r"'the-id'.*messages\[0\] \(user\) .* does not write"):
        encode_text(build_tokenizer(template), sample(turns), 100)


def test_template_errors_name_the_sample():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(SampleError, match="'the-id'.*roles must alternate"):
        encode_text(build_tokenizer(template), sample([("user", "what")]), 100)


def test_messages_need_a_chat_template():
    with pytest.raises(DataError, match="no chat template") as caught:
        encode_text(build_tokenizer(None), sample([("user", "what")]), 100)
    assert not isinstance(caught.value, SampleError)  # skipping samples would not help
