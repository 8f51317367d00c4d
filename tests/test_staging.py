"""Sources behind URLs: what is cached is what a local folder gives, whatever happens on the way,
and nothing of the credentials is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from remote import BUCKET, FileHandler, FileServer, serve

from bitimely_cli.main import main
from bitimely_core import cache
from bitimely_core.cache import remote_errors, remote_listing, staging
from bitimely_core.cache.workers import StopFlag
from bitimely_core.errors import UserError, hide_credentials
from bitimely_core.formats import edf_header, edf_writer
from bitimely_core.store import storage

s3fs = pytest.importorskip("s3fs")


def make_files(folder: str = "night/") -> dict[str, bytes]:
    """Two EDF recordings and a text beside them, by remote name."""
    rng = np.random.default_rng(0)
    files = {}
    for name in ("a one", "b"):
        samples = [rng.integers(-900, 900, 4000).astype(np.int16)]
        files[f"{folder}{name}.edf"] = edf_writer.encode_edf(
            [edf_header.EdfChannel("EEG", "uV", -100.0, 100.0, -1000, 1000, 100)], samples
        )
    return {**files, f"{folder}sub/notes.txt": b"as recorded\n"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A server whose object store this process reads, with small blocks and short pauses."""
    monkeypatch.setattr(remote_errors, "PAUSE", 0.01)
    monkeypatch.setattr(staging, "CHUNK", 1 << 10)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/absent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/absent")
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_PROFILE",
        "no_proxy",
        "http_proxy",
        "HTTP_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    with serve(make_files()) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        yield found
        s3fs.S3FileSystem.clear_instance_cache()


def write_local(files: dict[str, bytes], home: Path) -> Path:
    for name, body in files.items():
        path = home / "raw" / name.partition("/")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return home / "raw"


def name_url(server: FileServer, scheme: str) -> str:
    return f"s3://{BUCKET}/night" if scheme == "s3" else f"{server.url}/night"


def read_content(report: dict[str, object], folder: Path) -> tuple[object, ...]:
    """What two caches of the same files have in common: everything but the path of the source."""
    source = dict(report["source"])  # type: ignore[call-overload]
    files = {path.name: path.read_bytes() for path in folder.glob("*.parquet")}
    return (report["content_sha256"], report["counts"], {**source, "path": None}, files)


def list_staged(folder: Path) -> list[Path]:
    return list(folder.glob(".staged-*"))


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_url_gives_the_cache_of_the_folder(
    scheme: str, server: FileServer, tmp_path: Path
) -> None:
    wanted = cache.ingest("edf", write_local(server.files, tmp_path), tmp_path / "local")
    found = cache.ingest("edf", name_url(server, scheme), tmp_path / "remote")
    assert read_content(found, tmp_path / "remote") == read_content(wanted, tmp_path / "local")
    assert found["source"]["path"] == name_url(server, scheme)
    assert list_staged(tmp_path / "remote") == []
    assert cache.verify(tmp_path / "remote", deep=True) == []


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_taken_up(
    scheme: str, ranges: bool, server: FileServer, tmp_path: Path
) -> None:
    server.ranges = ranges or scheme == "s3"
    broken: list[str] = []

    def break_twice(name: str, at: int) -> int | None:
        if name.endswith("b.edf") and len(broken) < 2:
            broken.append(name)
            return -700 if at == 0 or not server.ranges else 503
        return None

    server.faults = break_twice
    wanted = cache.ingest("edf", write_local(server.files, tmp_path), tmp_path / "local")
    found = cache.ingest("edf", name_url(server, scheme), tmp_path / "remote")
    assert len(broken) == 2
    assert read_content(found, tmp_path / "remote") == read_content(wanted, tmp_path / "local")


def test_a_stopped_download_goes_on(server: FileServer, tmp_path: Path) -> None:
    url, body = name_url(server, "http"), server.files["night/b.edf"]
    server.faults = lambda name, at: (-5000 if at == 0 else 500) if name.endswith("b.edf") else None
    with pytest.raises(UserError, match="does not answer") as stopped:
        cache.ingest("edf", url, tmp_path / "cache")
    assert stopped.value.exit_code == 6
    assert not (tmp_path / "cache/manifest.json").exists()
    (staged,) = list_staged(tmp_path / "cache")
    assert (staged / "a one.edf").read_bytes() == server.files["night/a one.edf"]
    server.faults, server.log = lambda name, at: None, []
    cache.ingest("edf", url, tmp_path / "cache", keep_staged=True)
    fetched = [(name, first) for method, name, first in server.log if method == "GET"]
    assert fetched == [("night/b.edf", "bytes=5000-")]  # what had come is not fetched again
    assert (staged / "b.edf").read_bytes() == body
    lines = [json.loads(line) for line in (staged / ".files.jsonl").read_bytes().splitlines()]
    assert {name: digest for name, *_, digest in lines}["b.edf"] == hashlib.sha256(body).hexdigest()


@pytest.mark.slow
def test_staged_files_are_compared_with_the_listing(server: FileServer, tmp_path: Path) -> None:
    url = name_url(server, "s3")
    cache.ingest("edf", url, tmp_path / "cache", keep_staged=True)
    (staged,) = list_staged(tmp_path / "cache")
    # as long as before
    server.files["night/b.edf"] = make_files()["night/b.edf"][:-200] + bytes(200)
    damaged = bytearray((staged / "a one.edf").read_bytes())
    damaged[-1] ^= 1
    (staged / "a one.edf").write_bytes(damaged)
    del server.files["night/sub/notes.txt"]
    server.log.clear()
    cache.ingest("edf", url, tmp_path / "cache", keep_staged=True)
    assert {name for method, name, _ in server.log if method == "GET"} == {
        "night/a one.edf",
        "night/b.edf",
    }
    assert (staged / "a one.edf").read_bytes() == server.files["night/a one.edf"]
    assert not (staged / "sub/notes.txt").exists()


@pytest.mark.parametrize(
    "left",
    [
        "half a line",
        "no line",
        "no file",
        "long part",
        "short part",
        "temporary file",
        "folder in the place",
    ],
)
def test_whatever_a_kill_leaves_is_mended(left: str, server: FileServer, tmp_path: Path) -> None:
    url, body = name_url(server, "http"), server.files["night/b.edf"]
    wanted = cache.ingest("edf", url, tmp_path / "cache", keep_staged=True)
    (staged,) = list_staged(tmp_path / "cache")
    notes = staged / ".files.jsonl"
    lines = notes.read_bytes().splitlines(keepends=True)
    (line,) = (one for one in lines if json.loads(one)[0] == "b.edf")
    others = b"".join(one for one in lines if one != line)
    part = staged / ".parts" / storage.fingerprint(json.loads(line)[:3])[:32]
    part.parent.mkdir()
    match left:
        case "half a line":
            notes.write_bytes(others + line[:-9])
        case "no line":
            notes.write_bytes(others)
        case "no file":
            (staged / "b.edf").unlink()
        case "long part" | "short part":
            (staged / "b.edf").unlink()
            part.write_bytes(body + b"more" if left == "long part" else body[:3000])
        case "temporary file":
            (staged / "b.edf.tmp-1-0123abcd").write_bytes(b"x")
        case _:
            (staged / "b.edf").unlink()
            (staged / "b.edf").mkdir()
            (staged / "b.edf/inner").write_bytes(b"x")
    server.log.clear()
    found = cache.ingest("edf", url, tmp_path / "cache", keep_staged=True)
    assert read_content(found, tmp_path / "cache") == read_content(wanted, tmp_path / "cache")
    assert (staged / "b.edf").read_bytes() == body
    assert {path.name for path in staged.iterdir()} == {
        "a one.edf",
        "b.edf",
        "sub",
        ".files.jsonl",
        ".lock",
    }
    assert {name for method, name, _ in server.log if method == "GET"} <= {"night/b.edf"}


def test_without_a_version_nothing_is_reused(server: FileServer, tmp_path: Path) -> None:
    server.etags = False
    for _ in range(2):
        server.log.clear()
        cache.ingest("edf", name_url(server, "http"), tmp_path / "cache", keep_staged=True)
        assert sum(method == "GET" for method, *_ in server.log) == 3


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("often", [1, 99])
def test_a_file_that_changes_meanwhile(
    scheme: str, often: int, server: FileServer, tmp_path: Path
) -> None:
    changes: list[int] = []

    def change(name: str, at: int) -> None:
        if name.endswith("b.edf") and len(changes) < often and (at > 1000 or scheme == "http"):
            changes.append(at)
            body = server.files[name]
            server.files[name] = body[:-2] + len(changes).to_bytes(2, "little")

    server.faults = change
    if often == 99:
        with pytest.raises(UserError, match="changed while it was read") as refused:
            cache.ingest("edf", name_url(server, scheme), tmp_path / "remote")
        assert refused.value.exit_code == 4
        return
    cache.ingest("edf", name_url(server, scheme), tmp_path / "remote")
    server.faults = lambda name, at: None
    records = {
        record.recording_id: record for record in cache.open_cache(tmp_path / "remote").records()
    }
    (last,) = (record for name, record in records.items() if name.startswith("b"))
    assert last.signals[0].samples[-1] == 1


def run_cli(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str]:
    code = main([str(one) for one in argv])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out + err


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("s3://absent/night", 2, "not_found"),
        (f"s3://{BUCKET}/absent", 2, "not_found"),
        (f"s3://{BUCKET}/night/b.edf", 4, "is a file"),
        ("WEB/absent/", 2, "not_found"),
        ("WEB/night/b.edf", 2, "give the folder that it lies in"),
        ("http://127.0.0.1:9/x", 6, "does not answer"),
        ("s4://bucket/x", 2, "Did you mean"),
        ("gs://bucket/x", 2, "missing_extra"),
        ("WEB/night/?token=abc", 2, "query"),
        ("simplecache::s3://bucket/x", 2, ""),
        ("zip://x.edf::s3://bucket/x.zip", 2, ""),
        ("file://host/x", 2, "absolute path"),
        ("file:///absent/x", 2, "no such folder"),
        ("://", 2, ""),
    ],
)
def test_faults_are_one_line(
    url: str,
    code: int,
    words: str,
    server: FileServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if url.startswith("gs") and "gcsfs" in fsspec.available_protocols():
        pytest.importorskip("gcsfs", reason="missing")
    found, text = run_cli(
        capsys, "ingest", "edf", url.replace("WEB", server.url), "-w", tmp_path / "w"
    )
    assert (found, text.count("\n")) == (code, 1), text
    assert words in text
    assert "abc" not in text


def test_no_permission(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.denied = True
    for url in (name_url(server, "s3"), name_url(server, "http")):
        code, text = run_cli(capsys, "ingest", "edf", url, "-w", tmp_path / "w")
        assert (code, text.count("\n")) == (4, 1)
        assert "no permission" in text
        assert url in text


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("s3://KEYNAME:s3cr/E+T@bucket/x", "s3://bucket/x"),
        ("https://user:s3crET@host/x/?X-Amz-Signature=s3crET", "https://host/x/"),
        ("https://user:s3crET@ho@host:8080/x#s3crET", "https://host:8080/x"),
        ("https://tok-s3crET@host/x", "https://host/x"),
        ("https://u:s3?crET@host/x", "https://"),
        ("s3:/KEYNAME:s3crET@bucket/x", "s3:/bucket/x"),  # as a path
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("http://h:80/a@b", "http://h:80/a@b"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("at 10:/ or C:/x a@b.c?", "at 10:/ or C:/x a@b.c?"),
    ],
)
def test_credentials_are_hidden(given: str, shown: str) -> None:
    assert hide_credentials(given) == shown
    assert hide_credentials(f"read '{given}' and more") == f"read '{shown}' and more"


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_credentials_are_used_and_nowhere_written(
    scheme: str, server: FileServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "s3crET+x"
    url = name_url(server, scheme).replace("://", f"://KEYNAME:{secret}@")
    server.files["night/broken.edf"] = b"no edf"
    home = tmp_path / "w"
    assert main(["ingest", "edf", url, "-w", str(home), "--keep-staged", "--json", "--debug"]) == 3
    assert any(
        "KEYNAME" in (found or "") or (found or "").startswith("Basic ")
        for found in server.authorization
    )
    server.denied = True
    assert main(["ingest", "edf", url, "-w", str(home), "--debug"]) == 4
    assert main(["ingest", "edf", url + "?sig=" + secret, "-w", str(home), "--debug"]) == 2
    assert main(["ingest", "edf", "-w", url, "--debug"]) == 2
    assert main(["tokenize", url, "-w", str(home)]) == 2
    shown = "".join(capfd.readouterr())
    stored = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    for text in (secret, "s3crET", "KEYNAME"):
        assert text not in shown
        assert text.encode() not in stored
    assert (
        name_url(server, scheme)
        in json.loads((home / "cache/edf/ingest_report.json").read_bytes())["source"]["path"]
    )


@pytest.mark.slow
def test_hostile_names_stay_outside(server: FileServer, tmp_path: Path) -> None:
    good = {name: server.files[name] for name in server.files}
    edf_bytes = server.files["night/b.edf"]
    hostile = [
        "../up.edf",
        "x/../../up.edf",
        "/abs.edf",
        "sub//two.edf",
        "back\\slash.edf",
        "bell\x07.edf",
        "line\nbreak.edf",
        "esc\x1b[2J.edf",
    ]
    hostile += [
        "Case.edf",
        "cAse.edf",
        "caf\u00e9.edf",
        "cafe\u0301.edf",
        "a/b",
        "a",
        "." * 3 + "/x.edf",
        "n" * 250 + ".edf",
    ]
    for name in hostile:
        server.files[f"night/{name}"] = edf_bytes if not name.startswith("a") else b"x"
    server.files["night/.hidden.edf"] = edf_bytes
    home = tmp_path / "deep/er/cache"
    report = cache.ingest("edf", name_url(server, "s3"), home, keep_staged=True, max_bad=1.0)
    (staged,) = list_staged(home)
    kept = {
        path.relative_to(staged).as_posix()
        for path in staged.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }
    assert kept == {name.partition("/")[2] for name in good} | {"a/b"}
    everything = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert everything == {"deep"}
    assert {path.name for path in (tmp_path / "deep/er").iterdir()} == {"cache"}
    text = json.dumps(report)
    assert {"path_escape", "file_name", "duplicate_key"} <= set(report["reason_counts"])
    assert not any(character in text for character in "\x07\x1b")


def test_links_of_a_page_that_lead_away(server: FileServer, tmp_path: Path) -> None:
    links = [
        "../secret.edf",
        "..%2f..%2fsecret.edf",
        "/secret.edf",
        "http://127.0.0.1:9/x.edf",
        "//127.0.0.1:9/x.edf",
        "mailto:x@y",
        "b.edf",
    ]
    links += [
        "javascript:alert(1)",
        "data:,x",
        "?C=M",
        "#top",
        "sub/../../secret.edf",
        "./",
        "b.edf?x=1",
        "%0a.edf",
    ]
    server.page["night/"] = (
        "".join(f'<a href="{link}">x</a>' for link in links) + "<a>none</a><a href=>"
    )
    server.files["secret.edf"] = server.files["night/b.edf"]
    cache.ingest("edf", name_url(server, "http"), tmp_path / "cache", keep_staged=True, max_bad=1.0)
    assert {name for _, name, _ in server.log} == {"night/b.edf"}
    (staged,) = list_staged(tmp_path / "cache")
    assert [path.name for path in staged.iterdir() if not path.name.startswith(".")] == ["b.edf"]


def test_a_listing_without_end(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        remote_listing, "_list_page", lambda opened, url: [("again", url + "again/", {}, True)]
    )
    with pytest.raises(UserError, match="deep") as refused:
        cache.ingest("edf", name_url(server, "http"), tmp_path / "cache")
    assert refused.value.exit_code == 4


def test_the_disk_is_measured_first(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: type("Usage", (), {"free": 9000, "total": 1, "used": 1})
    )
    with pytest.raises(UserError, match="disk full: need") as refused:
        cache.ingest("edf", name_url(server, "s3"), tmp_path / "cache")
    assert refused.value.exit_code == 6
    assert not any(method == "GET" for method, *_ in server.log)


def test_a_dry_run_lists_and_writes_nothing(server: FileServer, tmp_path: Path) -> None:
    plan = cache.ingest("edf", name_url(server, "s3"), tmp_path / "cache", dry_run=True)
    assert plan["source"] == {
        "path": name_url(server, "s3"),
        "files": 3,
        "bytes": sum(map(len, server.files.values())),
    }
    assert plan["estimate"]["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    assert server.log == []


def test_options_are_checked_before_the_download(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = name_url(server, "s3")
    for more in (["--shard", "1/2"], ["--rate", "7"], ["--init-map", str(tmp_path / "map.toml")]):
        code, text = run_cli(capsys, "ingest", "generic", url, "-w", tmp_path / "w", *more)
        assert code in {2, 4}, text
    assert server.log == []
    assert not (tmp_path / "w").exists()


def test_a_signal_stops_the_download(server: FileServer, tmp_path: Path) -> None:
    sent = threading.Lock()

    def interrupt(name: str, at: int) -> None:
        if sent.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.5)

    server.faults = interrupt
    with pytest.raises(UserError, match="stopped by SIGTERM") as stopped:
        cache.ingest("edf", name_url(server, "http"), tmp_path / "cache")
    assert stopped.value.exit_code == 143
    server.faults = lambda name, at: None
    assert (
        cache.ingest("edf", name_url(server, "http"), tmp_path / "cache")["status"] == "published"
    )


def test_a_signal_does_not_wait_for_an_answer(server: FileServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(UserError, match="stopped by SIGINT"):
            cache.ingest("edf", f"http://127.0.0.1:{silent.getsockname()[1]}/x", tmp_path / "cache")
        assert time.monotonic() - began < 8


def test_memory_and_file_urls(server: FileServer, tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for name, body in server.files.items():
        store.pipe_file(f"/staging-test/{name}", body)
    raw = write_local(server.files, tmp_path)
    try:
        wanted = cache.ingest("edf", raw, tmp_path / "local")
        for number, url in enumerate(["memory://staging-test/night", f"file://{raw}"]):
            found = cache.ingest("edf", url, tmp_path / f"cache-{number}")
            assert read_content(found, tmp_path / f"cache-{number}") == read_content(
                wanted, tmp_path / "local"
            )
            assert found["source"]["path"] == url
    finally:
        store.rm("/staging-test", recursive=True)


def test_the_extra_may_be_missing(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setattr(remote_listing, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'bitimely\[s3\]'") as refused:
        cache.ingest("edf", name_url(server, "s3"), tmp_path / "cache")
    assert refused.value.exit_code == 2


def test_a_recipe_holds_no_credentials(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = name_url(server, "s3").replace("://", "://KEYNAME:s3crET@")
    setting = f"ingest.sources.sleep-edf={url}"
    code, text = run_cli(
        capsys, "run", "table2", "--only", "sleep", "--set", setting, "-w", tmp_path / "w"
    )
    assert (code, text.count("\n")) == (2, 1)
    assert "ingest.sources.sleep-edf" in text
    assert "s3crET" not in text
    assert not any(b"s3crET" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_names_of_buckets_and_local_urls_are_read_as_they_are_written(tmp_path: Path) -> None:
    """A space and # are letters of a key; a file URL is encoded and may name this machine; a secret
    with a space stays hidden.
    """
    from bitimely_core.cache import staging
    from bitimely_core.errors import hide_credentials, split_url

    assert split_url("s3://bucket/my night") == ("s3", "", "bucket/my night")
    assert hide_credentials("s3://KEY:sec ret@bucket/x") == "s3://bucket/x"
    assert "ret" not in hide_credentials("no file at s3://KEY:sec ret@bucket/x now")
    assert hide_credentials("s3://signals/a#b") == "s3://signals/a#b"
    assert (
        hide_credentials("https://host/a#b")
        == hide_credentials("https://u:p@host/a?b#c")
        == "https://host/a"
    )
    assert staging.locate_folder("s3://signals/a#b", tmp_path) != staging.locate_folder(
        "s3://signals/a#c", tmp_path
    )
    for url in ("file:///data/my%20raw", "file://localhost/data/my%20raw"):
        assert staging._parse_local(url) == Path("/data/my raw")


@pytest.mark.parametrize("more", [1, 1000])
def test_a_web_server_that_sends_more_than_it_states(
    more: int, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning is not taken for the file."""
    original = FileHandler.send_file

    def send_file(handler: FileHandler, name: str) -> None:
        if handler.command == "HEAD":
            handler.reply(
                200,
                handler.server.files[name][:-more],
                "application/octet-stream",
                {"ETag": '"one"'},
            )
        else:
            original(handler, name)

    monkeypatch.setattr(FileHandler, "send_file", send_file)
    with pytest.raises(UserError, match="longer than the server states") as refused:
        cache.ingest("generic", name_url(server, "http"), tmp_path / "cache")
    assert refused.value.exit_code == 4
    assert not list((tmp_path / "cache").glob("*.parquet"))


def test_a_web_server_that_sends_less_than_it_states(
    server: FileServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = FileHandler.send_file

    def send_file(handler: FileHandler, name: str) -> None:
        if handler.command == "HEAD":
            handler.reply(
                200,
                handler.server.files[name] + b"0",
                "application/octet-stream",
                {"ETag": '"one"'},
            )
        else:
            original(handler, name)

    monkeypatch.setattr(FileHandler, "send_file", send_file)
    assert main(["ingest", "generic", name_url(server, "http"), "-w", str(tmp_path)]) == 6
    assert "ends before the size that the server states" in capsys.readouterr().err


@pytest.mark.parametrize("shift", [-512, 512, None])
def test_a_web_server_that_answers_with_another_part(
    shift: int | None, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is put together from it; without the header that says which part it is, neither."""
    original = FileHandler.send_file

    def send_file(handler: FileHandler, name: str) -> None:
        body, asked = handler.server.files[name], handler.headers.get("Range", "")
        headers = {"ETag": '"one"'}
        if handler.command == "HEAD" or not name.endswith("b.edf"):
            original(handler, name)
        elif not asked:
            handler.reply(200, body, "application/octet-stream", headers, cut=1500)
        else:
            start = int(asked.removeprefix("bytes=").rstrip("-")) + (shift or 0)
            if shift is not None:
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            handler.reply(206, body[start:], "application/octet-stream", headers)

    monkeypatch.setattr(FileHandler, "send_file", send_file)
    with pytest.raises(UserError, match=r"night/b\.edf: the server sends another part") as refused:
        cache.ingest("generic", name_url(server, "http"), tmp_path / "cache")
    assert refused.value.exit_code == 4


@pytest.mark.parametrize("link", ["b.edf", "/night/b.edf", "HOST/night/b.edf"])
def test_a_redirected_listing_is_read_where_it_is(
    link: str, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FileHandler.do_GET

    def do_get(handler: FileHandler) -> None:
        if handler.path.startswith("/latest/"):
            handler.reply(
                302, b"", headers={"Location": handler.path.replace("/latest/", "/night/", 1)}
            )
        else:
            original(handler)

    monkeypatch.setattr(FileHandler, "do_GET", do_get)
    server.page["night/"] = (
        f'<a href="{link.replace("HOST", server.url)}">b</a><a href="/other/c.edf">c</a>'
    )
    assert list(remote_listing.list_remote(f"{server.url}/latest", StopFlag()).files) == ["b.edf"]
    assert (
        cache.ingest("generic", f"{server.url}/latest", tmp_path / "cache")["counts"]["accepted"]
        == 1
    )
