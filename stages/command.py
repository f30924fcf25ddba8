"""The command line that every stage shares: paths in, one path out, errors without a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from stages.params import Params, Services, load_params, load_services

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
    try:
        run(load_params(), load_services(), arguments, out)
    except (ValueError, OSError) as error:
        print(f"{stage}: error: {error}", file=sys.stderr)
        sys.exit(1)
