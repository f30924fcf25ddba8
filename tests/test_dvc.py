"""dvc.yaml says what the code does: params sections, inputs and code files of each stage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stages.params import Params
from tools import dvc_deps

ROOT = Path(__file__).resolve().parents[1]
DVC = yaml.safe_load((ROOT / "dvc.yaml").read_text())
STAGES: dict[str, dict] = DVC["stages"]


@pytest.mark.parametrize("stage", STAGES)
def test_params_and_deps_are_those_of_the_code(stage: str) -> None:
    entry = STAGES[stage]
    expected = dvc_deps.expected(stage, entry["cmd"])
    mend = "run: python -m tools.dvc_deps --write"
    assert entry["params"] == expected["params"], mend
    assert entry["deps"] == expected["deps"], mend


@pytest.mark.parametrize("stage", STAGES)
def test_what_python_really_imports_is_a_dependency(stage: str) -> None:
    """The independent check of tools/dvc_deps.py: sys.modules after importing the command."""
    script = (
        f"import json, sys, stages.{stage}.__main__\n"
        "print(json.dumps([m.__file__ for n, m in sys.modules.items() if n.startswith('stages')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {Path(name) for name in json.loads(done.stdout.splitlines()[-1]) if name}
    loaded = {p for p in loaded if p.name != "__init__.py" or p.stat().st_size}
    assert loaded <= dvc_deps.reachable(stage, root=ROOT)


def test_modules_named_in_strings_are_dependencies() -> None:
    """vLLM loads the connector by name, in its own process: no import statement shows it."""
    assert "stages/serving/connector.py" in STAGES["extract"]["deps"]
    assert "stages/serving/worker.py" in STAGES["evaluate"]["deps"]


def test_every_section_of_params_is_read_by_a_stage() -> None:
    read = {section for entry in STAGES.values() for section in entry["params"]}
    assert read == set(Params.model_fields)


def test_the_drafters_shape_does_not_touch_extraction() -> None:
    for stage in ("target", "prepare", "generate", "extract"):
        assert not {"drafter", "train"} & set(STAGES[stage]["params"])


def test_no_output_switches_the_run_cache_off() -> None:
    assert all(isinstance(out, str) for entry in STAGES.values() for out in entry["outs"])


def test_the_command_of_a_stage_is_its_module() -> None:
    for stage, entry in STAGES.items():
        assert entry["cmd"].startswith(f"python -m stages.{stage} ")
        assert entry["cmd"].endswith(f" --out {entry['outs'][0]}")
