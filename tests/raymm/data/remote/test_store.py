"""Sources by URL give the samples of the same local files."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

import raymm.actors.storage.bucket as buckets
from raymm.actors.storage.location import storage_folder
from raymm.data import DataConfig, local_steps, open_source, open_split
from raymm.data.readers import ReaderOptions
from raymm.data.readers.files import is_there
from raymm.data.remote import store as remote_store
from raymm.data.remote.store import FileVersion, changed
from raymm.data.remote.urls import DataUrl
from raymm.errors import DataError, SampleError
from raymm.storage.run_description import fingerprint_of_files
from tests.support.range_server import RangeServer, write_certificates
from tests.support.same_rows import write_parquet, write_shards
from tests.support.sample_files import write_image, write_rows


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Make retries immediate; files are checked every time."""
    monkeypatch.setattr(buckets, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(remote_store, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(remote_store, "READ_RETRY_FOR_S", 0.5)


def upload(s3, folder: Path, name: str) -> str:
    """Upload a folder's files into a folder of the bucket, and return its URL."""
    target = storage_folder(s3.url(name))
    for file in folder.rglob("*"):
        if file.is_file():
            target.replace(str(file.relative_to(folder)), file.read_bytes())
    return s3.url(name)


def beside(url: str, name: str) -> str:
    """Return the URL of a file in a folder."""
    place, question, query = url.partition("?")
    return f"{place}/{name}{question}{query}"


def written(format: str, folder: Path) -> tuple[Path, str]:
    """Write a folder of files; return it with the name of the source."""
    if format == "json":
        write_rows(folder, 20)
        return folder, "train.jsonl"
    path = write_parquet(folder, 20) if format == "parquet" else write_shards(folder, 20)
    return path, ""


def source(format: str, path: str) -> dict:
    columns = {"vision": "*.png", "audio": "wav"} if format == "tar" else {}
    return {"path": path, "columns": columns}


@pytest.mark.cells(3)
@pytest.mark.parametrize("format", ["json", "parquet", "tar"])
@pytest.mark.parametrize("where", ["s3", "web"])
def test_every_format_gives_the_same_steps_by_url(make_config, tmp_path, s3, web, format, where):
    config = make_config(max_length=60)
    folder, name = written(format, tmp_path)
    if where == "s3":
        url = upload(s3, folder, f"same/{format}")
        paths = [beside(url, name) if name else url]
    else:
        shutil.copytree(folder, web.folder, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("served"))
        suffix = {"json": "train.jsonl", "parquet": "*.parquet", "tar": "*.tar"}[format]
        paths = [f"{web.root}/{file.name}" for file in sorted(web.folder.glob(suffix))]
    remote = make_config(train=[source(format, path) for path in paths], max_length=60)
    dataset, reference = open_split(remote, "train"), open_split(config, "train")
    assert [dataset[i].id for i in range(20)] == [reference[i].id for i in range(20)]
    again = pickle.loads(pickle.dumps(dataset))
    assert again[3] == dataset[3]
    for got, want in zip(local_steps(remote, steps=4), local_steps(config, steps=4), strict=True):
        assert got.meta == want.meta
        torch.testing.assert_close(got.microbatches, want.microbatches, rtol=0, atol=0)


def test_patterns_and_folders_of_a_bucket(s3, tmp_path):
    for name in ("a/1.jsonl", "a/b/2.tar", "a/b/3.txt"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text('{"text": "a"}\n')
    shards = write_shards(tmp_path, 10)
    for target in ("tree/a/b", "tree/a/c/d"):
        shutil.copytree(shards, tmp_path / target, dirs_exist_ok=True)
    (tmp_path / "tree/a/b/2.tar").unlink()
    url = upload(s3, tmp_path / "tree", "tree")
    for pattern, samples in (
        ("a", 20), ("a/b", 10), ("a/*/*.tar", 10), ("a/**/*.tar", 20), ("a/c/**/00[01].tar", 10),
        ("a/c/d/00[!1].tar", 5), ("**/d/*.tar", 10),
    ):
        assert len(open_source(beside(url, pattern), "tar")) == samples, pattern
    assert len(open_source(beside(url, "a/c"))) == 10  # detected by content
    assert is_there(beside(url, "a/c")) and is_there(beside(url, "a/1.jsonl"))
    assert not is_there(beside(url, "a/1.json"))
    with pytest.raises(DataError, match=r"pattern .*\*.parquet.* has no .parquet file"):
        open_source(beside(url, "a/*.parquet"))
    with pytest.raises(DataError, match="does not exist"):
        open_source(beside(url, "none"))


def test_media_of_rows_lie_below_the_sources_url(s3, tmp_path):
    write_rows(tmp_path, 5)
    names = [
        "i1.png", "../secret.png", "/etc/passwd", "http://127.0.0.1/a.png", "s3://runs/secret.png",
        "s3://runs/media/i1.png", "s3://runs/media/../secret.png", "s3://runs/media-of-others/a",
        "s3://runs/media/i1.png?endpoint_override=127.0.0.1:1", "%2e%2e/secret.png",
    ]
    lines = [json.dumps({"text": "a", "images": name}) for name in names]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    url = upload(s3, tmp_path, "media")
    options = ReaderOptions(columns={"vision": "images"}, skip=True)
    dataset = open_source(beside(url, "train.jsonl"), None, options)
    assert dataset.counts["vision"].tolist() == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert dataset[0].media["vision"] == (beside(url, "i1.png"),)
    assert dataset[5].media["vision"] == (beside(url, "i1.png"),)
    assert dataset[9].media["vision"] == (beside(url, "%252e%252e/secret.png"),)
    for number in (1, 4, 6, 8):
        with pytest.raises(SampleError, match="names .*outside of the source's folder .*media_fol"):
            dataset[number]
    with pytest.raises(DataError, match=r"train.jsonl\S*:2: column 'images' names .*secret.png"):
        open_source(
            beside(url, "train.jsonl"), None, ReaderOptions(columns={"vision": "images"})
        )


def test_rows_name_urls_that_are_allowed_by_name(make_config, tmp_path, web):
    write_image(web.folder / "a.png", 1)
    (web.folder / "sub").mkdir()
    write_image(web.folder / "sub" / "b c.png", 1)
    make_config()
    rows = [
        {"text": "a cat", "images": f"{web.root}/{name}"} for name in ("a.png", "sub/b c.png")
    ]
    (tmp_path / "urls.jsonl").write_text("\n".join(map(json.dumps, rows)))
    of_text = {"path": str(tmp_path / "urls.jsonl"), "columns": {"audio": None}}
    config = make_config(train=of_text)
    with pytest.raises(DataError, match=r"names http://.*media_folders: \[http://127"):
        open_split(config, "train")
    with pytest.raises(DataError, match="names http://.*a.png"):
        open_split(make_config(train=of_text, media_folders=[f"{web.root}/sub"]), "train")
    config = make_config(train=of_text, media_folders=[web.root], batch_size=2, microbatches=1)
    (step,) = local_steps(config, steps=1)
    assert step.meta[0].items["vision"] == [0, 1]
    web.before = lambda path: f"{web.root}/a.png" if path.startswith("sub") else None
    (again,) = local_steps(config, steps=1)
    torch.testing.assert_close(again.microbatches, step.microbatches, rtol=0, atol=0)


@pytest.mark.parametrize(("path", "reason"), [
    ("ftp://a/b.jsonl", "ftp:// is not known; accepted: a path, or a URL that begins with s3://"),
    ("http://example.com/a.jsonl", "http:// is accepted for this machine only"),
    ("https://user:pass@host/a.jsonl", "it contains credentials"),
    ("https://host/a.jsonl?X-Amz-Signature=1", "it has a query"),
    ("s3://bucket/a.jsonl?secret_key=1", "it contains credentials"),
    ("s3://bucket/a.jsonl?x=1", r"\?x= is not known; accepted: endpoint_override"),
    ("s3:///a.jsonl", "expected s3://BUCKET/PATH"), ("s3://b/a#1.jsonl", "%23"),
])  # fmt: skip
def test_urls_that_are_refused(path, reason):
    with pytest.raises(ValidationError, match=f"(?s)train.0.path.*{reason}"):
        DataConfig(train=path, tokenizer="t", batch_size=1, microbatches=1)


def test_servers_that_refuse_are_named_before_anything_starts(s3, web):
    url = beside(s3.url("errors"), "a.jsonl")
    with pytest.raises(DataError, match="nobodys.*there is no bucket 'nobodys'"):
        open_source(url.replace("s3://runs", "s3://nobodys"), "parquet")
    s3.before = lambda method, key: 403
    with pytest.raises(DataError, match="a.jsonl.*access is denied.*AWS_ACCESS_KEY_ID.*anonymous"):
        open_source(url)
    with pytest.raises(DataError, match="patterns are not supported on web servers"):
        open_source(f"{web.root}/*.tar")
    (web.folder / "a.jsonl").write_text('{"text": "a"}')
    for status, reason in ((403, "access is denied .status 403.*netrc"), (404, "does not exist")):
        web.before = lambda path, status=status: status
        with pytest.raises(DataError, match=reason):
            open_source(f"{web.root}/a.jsonl")
    web.before = lambda path: "http://other/a.jsonl"
    with pytest.raises(DataError, match="redirects to 'http://other/a.jsonl'; accepted: https"):
        open_source(f"{web.root}/a.jsonl")
    web.before, web.whole = lambda path: None, True
    with pytest.raises(DataError, match="range request with status 200 OK; accepted: .* 206"):
        open_source(f"{web.root}/a.jsonl")


@pytest.fixture
def no_bundles(monkeypatch):
    """Remove all authorities except those that a test names."""
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_bundles")
def test_https_with_a_custom_authority(make_config, tmp_path, monkeypatch):
    """Trust the certificate, and get the samples of the folder; else an error."""
    write_rows(tmp_path, 6)
    authority, certificate = write_certificates(tmp_path)
    server = RangeServer(tmp_path, certificate)
    try:
        url = f"{server.root}/train.jsonl"
        with pytest.raises(DataError, match="certificate is not trusted: .*SSL_CERT_FILE"):
            open_source(url)
        assert not server.ranges  # without any request
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        for got, want in zip(
            local_steps(make_config(train=[{"path": url}]), steps=1),
            local_steps(make_config(), steps=1), strict=True,
        ):
            assert got.meta == want.meta
            torch.testing.assert_close(got.microbatches, want.microbatches, rtol=0, atol=0)
        assert any(path.endswith(".png") for path, *_ in server.ranges)
    finally:
        server.end()


@pytest.mark.usefixtures("no_bundles")
def test_a_certificate_of_another_server_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    authority, certificate = write_certificates(tmp_path, "127.0.0.9")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    server = RangeServer(tmp_path, certificate)
    try:
        with pytest.raises(DataError, match="not trusted: IP address mismatch"):
            open_source(f"{server.root}/a.jsonl")
    finally:
        server.end()


@pytest.mark.usefixtures("no_bundles")
@pytest.mark.parametrize("netrc", ["machine 127.0.0.1", "default"])
def test_a_redirect_gets_no_credentials(tmp_path, monkeypatch, web, netrc):
    """Use two servers of one address: only the named one has credentials."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    authority, certificate = write_certificates(tmp_path)
    (tmp_path / "netrc").write_text(f"{netrc} login me password secret\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    other = RangeServer(tmp_path, certificate)
    # A redirect to the other server, also with the redirect's own credentials, and within it.
    with_credentials = other.root.replace("://", "://them:theirs@")
    targets = {"a.jsonl": f"{web.root}/b.jsonl", "b.jsonl": f"{with_credentials}/a.jsonl"}
    web.before = targets.get
    try:
        assert open_source(f"{web.root}/a.jsonl")[0].text == "a"
    finally:
        other.end()
    assert {authorization for authorization, _ in web.credentials} == {"Basic bWU6c2VjcmV0"}
    assert set(other.credentials) == {(None, None)}


def test_a_redirected_s3_request_gets_no_credentials(s3, web):
    (web.folder / "a.jsonl").write_text('{"text": "a"}')
    upload(s3, web.folder, "redirected")
    s3.before = lambda method, key: f"{web.root}/a.jsonl" if "a.jsonl" in key else None
    with pytest.raises(DataError, match="a.jsonl"):
        open_source(beside(s3.url("redirected"), "a.jsonl"))
    assert s3.requests and {authorization for authorization, _ in web.credentials} <= {None}


def failing(times: int):
    """Answer so many requests with an error, then normally."""
    left = iter([503] * times)
    return lambda *request: next(left, None)


@pytest.mark.parametrize("where", ["s3", "web"])
def test_failed_reads_are_retried_and_changes_detected(tmp_path, s3, web, where):
    text = "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(50))
    (web.folder / "a.jsonl").write_text(text)
    upload(s3, web.folder, "flaky")
    server = {"s3": s3, "web": web}[where]
    url = f"{web.root}/a.jsonl" if where == "web" else beside(s3.url("flaky"), "a.jsonl")
    server.before = failing(3)
    dataset = open_source(url)
    server.before = failing(3)
    assert dataset[7].text == "row 7" and len(dataset) == 50
    server.before = failing(1000)
    with pytest.raises(DataError, match="a.jsonl.*503.*tried for 0.5 s"):
        dataset[8]
    server.before = failing(0)
    before = fingerprint_of_files(dataset.files)
    assert before == fingerprint_of_files([web.folder / "a.jsonl"]) | {"times": before["times"]}
    (web.folder / "a.jsonl").write_text(text.replace("row 8", "row 9"))
    upload(s3, web.folder, "flaky")
    with pytest.raises(DataError, match="changed while the run was reading it"):
        dataset[8]
    assert fingerprint_of_files(open_source(url).files)["digest"] != before["digest"]


def test_an_outage_is_not_an_error_of_a_sample(make_config, tmp_path, web):
    """Raise an error, because a run that skips bad samples would continue without its data."""
    rows = write_rows(tmp_path, 10)
    for file in tmp_path.glob("*.*"):
        shutil.copy(file, web.folder)
    config = make_config(count=10, train=f"{web.root}/train.jsonl", on_error="skip", batch_size=10,
                         microbatches=1)
    steps = local_steps(config)
    assert not next(steps).skipped
    web.before = lambda path: 404 if path == rows[1]["images"][0] else None
    from raymm.data.samples import media

    media._heads.clear()
    (skipped,) = next(steps).skipped
    assert skipped.id == "s1" and skipped.reason == "the file does not exist"
    web.before = lambda path: 503 if path.endswith(".wav") else None
    media._heads.clear()
    with pytest.raises(DataError, match="wav.*503"):
        next(steps)


def test_large_items_are_read_by_ranges(tmp_path, web):
    from raymm.data.samples.media import BLOCK, HEAD_BYTES, open_item

    data = bytes(range(256)) * (3 * HEAD_BYTES // 256)
    (web.folder / "large").write_bytes(data)
    with open_item(f"{web.root}/large") as file:
        assert file.read(100) == data[:100] and len(web.ranges) == 1
        file.seek(2 * HEAD_BYTES + 5)
        assert file.read(100) == data[2 * HEAD_BYTES + 5 :][:100]
        file.seek(0)
        assert file.read() == data
    assert max(last - first for _, first, last in web.ranges[:2]) < max(HEAD_BYTES, BLOCK)
    with open_item(f"{web.root}/large") as file:
        file.seek(2 * HEAD_BYTES)
        web.before = lambda path: 403
        with pytest.raises(DataError, match="access is denied"):
            file.read(1)
        with pytest.raises(DataError, match="access is denied"):
            file.close()  # for libraries that swallow the first
        file.close()
    web.before = lambda path: None
    assert open_item(f"{web.root}/large", 5, 10).read() == data[5:15]


@pytest.mark.parametrize("format", ["json", "parquet", "tar"])
def test_an_outage_while_rows_are_read_is_named(tmp_path, web, format):
    folder, _ = written(format, tmp_path)
    suffix = {"json": "train.jsonl", "parquet": "a.parquet", "tar": "000.tar"}[format]
    shutil.copy(folder / suffix, web.folder)
    dataset = pickle.loads(pickle.dumps(open_source(f"{web.root}/{suffix}")))
    web.before = lambda path: 503
    with pytest.raises(DataError, match=rf"{suffix}.*503.*tried for 0.5 s"):
        dataset[1]
    web.before = lambda path: 404
    with pytest.raises(DataError, match=rf"{suffix}.* (was removed|changed) while the run"):
        dataset[1]
    web.before = lambda path: None
    assert dataset[1].id == "s1"


def test_a_change_is_reported_with_both_versions():
    url = DataUrl("s3", "b", "rows.jsonl")
    text = str(changed(url, FileVersion(1234, "x"), FileVersion(5, "")))
    assert text.startswith("s3://b/rows.jsonl changed while the run was reading it: ")
    assert "it had 1,234 bytes and tag x, and now has 5 bytes and tag none" in text
