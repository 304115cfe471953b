"""Locations of runs."""

import pytest

from raymm.actors.storage.location import check_location, storage_folder


@pytest.mark.parametrize(("location", "as_is"), [
    ("runs/a", "runs/a"), ("~/a", "~/a"), ("file:///a/b%20c", "/a/b c"),
    ("file://localhost/a", "/a"), ("s3://b/c", "s3://b/c"), ("S3://b/c", "s3://b/c"),
    ("gs://b/c?scheme=http", "gs://b/c?scheme=http"),
])  # fmt: skip
def test_locations(location, as_is):
    assert check_location(location) == as_is


@pytest.mark.parametrize(("location", "reason"), [
    ("nofs://a/b", "nofs:// is not known; accepted: a folder, or a URL .* s3:// or gs://"),
    ("tests.support.custom_file_systems:vault://a/b?x=y", r"\?x= is not known; accepted: none"),
    ("tests.support.custom_file_systems:failing://a/b",
     "failing raised KeyError: 'token'; accepted: module:f"),
    ("tests.support.custom_file_systems:number://a/b",
     "number returned int; accepted: module:function"),
    ("tests.support.custom_file_systems:absent://a/b",
     "run.storage_path is 'tests.support.custom_file_systems:absent'"),
    ("memory://a/b", "memory:// is not known"),
    ("s4://a/b", "s4:// is not known"), ("https://a/b", "https:// is not known"),
    ("s3:/a/b", "two slashes"), ("file:a", "two slashes"), ("s3://a", "expected s3://BUCKET/FOL"),
    ("s3:///a", "expected s3://BUCKET/FOLDER"), ("file://host/a", "must not name another host"),
    ("s3://a/b?x=y", r"\?x= is not known; accepted: endpoint_override, scheme, region"),
    ("s3://a/b#c", "%23"), ("s3://key:secret@a/b", "it has credentials"),
    ("s3://a/b?secret_key=c", "it has credentials"),
])  # fmt: skip
def test_invalid_locations_are_refused(location, reason):
    with pytest.raises(ValueError, match=reason):
        check_location(location)
    with pytest.raises(ValueError, match=reason):
        storage_folder(location)
