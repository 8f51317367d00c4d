"""Figures as SVG: small, reproducible bytes, inline in the page's colours or as separate files."""

from __future__ import annotations

import base64
import copy
import io
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable

import numpy as np

import bitimely_core.report.point_figure  # noqa: F401  # register
from bitimely_core.page import Figure, HeatMap
from bitimely_core.report import figures, figures_in_time, night_figure  # noqa: F401  # register
from bitimely_core.report.canvas import COLOURS, STYLE, draw_data
from bitimely_core.report.plain_figures import draw_plain
from bitimely_core.report.plain_matrices import describe_matrix

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
FULL_WIDTH = 540.0  # points of a drawing that fills the column of the page
REFERENCE = re.compile(r'(?:url\(|=")#([^")]+)')  # an attribute is `#id` or holds `url(#id)`
FRACTION = re.compile(r"-?\d+\.\d+")


def draw_figure(figure: Figure, name: str = "figure") -> tuple[ET.Element, str]:
    """A figure as an SVG tree, and a note for its caption. No global state, no display,
    reproducible bytes.

    `name` makes the ids unique in the page.
    """
    note = describe_matrix(figure.data) if isinstance(figure.data, HeatMap) else ""
    plain = draw_plain(figure.data)
    if plain is not None:
        return plain, note
    import matplotlib

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing glyphs: the reader's font draws them
        out = io.BytesIO()
        absent = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas = draw_data(figure.data)
        canvas.savefig(out, format="svg", bbox_inches="tight", pad_inches=0.02, metadata=absent)
    svg = ET.fromstring(out.getvalue())  # noqa: S314  # drawn here
    return clean_svg(svg, name), note


def _read_local_name(name: str) -> str:
    """The name of an element or attribute without its namespace."""
    return name.rpartition("}")[2]


def clean_svg(svg: ET.Element, name: str) -> ET.Element:
    """The tree without unused ids, style sheets and digits below a tenth of a point; images with a
    palette. Ids that are used begin with `name`.
    """
    for parent in list(svg.iter()):
        for child in list(parent):
            if _read_local_name(child.tag) in {"metadata", "style"}:
                parent.remove(child)
    used = set(REFERENCE.findall(ET.tostring(svg, encoding="unicode")))
    for element in svg.iter():
        element.tail = None
        if not (element.text or "").strip():
            element.text = None
        for key, value in list(element.attrib.items()):
            attribute = _read_local_name(key)
            if attribute == "id" and value not in used:
                del element.attrib[key]
            else:
                element.set(key, _clean_attribute(attribute, value, name))
    return svg


def _clean_attribute(attribute: str, value: str, name: str) -> str:
    """The value of an attribute: references with the prefix `name`, anything else shortened."""
    if attribute == "id":
        return f"{name}-{value}"
    if value.startswith("#"):
        return f"#{name}-{value[1:]}"
    if "url(#" in value:
        return value.replace("url(#", f"url(#{name}-")
    return SHORTENERS.get(attribute, str)(value)


def _shorten_path(path: str) -> str:
    """Points in tenths, without line breaks."""
    rounded = FRACTION.sub(lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), path)
    return " ".join(rounded.split())


def _shorten_png(link: str) -> str:
    """A data link with a PNG of at most 256 colours by a palette instead of four channels; any
    other link as it is.
    """
    from PIL import Image

    if not link.startswith("data:image/png"):
        return link
    picture = Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2]))).convert("RGB")
    pixels = np.asarray(picture)
    colours, index = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True)
    if len(colours) > 256:
        return link
    small = Image.fromarray(index.reshape(pixels.shape[:2]).astype(np.uint8)).convert("P")
    small.putpalette(colours.astype(np.uint8).tobytes())
    out = io.BytesIO()
    bits = max(1, (len(colours) - 1).bit_length())
    small.save(out, format="PNG", optimize=True, bits=bits)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


# attribute -> how its value gets shorter
SHORTENERS: dict[str, Callable[[str], str]] = {
    "d": _shorten_path,
    "points": _shorten_path,
    "x": lambda value: f"{float(value):.2f}",
    "y": lambda value: f"{float(value):.2f}",
    "transform": lambda value: FRACTION.sub(lambda match: f"{float(match[0]):.2f}", value),
    "style": lambda value: re.sub(r"font-family: [^;]*;?", "", value).strip(),
    "href": _shorten_png,
}


def export_svg(svg: ET.Element) -> bytes:
    """The figure as a separate file, in the light colours."""
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", XLINK)
    root = copy.deepcopy(svg)
    root.set("font-family", "DejaVu Sans, Helvetica, Arial, sans-serif")
    return ET.tostring(root, encoding="utf-8", xml_declaration=True)


def inline_svg(svg: ET.Element, label: str) -> str:
    """The figure as part of the page, with its colour variables and font."""
    root = copy.deepcopy(svg)
    for element in root.iter():
        element.tag = _read_local_name(element.tag)
        for key in [key for key in element.attrib if key.startswith("{")]:
            element.set(_read_local_name(key), element.attrib.pop(key))
        if style := element.get("style"):
            for name, (light, _) in COLOURS.items():
                style = style.replace(light, f"var(--{name})")
            element.set("style", style)
    points = float(root.get("viewBox", f"0 0 {FULL_WIDTH} 0").split()[2])
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    if points < 500:  # small drawings keep their size
        share = points / FULL_WIDTH
        root.set("style", f"max-width:{share * 56:.1f}rem;min-width:{share * 46:.1f}rem")
    root.set("role", "img")
    root.set("aria-label", label)
    return ET.tostring(root, encoding="unicode")
