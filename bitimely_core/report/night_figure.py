"""A night as laboratories look at it: spectrogram, hypnogram and hypnodensity on one time axis.

Legend: E epochs, F frequencies.
"""

from __future__ import annotations

import base64
import io
import math
import xml.etree.ElementTree as ET

import numpy as np

from bitimely_core.page import NightPlot
from bitimely_core.report.canvas import COLUMNS
from bitimely_core.report.numbers import Array, stage_indices
from bitimely_core.report.page_text import clean_text
from bitimely_core.report.plain_figures import (
    BELOW,
    PAD,
    STOP,
    SVG,
    Frame,
    Tick,
    add_density,
    add_track,
    add_x_axis,
    add_y_axis,
    choose_unit,
    draw_plain,
    list_runs,
    list_ticks,
    start_drawing,
)

PANEL = 100.0  # points, height of each part
GAP = 12.0
START = 40.0  # left end of the time axis
DAY = 86_400.0
MOST_HOURS = 9  # that are named
SHADES = 63
# dark to bright, evenly spaced in lightness (magma)
MAGMA = ["000004", "1c1044", "4f127b", "812581", "b5367a", "e55964", "fb8761", "fec287", "fcfdbf"]


@draw_plain.register(NightPlot)
def _draw_night(data: NightPlot) -> ET.Element:
    """The parts below each other, the spectrogram where there is one."""
    density, spectrogram = data.density, data.spectrogram
    length = len(density.values) * density.epoch
    unit = choose_unit(length)
    span = (0.0, length / unit.seconds)
    tops = [PAD + place * (PANEL + GAP) for place in range(2 if spectrogram is None else 3)]
    svg = start_drawing(tops[-1] + PANEL + BELOW)
    if spectrogram is not None:
        band = (float(spectrogram.frequencies[0]), float(spectrogram.frequencies[-1]))
        frame = Frame(START, STOP, tops[0], tops[0] + PANEL, span, band)
        _add_spectrogram(svg, frame, spectrogram.power)
        add_y_axis(svg, frame, list_ticks(*band, 5), f"{clean_text(spectrogram.channel, 12)} (Hz)")
    stages = stage_indices(data.track, density.classes)
    heights = (0.6 - len(density.classes), 0.6)
    frame = Frame(START, STOP, tops[-2], tops[-2] + PANEL, span, heights)
    add_track(svg, frame, list_runs(stages, density.epoch, unit), density.classes)
    frame = Frame(START, STOP, tops[-1], tops[-1] + PANEL, span, (0.0, 1.0))
    add_density(svg, frame, density)
    add_y_axis(svg, frame, list_ticks(0.0, 1.0, 3), "probability")
    if data.clock is None:
        add_x_axis(svg, frame, list_ticks(*span, 9), f"{unit.name} from the start")
    else:
        add_x_axis(svg, frame, list_hours(data.clock, length, unit.seconds), "time of day")
    return svg


def list_hours(clock: float, length: float, unit: float) -> list[Tick]:
    """Full hours, or quarters, of a recording of `length` seconds that begins `clock` seconds after
    midnight; their places are in units of `unit` seconds.
    """
    step = 3600.0 * math.ceil(length / 3600 / MOST_HOURS) if length > 7200 else 900.0
    times = np.arange(math.ceil(clock / step) * step, clock + length, step)
    return [Tick((time - clock) / unit, _format_clock(time)) for time in times.tolist()]


def _format_clock(seconds: float) -> str:
    """`23:30`."""
    minutes = round(seconds % DAY / 60)
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def _add_spectrogram(svg: ET.Element, frame: Frame, power: Array) -> None:
    """Power [E, F] as an image; its colours reach from the 2nd to the 98th percentile."""
    from PIL import Image

    size = max(1, -(-len(power) // COLUMNS))
    blocks = [power[start : start + size] for start in range(0, len(power), size)]
    columns = np.array([block[len(block) // 2] for block in blocks])
    seen = columns[np.isfinite(columns)]
    low, high = np.percentile(seen, [2, 98]) if seen.size else (0.0, 1.0)
    shares = np.clip((columns - low) / ((high - low) or 1.0), 0.0, 1.0)
    shades = np.where(np.isfinite(shares), 1 + np.rint(np.nan_to_num(shares) * (SHADES - 1)), 0)
    picture = Image.fromarray(shades.T[::-1].astype(np.uint8)).convert("P")
    picture.putpalette(_list_colours().tobytes())
    out = io.BytesIO()
    picture.save(out, format="PNG", optimize=True, bits=6, transparency=0)
    link = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    place = {"x": f"{frame.start:g}", "y": f"{frame.top:g}", "preserveAspectRatio": "none"}
    size_of = {"width": f"{frame.stop - frame.start:g}", "height": f"{frame.bottom - frame.top:g}"}
    ET.SubElement(svg, f"{{{SVG}}}image", {**place, **size_of, "href": link, "class": "photo"})


def _list_colours() -> Array:
    """White, which is transparent, then the shades: [1 + SHADES, 3] uint8."""
    anchors = np.array([list(bytes.fromhex(colour)) for colour in MAGMA])
    places = np.linspace(0, len(MAGMA) - 1, SHADES)
    shades = [np.interp(places, np.arange(len(MAGMA)), channel) for channel in anchors.T]
    return np.vstack([[255, 255, 255], np.rint(np.column_stack(shades))]).astype(np.uint8)
