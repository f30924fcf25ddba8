"""Serves a package with its target until it is interrupted: `make serve PACKAGE=package`.

    python -m stages.serving.serve --package DIR [--target DIR] [--port N]

An OpenAI-compatible server; how it drafts is params.yaml's section serve, where it binds is
services.yaml's. This process becomes vLLM's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.params import Params, ServeParams, Services, load_params, load_services
from stages.serving import plans, process
from stages.serving.speculative import speculative_arguments


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.serving.serve")
    parser.add_argument("--package", type=Path, required=True, metavar="DIR")
    parser.add_argument("--target", type=Path, default=Path("data/target"), metavar="DIR")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    try:
        params, services = load_params(), load_services()
        command, environment = served(
            given.target, package=given.package, params=params, services=services
        )
    except (ValueError, OSError) as error:
        print(f"serve: error: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"serve: {given.package} on http://{services.host}:{given.port}/v1", flush=True)
    if services.host not in process.LOOPBACK:
        print(f"serve: {services.host} can be reached from other machines", flush=True)
    os.execve(command[0], [*command, "--port", str(given.port)], {**os.environ, **environment})


def served(
    target: Path, *, package: Path, params: Params, services: Services
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment, the port aside. Raises ValueError for folders that are none."""
    if not (target / "config.json").is_file():
        raise ValueError(
            f"{target} holds no model (config.json is missing); run `make retrain`, or name the "
            "folder that the target stage made with --target"
        )
    plan = plans.vllm_plan(
        target,
        engine=params.engine,
        services=services,
        arguments=drafter_arguments(package, serve=params.serve),
        environment={},
    )
    return plan.command, plan.environment


def drafter_arguments(package: Path, *, serve: ServeParams) -> Sequence[str]:
    """Flags of a server with the packaged drafter that reports acceptance with each response."""
    device = "cpu" if plans.on_cpu() else "cuda"
    return [
        *speculative_arguments(package.resolve(), serve=serve, device=device),
        *("--per-request-spec-decode-metrics", "detailed"),
    ]


if __name__ == "__main__":
    main()
