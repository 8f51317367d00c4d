"""How high a page is on a screen 1,440 pixels wide as long as nothing is opened, from its HTML and the
sizes of its style: `python tests/page_height.py FILE...`. No browser is needed; the estimate is high
rather than low.
"""

from __future__ import annotations

import math
import sys
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "input", "br", "img", "polyline", "rect", "path", "use"}
SHOWN = 576  # pixels of a long table, behind which it scrolls
# class or tag -> characters of a line, pixels of a line, pixels around the text
TEXTS = {
    "h1": (48, 41, 20),
    "verdict": (78, 31, 24),
    "notices": (95, 26, 48),
    "summary": (95, 24, 20),
    "h2": (60, 32, 68),
    "h3": (90, 24, 48),
    "figcaption": (105, 21, 12),
    "caption": (105, 21, 12),
    "p": (88, 27, 24),
}
FIXED = {"row": 30, "ticks": 20, "value": 64, "dt": 18, "dd": 38, "eyebrow": 60}


class OpenHeight(HTMLParser):
    """Adds up the heights of what is not folded."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[tuple[str, str]] = []
        self.height = 100.0  # margins of the page
        self.table = 0.0
        self.text = ""
        self.rows = 0  # of open tables

    def is_open(self) -> bool:
        """Whether nothing around the present place is folded, but for its own summary."""
        for k, (tag, kind) in enumerate(self.stack):
            if tag == "details" and kind != "open":
                inner = [name for name, _ in self.stack[k + 1 :]]
                if inner[:1] != ["summary"]:
                    return False
        return True

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        kind = "open" if "open" in values else (values.get("class") or "").split(" ")[0]
        if tag in VOID:
            return
        self.stack.append((tag, kind))
        if not self.is_open() or self.is_inside("svg", 1):
            return
        if tag == "table":
            self.table = 40.0
        if tag == "tr" and self.is_inside("tbody"):
            self.table += 44
            self.rows += 1
        if tag == "svg" and not self.is_inside("table"):
            self.height += measure_drawing(values.get("viewbox")) if self.is_inside("figure") else 0
        self.height += FIXED.get(kind, FIXED.get(tag, 0))
        if kind in TEXTS or tag in TEXTS:
            self.text = ""

    def is_inside(self, tag: str, last: int = 0) -> bool:
        """Whether the present place is in an element, without the innermost `last`."""
        return tag in [name for name, _ in self.stack[: len(self.stack) - last]]

    def handle_data(self, data: str) -> None:
        if self.is_open():
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID or tag not in [name for name, _ in self.stack]:
            return
        while self.stack:
            name, kind = self.stack[-1]
            if name == tag and self.is_open():
                self.close(tag, kind)
            self.stack.pop()
            if name == tag:
                break

    def close(self, tag: str, kind: str) -> None:
        """Add an element that is complete."""
        if tag == "table":
            self.height += min(self.table, SHOWN) + 24
        if self.is_inside("table", 1) or self.is_inside("svg") or self.is_inside("summary", 1):
            return
        size = TEXTS.get(kind) or TEXTS.get(tag)
        if size and self.text.strip():
            width, line, around = size
            self.height += around + line * math.ceil(len(" ".join(self.text.split())) / width)
            self.text = ""


def measure_drawing(box: str | None) -> float:
    """The height of a drawing in a column of 848 pixels, from its own size in points."""
    points = float((box or "0 0 0 0").split()[3])
    return points * 56 * 16 / 540


def measure(html: str) -> OpenHeight:
    """The page as it opens."""
    parser = OpenHeight()
    parser.feed(html[html.index("<body>") : html.index("<script>")])
    return parser


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = measure(Path(name).read_text("utf-8"))
        print(f"{page.height:6.0f} px, {page.rows:3d} rows: {name}")
