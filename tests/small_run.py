"""Settings files in a folder, and the stages extract and train run there as a user's commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

from stages.extract import stage as extract_stage
from stages.params import Params, Services

PROJECT = Path(__file__).resolve().parents[1]
TRAIN_TIMEOUT_S = 300


def start_train(folder: Path, target: Path) -> subprocess.Popen[bytes]:
    """Trains on folder/states into folder/drafter, in a process (and group) of its own: the stage
    sets torch's threads."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "stages.train", "--target", str(target)),
            *("--hidden-states", "states", "--out", "drafter"),
        ],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        cwd=folder,
        start_new_session=True,
    )


def write_settings(folder: Path, params: Params, services: Services) -> None:
    """params.yaml and services.yaml in the folder."""
    for name, settings in {"params.yaml": params, "services.yaml": services}.items():
        # JSON is YAML
        (folder / name).write_text(json.dumps(settings.model_dump(mode="json")))


def extract_and_train(
    folder: Path, params: Params, services: Services, *, target: Path, conversations: Path
) -> None:
    """Leaves folder/states, unless they are there, and folder/drafter."""
    write_settings(folder, params, services)
    with chdir(folder):
        if not Path("states").exists():
            extract_stage.run(
                engine=params.engine,
                extract=params.extract,
                services=services,
                target=target,
                conversations=conversations,
                out=Path("states"),
            )
    training = start_train(folder, target)
    try:
        assert training.wait(TRAIN_TIMEOUT_S) == 0
    finally:
        training.kill()
        training.wait()
