"""Pictures of an evaluation's report as a browser shows it: wide, in a narrow window, and dark.

    python -m tools.screenshots evaluation/report.html [--out docs]

Writes report-wide.png, report-narrow.png and report-dark.png, each below 400 kB, with the Chromium
or Chrome that is on PATH. Cost: about 10 s.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAX_BYTES = 400_000
MARGIN = 24  # pixels left below the page's last
TIMEOUT_S = 120


@dataclass(frozen=True)
class View:
    name: str
    width: int  # pixels, as the height, which is more than any report's
    height: int
    dark: bool


VIEWS = (
    View("wide", width=1200, height=8000, dark=False),
    View("narrow", width=390, height=16000, dark=False),
    View("dark", width=1200, height=8000, dark=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("report", type=Path, help="report.html of an evaluation")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    try:
        for path in take(arguments.report, out=arguments.out):
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    except ValueError as error:
        print(f"screenshots: error: {error}", file=sys.stderr)
        sys.exit(1)


def take(report: Path, *, out: Path) -> list[Path]:
    """Raises ValueError where there is no browser or no report, or where the browser fails."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise ValueError(
            f"none of {', '.join(BROWSERS)} is on PATH; on Debian: apt-get install chromium"
        )
    if not report.is_file():
        raise ValueError(f"{report}: no such file; evaluate writes it: dvc repro evaluate")
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for view in VIEWS:
        path = out / f"report-{view.name}.png"
        path.write_bytes(_compressed(_cropped(_photograph(report, view, browser=browser))))
        paths.append(path)
    return paths


def _photograph(report: Path, view: View, *, browser: str) -> Image.Image:
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "picture.png"
        command = [
            *(browser, "--headless=new", "--disable-gpu", "--hide-scrollbars"),
            *(f"--user-data-dir={folder}/profile", f"--screenshot={picture}"),
            f"--window-size={view.width},{view.height}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # Chromium refuses root otherwise
            *(["--blink-settings=preferredColorScheme=0"] if view.dark else []),
            report.resolve().as_uri(),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{browser} took more than {TIMEOUT_S} s") from None
        if not picture.is_file():
            raise ValueError(f"{browser} took no picture (exit {done.returncode}): {done.stderr}")
        with Image.open(picture) as image:
            return image.convert("RGB")


def _cropped(image: Image.Image) -> Image.Image:
    """Without the empty part below the page. Raises ValueError where the page reaches the end."""
    page = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    box = ImageChops.difference(image, page).getbbox()
    if box is None or box[3] > image.height - MARGIN:
        raise ValueError("the page is empty, or longer than the window; mend tools/screenshots.py")
    return image.crop((0, 0, image.width, box[3] + MARGIN))


def _compressed(image: Image.Image) -> bytes:
    """PNG with as many colours as MAX_BYTES allows."""
    for num_colours in (256, 128, 64, 32):
        buffer = io.BytesIO()
        _reduced(image, num_colours=num_colours).save(buffer, "PNG", optimize=True)
        if buffer.tell() < MAX_BYTES:
            return buffer.getvalue()
    raise ValueError(f"32 colours take {buffer.tell()} bytes; {MAX_BYTES} are allowed")


def _reduced(image: Image.Image, *, num_colours: int) -> Image.Image:
    """Half of the colours are the most frequent ones, exactly: Pillow's palettes alone tint grey
    lines. The others are spread over what is left, so that no line of a chart loses its own."""
    packed = np.asarray(image.convert("RGBX")).view(np.uint32).ravel()  # a number a colour
    codes, places, counts = np.unique(packed, return_inverse=True, return_counts=True)
    colours = np.ascontiguousarray(codes.view(np.uint8).reshape(-1, 4)[:, :3])
    order = np.argsort(-counts, kind="stable")
    frequent, rest = colours[order[: num_colours // 2]], colours[order[num_colours // 2 :]]
    palette = frequent
    if len(rest):
        spread = Image.fromarray(rest[None]).quantize(
            num_colours // 2, method=Image.Quantize.MAXCOVERAGE
        )
        palette = np.vstack([frequent, np.array(spread.getpalette(), np.uint8).reshape(-1, 3)])
    squares = (colours[:, None].astype(int) - palette[None]) ** 2
    nearest = squares.sum(axis=2).argmin(axis=1).astype(np.uint8)
    few = Image.fromarray(nearest[places.reshape(image.height, image.width)], mode="P")
    few.putpalette(palette.tobytes())
    return few


if __name__ == "__main__":
    main()
