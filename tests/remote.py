"""Servers on the loopback for sources behind URLs: an object store with the S3 calls that reading
needs, and a web server with listings.

Both serve `files` (name -> content) and are broken on purpose through `faults`: called before each
GET of a file with the name and the first byte, it returns a status to answer with, a number of
bytes after which the connection breaks (negative), or None.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "signals"


class FileServer(ThreadingHTTPServer):
    """Serves `files`; `log` has method, name and Range of every request of a file."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), FileHandler)
        self.files = files
        self.log: list[tuple[str, str, str]] = []
        self.faults: Callable[[str, int], int | None] = lambda name, at: None
        self.ranges = True
        self.etags = True
        self.authorization: set[str | None] = set()
        self.denied = False
        self.page: dict[str, str] = {}  # listings to send instead of the right one
        self.page_size = 3  # keys a page of ListObjectsV2

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class FileHandler(BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Nothing on stderr, where the tests read what the command prints."""

    def reply(
        self,
        status: int,
        body: bytes,
        kind: str = "text/html",
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            time.sleep(0.2)  # what was sent is read before the connection breaks
            self.close_connection = True
            self.connection.shutdown(2)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        query = {
            key: values[0] for key, values in parse_qs(place.query, keep_blank_values=True).items()
        }
        self.server.authorization.add(self.headers.get("Authorization"))
        if self.server.denied:
            self.reply(
                403,
                b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>",
                "application/xml",
            )
        elif "list-type" in query:
            self.list_keys(place.path.strip("/"), query)
        else:
            name = unquote(place.path).lstrip("/").removeprefix(f"{BUCKET}/")
            if name in self.server.files:
                self.send_file(name)
            elif place.path.endswith("/") and any(
                key.startswith(name) for key in self.server.files
            ):
                self.send_page(name)
            else:
                self.reply(404, b"<Error><Code>NoSuchKey</Code></Error>", "application/xml")

    def send_file(self, name: str) -> None:
        body = self.server.files[name]
        wanted = self.headers.get("Range", "")
        self.server.log.append((self.command, name, wanted))
        tag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
        headers = (
            {"ETag": tag, "Last-Modified": formatdate(0, usegmt=True)} if self.server.etags else {}
        )
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
        start = int(found[1]) if found and self.server.ranges else 0
        if self.headers.get("If-Match", tag) != tag:
            self.reply(
                412,
                b"<Error><Code>PreconditionFailed</Code><Message>pre-conditions</Message></Error>",
                "application/xml",
            )
            return
        fault = self.server.faults(name, start) if self.command == "GET" else None
        if fault is not None and fault > 0:
            self.reply(
                fault,
                b"<Error><Code>InternalError</Code><Message>later</Message></Error>",
                "application/xml",
            )
            return
        if found and self.server.ranges:
            stop = min(int(found[2]) + 1 if found[2] else len(body), len(body))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
            self.reply(
                206,
                body[start:stop],
                "application/octet-stream",
                headers,
                None if fault is None else -fault,
            )
        else:
            self.reply(
                200, body, "application/octet-stream", headers, None if fault is None else -fault
            )

    def send_page(self, folder: str) -> None:
        inner = sorted(
            {
                re.split("(?<=/)", key.removeprefix(folder))[0]
                for key in self.server.files
                if key.startswith(folder)
            }
        )
        links = "".join(f'<li><a href="{quote(name)}">{escape(name)}</a></li>' for name in inner)
        page = self.server.page.get(
            folder, f'<a href="?C=N;O=D">Name</a><a href="../">up</a><ul>{links}</ul>'
        )
        self.reply(200, page.encode(), "text/html; charset=utf-8")

    def list_keys(self, bucket: str, query: dict[str, str]) -> None:
        if bucket != BUCKET:
            self.reply(
                404,
                b"<Error><Code>NoSuchBucket</Code><Message>none</Message></Error>",
                "application/xml",
            )
            return
        prefix, mark = query.get("prefix", ""), query.get("delimiter", "")
        keys = sorted(key for key in self.server.files if key.startswith(prefix))
        inner = [key[len(prefix) :] for key in keys]
        entries = sorted(
            {name.split(mark)[0] + mark if mark and mark in name else name for name in inner}
        )
        start = int(query.get("continuation-token", "0"))
        shown, rest = (
            entries[start : start + self.server.page_size],
            entries[start + self.server.page_size :],
        )
        more = (
            f"<IsTruncated>true</IsTruncated><NextContinuationToken>{start + len(shown)}</NextContinuationToken>"
            if rest
            else ""
        )
        lines = [f"<Name>{bucket}</Name>", more or "<IsTruncated>false</IsTruncated>"]
        for name in shown:
            key = escape(quote(prefix + name) if query.get("encoding-type") else prefix + name)
            if mark and name.endswith(mark) and prefix + name not in keys:
                lines.append(f"<CommonPrefixes><Prefix>{key}</Prefix></CommonPrefixes>")
                continue
            body = self.server.files[prefix + name]
            tag = hashlib.md5(body, usedforsecurity=False).hexdigest()
            facts = f"<Size>{len(body)}</Size><ETag>&quot;{tag}&quot;</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            lines.append(f"<Contents><Key>{key}</Key>{facts}</Contents>")
        if query.get("encoding-type"):
            lines.append("<EncodingType>url</EncodingType>")
        body = f'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{"".join(lines)}</ListBucketResult>'
        self.reply(200, body.encode(), "application/xml")


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[FileServer]:
    """A server of `files` until the block ends."""
    server = FileServer(files)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
