"""URLs of data: their parts, and those that are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.data.remote.urls import DataUrl, is_url, parse

KEYS = st.lists(
    st.text(st.characters(exclude_characters="/\\", exclude_categories=["Cs", "Cc"]), min_size=1)
    .filter(lambda part: part not in (".", "..")), min_size=1, max_size=4,
).map("/".join)


@given(KEYS)
def test_a_written_url_is_parsed_to_the_same_parts(key):
    url = DataUrl("s3", "bucket", key, "region=x")
    assert parse(str(url)) == url


@pytest.mark.parametrize(("text", "key"), [
    ("s3://b/a/../c/./d", "c/d"), ("s3://b", ""), ("s3://b/", ""), ("s3://b//a//c", "a/c"),
    ("s3://b/../../a", "a"), ("s3://b/a%20b%2Fc", "a b/c"),
])
def test_keys_are_decoded_and_resolved(text, key):
    assert parse(text).key == key


@pytest.mark.parametrize(("text", "reason"), [
    ("ftp://host/a", "ftp:// is not known; accepted: a path, or a URL that begins with s3://"),
    ("s3:///a", "expected s3://BUCKET/PATH"),
    ("https:///a", "expected https://HOST/PATH"),
    ("s3://b/a#1", "a # must be written as %23"),
    ("s3://key:word@b/a", "it contains credentials"),
    ("s3://b/a?secret_key=x", "it contains credentials"),
    ("s3://b/a?colour=red", "colour= is not known; accepted: "),
    ("https://h/a?X-Signature=1", "it has a query"),
    ("http://example.com/a", "http:// is accepted for this machine only"),
    ("http://localhost.example.com/a", "http:// is accepted for this machine only"),
])  # fmt: skip
def test_other_urls_are_refused_with_the_reason(text, reason):
    with pytest.raises(ValueError) as error:
        parse(text)
    assert reason in str(error.value)


def test_a_url_is_within_a_folder_but_not_its_namesake():
    folder = parse("s3://b/data/")
    assert parse("s3://b/data/x/y").within(folder) and parse("s3://b/x").within(parse("s3://b"))
    for other in ("s3://b/database/x", "s3://c/data/x", "gs://b/data/x", "s3://b/data"):
        assert not parse(other).within(folder)


def test_only_known_schemes_are_urls():
    assert is_url("s3://b") and is_url("gs://b/k") and is_url("https://h/k")
    assert not any(map(is_url, ("data/rows.jsonl", "C:/rows", "hf://org/name", "", "s3:/b")))
