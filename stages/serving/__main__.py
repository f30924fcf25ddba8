"""Prints the command of an extract server that you start yourself (docs/scaling.md).

    python -m stages.serving --target data/target --host 10.0.0.1 --port 8000 --master HOST:PORT

The rest comes from params.yaml and services.yaml of the folder that it runs in.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from stages.params import load_params, load_services
from stages.serving import plans


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.serving", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, metavar="DIR")
    parser.add_argument("--host", required=True, help="address that this server binds to")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--master", required=True, help="host:port of the Mooncake master")
    given = parser.parse_args()
    params, services = load_params(), load_services()
    services = services.model_copy(update={"host": given.host})
    plan = plans.target_plan(
        given.target,
        engine=params.engine,
        services=services,
        planes=plans.Planes.of(params.extract),
        master=given.master,
        seed=None,
    )
    settings = [f"{name}={value}" for name, value in plan.environment.items()]
    print(shlex.join(["env", *settings, *plan.command, "--port", str(given.port)]))


if __name__ == "__main__":
    main()
