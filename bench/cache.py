"""Reading an epoch of hidden states in random order: our shards against two peers (bench-cache).

Contenders hold the same samples: our shards in each encoding, safetensors files with one sample
each, and a Hugging Face Arrow dataset. A reader opens them, takes every sample in a new random
order and copies it, as bfloat16 states [T, P, H], into a batch. Contenders alternate; cold runs
begin with the files dropped from the page cache. MB are of bfloat16 states, whatever is stored.
The last line is JSON; read_over_best_peer is our MB/s over the faster peer's, bfloat16.
Cost: about three minutes on two cores and 1.5 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import safe_open, save_file
from torch import Tensor

from bench import states as real
from stages import contracts
from stages.params import load_params
from stages.serving.encoding import encode
from stages.shards import ShardReader, ShardWriter
from stages.states.source import load

ENCODINGS = (contracts.BFLOAT16, contracts.BFLOAT16_ZSTD, contracts.FLOAT8)
PEERS = ("safetensors", "arrow")
FOLDER = real.SCRATCH / "cache"


class Stored(NamedTuple):
    """One contender's files."""

    folder: Path
    write_s: float
    read: Callable[[Sequence[int]], Iterator[Tensor]]  # opens and reads; bfloat16 [T, P, H] each

    @property
    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.cache", description=__doc__)
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--tokens", type=int, default=160, help="mean of a sample")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    params = load_params(options.params)
    target = real.make_target(params)
    rows = real.token_rows(target, count=options.samples, num_tokens=options.tokens, seed=1)
    layer_ids = params.extract.layer_ids
    print(f"bench-cache: states of {sum(map(len, rows)):,} tokens by transformers", flush=True)
    torch.set_num_threads(os.cpu_count() or 1)
    model = real.load_model(target)
    samples = [x.clone() for x in real.planes(model, rows, layer_ids, batch_rows=4)]
    torch.set_num_threads(1)
    del model
    shutil.rmtree(FOLDER, ignore_errors=True)
    contenders = {name: store_ours(samples, rows, name) for name in ENCODINGS}
    contenders |= {"safetensors": store_safetensors(samples), "arrow": store_arrow(samples)}
    check(contenders, samples)
    results = measure(contenders, samples, repetitions=options.repetitions)
    num_bytes = sum(x.nbytes for x in samples)
    num_tokens = sum(map(len, rows))
    table = {
        name: {
            "bytes_per_token": round(stored.num_bytes / num_tokens, 1),
            "write_mb_per_s": round(num_bytes / 1e6 / stored.write_s, 1),
            **{
                f"{kind}_mb_per_s": round(num_bytes / 1e6 / results[name, kind][0], 1)
                for kind in ("cold", "warm")
            },
            **{f"{kind}_core_s": round(results[name, kind][1], 3) for kind in ("cold", "warm")},
        }
        for name, stored in contenders.items()
    }
    for name, row in table.items():
        print(f"{name:14}", "  ".join(f"{key} {value:,}" for key, value in row.items()))
    ratios = {
        kind: round(
            table[contracts.BFLOAT16][f"{kind}_mb_per_s"]
            / max(table[peer][f"{kind}_mb_per_s"] for peer in PEERS),
            2,
        )
        for kind in ("cold", "warm")
    }
    shutil.rmtree(FOLDER)
    print(
        json.dumps(
            {
                "read_over_best_peer": min(ratios.values()),
                "read_over_best_peer_by_cache": ratios,
                "bytes_per_token": {name: row["bytes_per_token"] for name, row in table.items()},
                "promised_bytes_per_token": {
                    name: contracts.token_bytes(samples[0].shape[1], samples[0].shape[2], name)
                    for name in ENCODINGS
                },
                "table": table,
            }
        )
    )


def store_ours(samples: list[Tensor], rows: list[list[int]], encoding: str) -> Stored:
    folder = FOLDER / encoding
    num_planes, hidden = samples[0].shape[1:]
    start = time.perf_counter()
    writer = ShardWriter(
        folder / "shards",
        pieces=FOLDER / f"{encoding}-pieces",
        num_planes=num_planes,
        hidden_size=hidden,
        shard_bytes=256_000_000,
        encoding=encoding,
    )
    for index, (states, row) in enumerate(zip(samples, rows, strict=True)):
        payload = encode(states, encoding).flatten().numpy()
        writer.append(payload, real.sample(index, row, supervised=0.0))
    writer.close()
    write_s = time.perf_counter() - start

    def read(order: Sequence[int]) -> Iterator[Tensor]:
        reader = ShardReader(folder / "shards", num_planes, hidden, encoding)
        for index in order:
            yield load(reader, writer.samples[index]).states

    return Stored(folder, write_s, read)


def store_safetensors(samples: list[Tensor]) -> Stored:
    folder = FOLDER / "safetensors"
    folder.mkdir(parents=True)
    start = time.perf_counter()
    for index, states in enumerate(samples):
        save_file({"states": states}, folder / f"{index}.safetensors")
    write_s = time.perf_counter() - start

    def read(order: Sequence[int]) -> Iterator[Tensor]:
        for index in order:
            with safe_open(folder / f"{index}.safetensors", framework="pt") as file:
                yield file.get_tensor("states")

    return Stored(folder, write_s, read)


def store_arrow(samples: list[Tensor]) -> Stored:
    """A column of binary values: `datasets` has no bfloat16, and lists of numbers are slower."""
    from datasets import Dataset, Features, Value, load_from_disk

    folder = FOLDER / "arrow"
    shape = samples[0].shape[1:]
    start = time.perf_counter()
    values = {"states": [states.view(torch.uint8).numpy().tobytes() for states in samples]}
    features = Features({"states": Value("large_binary")})
    Dataset.from_dict(values, features=features).save_to_disk(str(folder))
    write_s = time.perf_counter() - start
    del values

    def read(order: Sequence[int]) -> Iterator[Tensor]:
        dataset = load_from_disk(str(folder))
        for index in order:
            raw = torch.frombuffer(bytearray(dataset[index]["states"]), dtype=torch.bfloat16)
            yield raw.view(-1, *shape)

    return Stored(folder, write_s, read)


def check(contenders: dict[str, Stored], samples: list[Tensor]) -> None:
    """Everybody gives back what was stored; float8 within its precision."""
    order = list(range(len(samples)))
    for name, stored in contenders.items():
        for found, states in zip(stored.read(order), samples, strict=True):
            if name == contracts.FLOAT8:
                error = (found.float() - states.float()).norm() / states.float().norm()
                assert error < 0.05, f"{name}: relative error {error}"
            else:
                assert torch.equal(found, states), name


def measure(
    contenders: dict[str, Stored], samples: list[Tensor], *, repetitions: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """Medians of (wall seconds, core-seconds) of an epoch, by contender and cold or warm."""
    runs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    batch = torch.empty(max(map(len, samples)), *samples[0].shape[1:], dtype=torch.bfloat16)
    for repetition in range(repetitions):
        for name, stored in contenders.items():
            order = random.Random(repetition).sample(range(len(samples)), len(samples))
            for kind in ("cold", "warm"):
                if kind == "cold":
                    _drop(stored.files)
                runs.setdefault((name, kind), []).append(_epoch(stored, order, batch))
    return {
        key: (statistics.median(w for w, _ in found), statistics.median(c for _, c in found))
        for key, found in runs.items()
    }


def _epoch(stored: Stored, order: Sequence[int], batch: Tensor) -> tuple[float, float]:
    start, cores = time.perf_counter(), _core_seconds()
    for states in stored.read(order):
        batch[: len(states)].copy_(states)
    return time.perf_counter() - start, _core_seconds() - cores


def _core_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _drop(files: Sequence[Path]) -> None:
    """Asks the kernel to forget the files' pages."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])
