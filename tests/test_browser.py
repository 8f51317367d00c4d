"""A page of every kind of analysis in headless Chromium: nothing on the console, nothing from the
network, all figures, sorting, legible.
"""

import html
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import planted
import pytest
import test_saliency
import torch
from test_shapelets import Labelled

from bitimely_core import registry, report
from bitimely_core.analyses.augmentation import augmentation
from bitimely_core.analyses.calibration import calibration
from bitimely_core.analyses.embedding import embedding
from bitimely_core.analyses.leakage import leakage
from bitimely_core.analyses.probing import probing
from bitimely_core.config import Settings
from bitimely_core.insight.attention import attention
from bitimely_core.insight.complexity import complexity
from bitimely_core.insight.saliency import saliency
from bitimely_core.insight.shapelets import shapelets
from bitimely_core.insight.svd import svd

HOSTILE = "<img src=http://evil.example/x onerror=alert(1)>"
WIDTHS = (1440, 390)  # pixels
HIGHEST = 4000  # pixels of a page as it opens, at the larger width
SMALLEST = 8.5  # pixels of a letter's size, of the page's text and of the drawings'
LOOK = """
<script>addEventListener('load', async () => {
  const opens = document.documentElement.scrollHeight;
  for (const fold of document.querySelectorAll('details')) fold.open = true;
  const sizes = [...document.querySelectorAll('svg text')].filter(t => t.textContent.trim()).map(
    t => parseFloat(getComputedStyle(t).fontSize) * Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b));
  const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT), plain = [];
  while (walker.nextNode()) {
    const of = walker.currentNode.parentElement;
    if (walker.currentNode.data.trim() && of.getClientRects().length && !of.closest('svg,script,style,sub,sup'))
      plain.push(parseFloat(getComputedStyle(of).fontSize));
  }
  const order = t => [...t.tBodies[0].rows].map(r => (r.cells[1] || r.cells[0]).dataset.v || (r.cells[1] || r.cells[0]).textContent);
  const sorted = [...document.querySelectorAll('table')].filter(t => t.tHead && t.tHead.querySelector('button')).map(t => {
    const button = t.tHead.querySelectorAll('button')[1] || t.tHead.querySelector('button');
    button.click();
    const up = order(t);
    const marked = t.querySelectorAll('[aria-sort=ascending]').length;
    button.click();
    return [up, order(t), marked];
  });
  parent.postMessage({
    name: NAME, width: innerWidth, opens, overflow: document.documentElement.scrollWidth - innerWidth,
    drawn: document.querySelectorAll('figure svg, .forest').length, least: Math.min(...sizes, 99), plain: Math.min(...plain), sorted,
    fetched: performance.getEntriesByType('resource').map(r => r.name), images: document.querySelectorAll('img').length,
  }, '*');
});</script>
"""
FRAME = """<!doctype html><meta charset="utf-8"><body><script>
addEventListener('message', e => { const p = document.createElement('pre'); p.textContent = JSON.stringify(e.data); document.body.append(p); });
</script>{frames}</body>"""


def signals(**options):
    """Windows with a planted wave, half of the twelve subjects held out, and names that must not be
    believed.
    """
    windows = Labelled(n=120, subjects=12, **options)
    windows.of_split = np.where(np.isin(windows.who, [f"s{k}" for k in range(6)]), "test", "train")
    windows.channel_names, windows.class_names = (HOSTILE,), (f"a{HOSTILE}", "b")
    return windows


def rows():
    """Windows that probes read, with the same names."""
    windows = planted.classes(n_subjects=16, each=20)
    windows.cuts, windows.class_names, windows.channel_names = (
        (0.4, 0.6),
        (f"a{HOSTILE}", "b"),
        (HOSTILE,),
    )
    return windows


def build_pages():
    """One page a kind, from runs that were never trained."""
    one = signals()
    pair = [test_saliency.run(windows=one), test_saliency.run("timelybert", one)]
    head = SimpleNamespace(
        readout="sos",
        context=None,
        layers="last",
        to=lambda place: head,
        eval=lambda: head,
        predict=lambda b: torch.cat((-b.values[:, 0], b.values[:, 0]), 1).softmax(1),
    )
    tuned = planted.run(rows(), head, "tuned")
    few = {"bootstrap": 50}
    yield "shapelets", shapelets(one, lengths="1", candidates=100, permutations=30)
    yield "saliency", saliency(pair, sequences=12, lengths="1", masks=2, **few)
    yield "attention", attention(pair, windows=12, lengths="1", **few)
    yield "svd", svd(pair, sequences=2)
    yield "probing", probing([tuned], readouts="sos,eos,mean", **few)
    yield "calibration", calibration([tuned], **few)
    yield "embedding", embedding([tuned], neighbours=3, **few)
    settings = Settings.model_validate({"finetune": {"augment": ["gain"]}})
    loud = planted.run(rows(), head, "loud", settings=settings)
    yield "augmentation", augmentation([loud], sequences=2)
    yield "complexity", complexity(None, lengths="16,32", rounds=2)
    yield "leakage", leakage(None, model="bitimelygpt", objective="next-previous", steps=3)


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """Kind -> page and its report.html."""
    folder = tmp_path_factory.mktemp("pages")
    return {kind: (page, report.write_report(folder / kind, page)) for kind, page in build_pages()}


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """Opens a file and returns its document as it stands after loading, and what was written to the
    console.
    """
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser is None:
        pytest.skip("no chromium on this machine")

    def opened(file):
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--enable-logging=stderr",
            "--dump-dom",
        ]
        options += [
            "--window-size=1400,900",
            "--virtual-time-budget=20000",
            f"--user-data-dir={tmp_path_factory.mktemp('home')}",
        ]
        done = subprocess.run(
            [browser, *options, f"file://{file}"], capture_output=True, timeout=120, check=False
        )
        return done.stdout.decode(), done.stderr.decode()

    return opened


def framed(folder, files, name):
    """A page of frames, each of one of the files and widths."""
    frames = "".join(
        f'<iframe src="file://{file}" width="{width}" height="900"></iframe>'
        for file in files
        for width in WIDTHS
    )
    path = folder / f"{name}.html"
    path.write_text(FRAME.replace("{frames}", frames), "utf-8")
    return path


@pytest.mark.slow
def test_every_kind_has_a_page(pages):
    assert set(pages) == set(registry.analyses)
    for kind, (_, path) in pages.items():
        assert path.stat().st_size < report.LIMIT, kind
        assert HOSTILE not in path.read_text("utf-8"), kind


@pytest.mark.slow
def test_pages_log_nothing_to_the_console(pages, chromium, tmp_path):
    _, console = chromium(framed(tmp_path, [path for _, path in pages.values()], "as-they-are"))
    assert "CONSOLE" not in console, console[-3000:]


@pytest.mark.slow
def test_pages_fetch_nothing_show_all_figures_and_sort(pages, chromium, tmp_path):
    """On copies without the page's policy, which would forbid the script that looks, and would hide
    what is fetched.
    """
    copies = []
    for kind, (_, path) in pages.items():
        raw = re.sub(
            r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text("utf-8")
        )
        copies.append(tmp_path / f"{kind}.html")
        copies[-1].write_text(
            raw.replace("</body>", LOOK.replace("NAME", json.dumps(kind)) + "</body>"), "utf-8"
        )
    dom, console = chromium(framed(tmp_path, copies, "looked-at"))
    found = [
        json.loads(html.unescape(text)) for text in re.findall(r"<pre>(.*?)</pre>", dom, flags=re.S)
    ]
    assert "CONSOLE" not in console, console[-3000:]
    assert {(one["name"], one["width"]) for one in found} == {
        (kind, width) for kind in pages for width in WIDTHS
    }
    for one in found:
        path = pages[one["name"]][1]
        where = f"{one['name']} at {one['width']} px"
        assert one["fetched"] == [], where
        assert one["images"] == path.read_text("utf-8").count("<img"), where  # a label is not one
        assert one["overflow"] <= 0, where
        assert one["opens"] <= HIGHEST, where
        assert one["drawn"] >= len(list(path.parent.glob("*.svg"))) > 0, where
        assert one["least"] >= SMALLEST, where
        assert one["plain"] >= 12, where
        assert one["sorted"], where
        for up, down, marked in one["sorted"]:
            assert marked == 1, where
            assert sorted(up) == sorted(down), where
            assert up == down[::-1] or len(set(up)) < len(up) or any(v in {"", "–"} for v in up), (
                where
            )
