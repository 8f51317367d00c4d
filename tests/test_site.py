"""The site of the documentation: built without warnings, offline, with every public name; what its
pages load is in its folder.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from test_browser import chromium  # noqa: F401  a fixture

import bitimely

Browser = Callable[[Path], tuple[str, str]]
ROOT = Path(__file__).parent.parent
LOADED = {
    "link": "href",
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "object": "data",
    "embed": "src",
}
NOT_LOADED = {"canonical", "prev", "next", "edit"}  # of <link rel>


class PageReader(HTMLParser):
    """What a page loads, where it links to, and its text outside of code."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.text: list[str] = []
        self.inside: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in LOADED and not NOT_LOADED & set((found.get("rel") or "").split()):
            self.loads.append(found.get(LOADED[tag]) or "")
            self.loads += re.findall(r"[^\s,]+(?= |,|$)", found.get("srcset") or "")
        if tag == "a":
            self.links.append(found.get("href") or "")
        self.anchors |= {found.get(key) or "" for key in ("id", "name")}
        if tag in {"code", "pre", "script", "style"}:
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        if not self.inside:
            self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make gallery` builds it, where no other host can be reached: proxies that nobody
    serves.
    """
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    command = re.findall(r"-m mkdocs build --strict", (ROOT / "Makefile").read_text())[0].split()
    closed = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
        "http://127.0.0.1:9",
    )
    done = subprocess.run(
        [sys.executable, *command, "--site-dir", str(out)],
        cwd=ROOT,
        env={**os.environ, **closed, "GALLERY": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, PageReader]:
    return {path: PageReader(path) for path in sorted(site.rglob("*.html"))}


def is_outside(address: str) -> bool:
    return bool(urlsplit(address).netloc)


@pytest.mark.slow
def test_pages_load_nothing_from_other_hosts(site: Path, pages: dict[Path, PageReader]) -> None:
    assert len(pages) > 50
    for path, page in pages.items():
        # this element makes the theme ask GitHub for the number of stars
        assert 'data-md-component="source"' not in path.read_text(), path
        assert [address for address in page.loads if is_outside(address)] == [], path
        for address in page.loads:
            where = (
                site / unquote(address).lstrip("/")
                if address.startswith("/")
                else path.parent / unquote(urlsplit(address).path)
            )
            assert address.startswith("data:") or where.exists(), (path, address)
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert [
        address
        for address in re.findall(r"url\(([^)]*)\)|@import\s+([^;]+);", styles)
        if "//" in "".join(address)[:10]
    ] == []
    everything = "".join(path.read_text() for path in pages)
    assert 'class="mermaid"' not in everything, "the theme would load mermaid from elsewhere"


@pytest.mark.slow
def test_a_page_of_the_file_system_finds_words(site: Path, chromium: Browser) -> None:  # noqa: F811
    dom, console = chromium(site / "models" / "crt.html?q=hypnogram")
    assert re.search(r"[1-9][0-9]* matching documents", dom), console[-3000:]
    assert f'href="file://{site}/predict.html' in dom


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere(site: Path, pages: dict[Path, PageReader]) -> None:
    for path, page in pages.items():
        for address in page.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or path.name == "404.html" or not address:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), (path, address)
            if parts.fragment and target in pages and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[target].anchors, (path, address)
    outside = {
        address
        for page in pages.values()
        for address in page.links
        if address.startswith("https://github.com/bitimely/bitimely/")
    }
    for address in outside:
        _, kind, name = re.fullmatch(r"(.*)/(blob|tree)/main/([^#]*).*", address).groups()  # type: ignore[union-attr]
        assert (ROOT / name).is_dir() if kind == "tree" else (ROOT / name).is_file(), address


@pytest.mark.slow
def test_lists_and_tables_are_drawn_as_such(pages: dict[Path, PageReader]) -> None:
    """Text that python-markdown reads otherwise than GitHub does stays visible as marks."""
    for path, page in pages.items():
        text = "".join(page.text)
        assert re.findall(r"^(?:\* |\| ?-{3}|#{2,} |```).*", text, flags=re.M) == [], path


@pytest.mark.slow
def test_every_public_name_is_described(site: Path, pages: dict[Path, PageReader]) -> None:
    page = pages[site / "api.html"]
    names = {name for name in bitimely.__all__ if not name.startswith("_")}
    assert {f"bitimely.{name}" for name in names} <= page.anchors
    text = "".join(page.text)
    assert "Raises:" in text
    assert "AliasResolutionError" not in text


@pytest.mark.slow
def test_the_gallery_shows_what_its_scripts_print_and_draw(
    site: Path, pages: dict[Path, PageReader]
) -> None:
    scripts = sorted((ROOT / "docs" / "gallery").glob("*.py"))
    assert len(scripts) == 8
    page = pages[site / "gallery" / "index.html"]
    html = (site / "gallery" / "index.html").read_text()
    assert sorted(Path(address).name for address in page.loads if address.endswith(".svg")) == [
        f"{path.stem}.svg" for path in scripts
    ]
    for path in scripts:
        assert len(path.read_text().splitlines()) <= 60, path
        figure = (site / "gallery" / f"{path.stem}.svg").read_text()
        assert figure.count("<path") > 10, path
        assert not re.search(r"href=\"https?:|<script|<image[^>]*http", figure), path
        assert (
            ast.get_docstring(ast.parse(path.read_text())).split("\n\n")[0].removesuffix(".")
            in html
        )  # type: ignore[union-attr]
    numbers = {  # facts that hold whatever the machine, from the definitions
        "in two splits: 0": "splits",
        "26 people": "spectra",
        "600 s at 100 Hz": "stages",
    }
    assert [text for text in numbers if text not in html] == []
    shares = {
        name: float(share) for name, share in re.findall(r"(zero-phase|causal) (0\.\d+)\n", html)
    }
    assert shares["causal"] < 0.01 < 0.2 < shares["zero-phase"]
    losses = dict(re.findall(r"(next-previous(?:-strict)?) loss / variance (\d\.\d+)", html))
    assert float(losses["next-previous"]) < 0.95 < float(losses["next-previous-strict"])
    assert float(re.findall(r"difference of the three forms: ([\de-]+)", html)[0]) < 1e-12


@pytest.mark.slow
def test_every_page_can_be_reached_from_the_first(
    site: Path, pages: dict[Path, PageReader]
) -> None:
    links = {
        (site / urlsplit(address).path).resolve()
        for address in pages[site / "index.html"].links
        if not is_outside(address)
    }
    assert {path for path in pages if path.name != "404.html"} <= {
        p / "index.html" if p.is_dir() else p for p in links
    }
