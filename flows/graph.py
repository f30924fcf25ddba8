"""DVC's own view of the DAG: its stages in its order, and one stage at a time.

dvc.yaml is the only place that describes the DAG; nothing here names a stage.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dvc.repo import Repo

Outcome = Literal["ran", "restored", "unchanged"]
"""restored: an earlier result with the same params and inputs, from DVC's run cache."""


class StageError(ValueError):
    """A stage's command failed, or another DVC command holds the checkout."""


def stages_in_order(root: Path = Path()) -> list[str]:
    """The stages of dvc.yaml in the order in which `dvc repro` runs them."""
    from dvc.repo.reproduce import get_active_graph, plan_repro
    from dvc.repo.stage import PROJECT_FILE

    with _repo(root) as (repo, _):
        stages = list(repo.stage.collect(PROJECT_FILE))
        return [stage.name for stage in plan_repro(get_active_graph(repo.index.graph), stages)]


def up_to_date(root: Path = Path()) -> bool:
    """True where `dvc repro` would do nothing."""
    with _repo(root) as (repo, _):
        return not repo.status()


def reproduce(stage: str, *, environment: Mapping[str, str], root: Path = Path()) -> Outcome:
    """Brings exactly one stage up to date; its output goes to this process's stdout and stderr.

    `environment` is added to what the command inherits. Raises StageError.
    """
    from dvc.exceptions import DvcException, ReproductionError
    from dvc.stage.exceptions import StageCmdFailedError

    try:
        with _repo(root) as (repo, commands):
            changed = repo.reproduce(
                [stage], single_item=True, run_env={**_with_this_python(), **environment}
            )
    except ReproductionError as error:
        cause = error.__cause__
        if isinstance(cause, StageCmdFailedError):
            raise StageError(
                f"stage {stage} failed; its own message is above. Run again to resume it"
            ) from None
        raise StageError(f"stage {stage}: DVC could not reproduce it: {cause or error}") from None
    except DvcException as error:
        raise StageError(f"stage {stage}: DVC: {error}") from None
    return "unchanged" if not changed else "ran" if commands else "restored"


def link_outputs(root: Path = Path()) -> None:
    """Replaces outputs that a run left as copies by links into DVC's cache.

    Costs a stat a file where nothing is to do.
    """
    with _repo(root) as (repo, _):
        folders = [Path(out.fs_path) for out in repo.index.outs if out.use_cache]
        if any(_is_copy(path) for folder in folders for path in folder.rglob("*")):
            repo.checkout(relink=True)


def _is_copy(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    status = path.stat()
    return status.st_nlink == 1 and status.st_size > 0  # DVC never links empty files


def _with_this_python() -> dict[str, str]:
    """PATH on which `python`, as dvc.yaml says it, is the interpreter that runs this."""
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


class _Commands(logging.Handler):
    """Collects what DVC says when it starts a stage's command."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.started: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("Running stage"):
            self.started.append(record.getMessage())


@contextmanager
def _repo(root: Path) -> Iterator[tuple[Repo, list[str]]]:
    """DVC's repository, and the commands that it has started: its log alone tells that.

    DVC is quiet meanwhile. It would warn of every lock of a killed run, which it removes by itself.
    """
    from dvc.repo import Repo

    dvc, commands = logging.getLogger("dvc"), logging.getLogger("dvc.stage.run")
    levels, propagate = (dvc.level, commands.level), commands.propagate
    handler = _Commands()
    commands.addHandler(handler)
    commands.propagate = False
    commands.setLevel(logging.INFO)
    dvc.setLevel(logging.ERROR)
    try:
        with Repo(str(root)) as repo:
            yield repo, handler.started
    finally:
        commands.removeHandler(handler)
        commands.propagate = propagate
        dvc.setLevel(levels[0])
        commands.setLevel(levels[1])
