"""Pictures of a report: refused with a reason, whole, and small enough to be committed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from tools import screenshots

BROWSER = any(map(shutil.which, screenshots.BROWSERS))


def test_without_a_browser_it_says_which_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"none of chromium, .* is on PATH"):
        screenshots.take(tmp_path / "report.html", out=tmp_path)


@pytest.mark.skipif(not BROWSER, reason="no Chromium on PATH")
def test_without_a_report_it_says_who_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dvc repro evaluate"):
        screenshots.take(tmp_path / "report.html", out=tmp_path)


@pytest.mark.skipif(not BROWSER, reason="no Chromium on PATH")
def test_three_pictures_end_where_the_page_ends(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(
        "<style>body { margin: 0 } p { margin: 0; height: 300px; background: teal }"
        "@media (prefers-color-scheme: dark) { body { background: black } }</style><p></p>"
        "<div style='height: 50px'></div><p></p>"
    )
    shapes, corners = {}, {}
    for path in screenshots.take(page, out=tmp_path / "docs"):
        assert path.stat().st_size < screenshots.MAX_BYTES
        with Image.open(path) as image:
            shapes[path.name] = image.size
            corners[path.name] = image.convert("RGB").getpixel((5, image.height - 5))
    end = 300 + 50 + 300 + screenshots.MARGIN
    assert shapes == {
        "report-wide.png": (1200, end),
        "report-narrow.png": (390, end),
        "report-dark.png": (1200, end),
    }
    assert corners["report-wide.png"] == (255, 255, 255)
    assert corners["report-dark.png"] == (0, 0, 0)
