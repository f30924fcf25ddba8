"""The command line that every stage shares: paths in, one path out, errors without a traceback."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from stages.params import Params, Services, load_params, load_services
from stages.serving import supervisor

Run = Callable[[Params, Services, Mapping[str, Path], Path], None]


def main(stage: str, *, inputs: tuple[str, ...], run: Run) -> None:
    """Parses `--<input> DIR ... --out DIR`, loads both settings files and calls `run`.

    A ValueError or OSError is the user's to mend: it is printed without a traceback, exit code 1.
    """
    parser = argparse.ArgumentParser(prog=f"python -m stages.{stage}")
    for name in (*inputs, "out"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, required=True, metavar="DIR")
    arguments = vars(parser.parse_args())
    out = arguments.pop("out")
    if owner := os.environ.get("DSPARK_OWNER"):
        threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    try:
        run(load_params(), load_services(), arguments, out)
    except (ValueError, OSError) as error:
        print(f"{stage}: error: {error}", file=sys.stderr)
        sys.exit(1)


def _end_with(owner: str) -> None:
    """Ends this process when the flow that holds the FIFO `owner` is gone, however it died.

    A stage that outlived its flow would work in the same folder as the next flow's. It resumes.
    """
    lifeline = supervisor.open_lifeline(owner)
    while not supervisor.owner_is_gone(lifeline, timeout_s=60.0):
        pass
    os._exit(1)
