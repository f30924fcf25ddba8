"""A checkout in small: git, DVC and three quick stages, run by the real DVC, Prefect and MLflow."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGE = """\
import pathlib, sys
name, params, source, out = sys.argv[1:]
if (pathlib.Path("fail")).exists() and name == "second":
    sys.exit("second: error: told to fail")
folder = pathlib.Path(out)
folder.mkdir(parents=True, exist_ok=True)
body = [line for line in open("params.yaml") if line.startswith(params + ":")]
(folder / "manifest.json").write_text(name + "".join(body) + pathlib.Path(source).read_text())
with open("journal.txt", "a") as journal:
    journal.write(name + "\\n")
"""
# Written in another order than they run in: DVC's graph decides.
DVC_YAML = """\
stages:
  third:
    cmd: python stage.py third c out/second/manifest.json out/third
    params: [c]
    deps: [out/second]
    outs: [out/third]
  first:
    cmd: python stage.py first a stage.py out/first
    params: [a]
    outs: [out/first]
  second:
    cmd: python stage.py second b out/first/manifest.json out/second
    params: [b]
    deps: [out/first]
    outs: [out/second]
"""


@pytest.fixture
def small_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with stages first -> second -> third; journal.txt lists what ran."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, check=True, capture_output=True)
    shutil.copy(ROOT / ".dvc" / "config", tmp_path / ".dvc" / "config")
    (tmp_path / "stage.py").write_text(STAGE)
    (tmp_path / "params.yaml").write_text("a: 1\nb: 1\nc: 1\n")
    (tmp_path / "dvc.yaml").write_text(DVC_YAML)
    return tmp_path
