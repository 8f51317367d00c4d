"""The pictures of docs/images, from the demonstration: `python docs/pictures.py`, some minutes.

It needs Chromium, which photographs the page of scores; the figures of the site are those of
`make gallery`, the tables of analyses those of `python docs/analyses.py`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

IMAGES = Path(__file__).parent / "images"
BROWSER = ("chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,900")


def main() -> None:
    """Run the demonstration, and keep its first night and the page of the model that stages it."""
    with TemporaryDirectory() as folder:
        made = Path(folder, "demo")
        verb = f"from bitimely_cli.main import main; main(['demo', '--out', {str(made)!r}])"
        subprocess.run([sys.executable, "-c", verb], check=True)
        shutil.copyfile(made / "night" / "SYN001" / "night.svg", IMAGES / "night.svg")
        page = made / "runs" / "features-staging" / "report.html"
        picture = f"--screenshot={IMAGES / 'report.png'}"
        subprocess.run([*BROWSER, picture, page.as_uri()], check=True)


if __name__ == "__main__":
    main()
