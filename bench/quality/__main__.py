"""python -m bench.quality --prompts DIR [--seed N ...] [--budgets 300,1200]

docs/bench-quality.md has the rules of the comparison.
"""

import argparse
import json
import sys
from pathlib import Path

from bench.quality.results import FILE, TRAINERS
from bench.quality.settings import load_settings
from bench.quality.stage import Bench, Order
from stages.params import load_params, load_services


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="folder of JSONL files")
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--budgets", default="300,1200", help="core-seconds, with commas between")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--threads", type=int, default=1, help="of each trainer")
    parser.add_argument("--all-rates", action="store_true", help="both rates at every budget")
    parser.add_argument("--again", action="store_true", help="repeat what is in the file")
    parser.add_argument("--data-only", action="store_true", help="make the data and stop")
    parser.add_argument("--cache", type=Path, default=Path("run/bench-quality"))
    parser.add_argument("--results", type=Path, default=FILE, help="where results are kept")
    options = parser.parse_args()
    try:
        bench = Bench(
            order=Order(
                prompts=options.prompts,
                seeds=options.seed,
                budgets=[float(budget) for budget in options.budgets.split(",")],
                trainers=options.trainers,
                num_threads=options.threads,
                all_rates=options.all_rates,
                again=options.again,
                cache=options.cache,
                file=options.results,
            ),
            params=load_params(),
            services=load_services(),
            settings=load_settings(),
        )
        if options.data_only:
            print(json.dumps(bench.make_data().counts))
            return
        print(json.dumps(bench.run()))
    except (ValueError, OSError) as error:
        print(f"bench-quality: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
