"""Figures as SVG: small, reproducible bytes, inline in the page's colours or as separate files."""

from __future__ import annotations

import base64
import io
import math
import re
import warnings
import xml.etree.ElementTree as ET

import numpy as np

from bitimely_core.page import Figure
from bitimely_core.report.figures import COLOURS, DRAWERS, STYLE

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"


def draw_figure(figure: Figure, name: str = "figure") -> tuple[ET.Element, str]:
    """A figure as an SVG tree, and a note for its caption. No global state, no display,
    reproducible bytes.

    `name` makes the ids unique in the page.
    """
    import matplotlib

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing glyphs: the reader's font draws them
        drawn = DRAWERS[type(figure.data)](figure.data)
        canvas, note = drawn if isinstance(drawn, tuple) else (drawn, "")
        out = io.BytesIO()
        absent = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas.savefig(out, format="svg", bbox_inches="tight", pad_inches=0.02, metadata=absent)
    return clean_svg(ET.fromstring(out.getvalue()), name), note  # noqa: S314  # drawn here


def clean_svg(svg: ET.Element, name: str) -> ET.Element:
    """The tree without unused ids, style sheets and digits below a tenth of a point; images with a
    palette.
    """
    for parent in list(svg.iter()):
        for child in list(parent):
            tag = child.tag.rpartition("}")[2]
            if tag in {"metadata", "style"}:
                parent.remove(child)
    used = set()
    for element in svg.iter():
        for value in element.attrib.values():
            used |= set(re.findall(r"url\(#([^)]+)\)", value)) | (
                {value[1:]} if value.startswith("#") else set()
            )
    for element in svg.iter():
        for key, value in list(element.attrib.items()):
            plain = key.rpartition("}")[2]
            if plain == "id":
                if value in used:
                    element.set(key, f"{name}-{value}")
                else:
                    del element.attrib[key]
            elif value.startswith("#"):
                element.set(key, f"#{name}-{value[1:]}")
            elif "url(#" in value:
                element.set(key, value.replace("url(#", f"url(#{name}-"))
            elif plain == "href" and value.startswith("data:image/png"):
                element.set(key, _shrink_png(value))
            elif plain in {"d", "points"}:
                element.set(
                    key,
                    " ".join(
                        re.sub(
                            r"-?\d+\.\d+", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), value
                        ).split()
                    ),
                )
            elif plain in {"x", "y"}:
                element.set(key, f"{float(value):.2f}")
            elif plain == "transform":
                element.set(key, re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.2f}", value))
            elif plain == "style":
                element.set(key, re.sub(r"font-family: [^;]*;?", "", value).strip())
    for element in svg.iter():
        element.text = element.text if element.text and element.text.strip() else None
        element.tail = None
    return svg


def _shrink_png(link: str) -> str:
    """A PNG of at most 256 colours with a palette instead of four channels."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2]))).convert("RGB")
    pixels = np.asarray(picture)
    colours, index = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True)
    if len(colours) > 256:
        return link
    small = Image.fromarray(index.reshape(pixels.shape[:2]).astype(np.uint8), mode=None)
    small = small.convert("P") if small.mode != "P" else small
    small.putpalette(colours.astype(np.uint8).tobytes())
    out = io.BytesIO()
    small.save(
        out, format="PNG", optimize=True, bits=max(1, math.ceil(math.log2(max(len(colours), 2))))
    )
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def export_svg(svg: ET.Element) -> bytes:
    """The figure as a separate file, in the light colours."""
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", XLINK)
    root = ET.fromstring(ET.tostring(svg))  # noqa: S314  # a copy
    root.set("font-family", "DejaVu Sans, Helvetica, Arial, sans-serif")
    return ET.tostring(root, encoding="utf-8", xml_declaration=True)


def inline_svg(svg: ET.Element, label: str) -> str:
    """The figure as part of the page, with its colour variables and font."""
    root = ET.fromstring(ET.tostring(svg))  # noqa: S314  # a copy
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key, value in list(element.attrib.items()):
            plain = key.rpartition("}")[2]
            if plain != key:
                del element.attrib[key]
            if plain == "style":
                for name, (light, _) in COLOURS.items():
                    value = value.replace(light, f"var(--{name})")
            element.set(plain, value)
    points = float(root.get("viewBox", "0 0 540 0").split()[2])
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    if points < 500:  # small drawings keep their size
        root.set(
            "style", f"max-width:{points / 540 * 56:.1f}rem;min-width:{points / 540 * 46:.1f}rem"
        )
    root.set("role", "img")
    root.set("aria-label", label)
    return ET.tostring(root, encoding="unicode")
