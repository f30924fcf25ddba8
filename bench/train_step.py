"""Our training step against speculators 0.9.0's, alternating on identical tensors (bench-train).

A step is forward, loss, backward, clip and optimiser step, each side its own: its model, loss and
default optimiser (Muon on both sides; AdamW is timed too, on the same gradients). Both contenders
start from the same weights and must agree on the loss, or the benchmark fails. Memory is the peak
of two steps above the loaded model and batch, each contender in a process of its own.
The last line is JSON; a ratio is theirs over ours in seconds, ours over theirs in memory.
Cost: about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench import peer
from bench.problem import Problem, Shape, make_problem
from stages.dspark.config import DrafterConfig
from stages.dspark.model import Drafter
from stages.dspark.rope import Rope
from stages.dspark.step import LossWeights, forward_batch
from stages.params import Params, load_params
from stages.train.optimizer import Optimizer

SHAPES = (
    Shape(1920, 256, 8192, documents=8),
    Shape(960, 128, 49152, documents=4),
    Shape(3840, 512, 8192, documents=16),
    Shape(8192, 1088, 8192, documents=32),
)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CONTENDERS = ("ours", "peer")
OPTIMIZERS = ("muon", "adamw")  # the first is the default of both sides
LOSS_TOLERANCE = {"bfloat16": 2e-2, "float32": 5e-5}  # 1.6e-5 over the whole vocabulary
LEARNING_RATE = 1e-6  # weights hardly move; time does not depend on it
SEED = 1
SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "vocab_size": 49152,
    "num_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "rms_norm_eps": 1e-5,
    "rope": Rope(theta=100_000.0),
    "max_position_embeddings": 8192,
    "mask_token_id": 4,
    "layer_ids": (3, 9, 15, 21, 27),
    "sliding_window": None,
    "sliding_layers": (),
    "markov_head": "vanilla",
    "markov_rank": 128,
    "confidence_head": True,
    "confidence_head_with_markov": True,
    "target_architecture": "LlamaForCausalLM",
}


class Contender(NamedTuple):
    """One trainer with its problem loaded."""

    model: nn.Module
    loss: Callable[[], Tensor]  # that it descends on
    parity: Callable[[], float]  # in the peer's convention: normalised by supervised slots
    step: dict[str, Callable[[], None]]  # the optimiser's step by kind
    max_grad_norm: float


class Seconds(NamedTuple):
    """Of one step: wall seconds by optimiser, and core-seconds with the default one."""

    wall: dict[str, float]
    cores: float


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.train_step", description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="of each contender")
    parser.add_argument("--repetitions", type=int, default=5, help="alternating pairs of steps")
    parser.add_argument("--shapes", type=int, nargs="*", help="indices into the four shapes")
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--memory-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    params = load_params(options.params)
    shapes = [SHAPES[i] for i in options.shapes] if options.shapes else list(SHAPES)
    if options.memory_of:
        print(peak_bytes(options.memory_of, params, shapes[0], options.dtypes[0]))
        return
    results = []
    for dtype in options.dtypes:
        for shape in shapes:
            measured = compare(params, shape, dtype, repetitions=options.repetitions)
            memory = {name: measure_memory(name, shape, dtype, options) for name in CONTENDERS}
            results.append(measured | {"memory_mib": memory})
            print(table_row(results[-1]), flush=True)
    print(json.dumps(summary(results)))


def shape_config(shape: Shape, params: Params) -> DrafterConfig:
    return DrafterConfig(
        **SMOLLM2,
        draft_vocab_size=shape.draft_vocab_size,
        block_size=params.drafter.block_size,
    )


def initial_weights(config: DrafterConfig) -> Drafter:
    """A drafter that is no special case: its Markov and confidence heads do not start at zero."""
    drafter = Drafter(config)
    drafter.initialise(seed=SEED, target_norm=torch.ones(config.hidden_size))
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name in ("markov_head.markov_w2.weight", "confidence_head.proj.weight"):
            drafter.get_parameter(name).normal_(0.0, 0.02, generator=generator)
    return drafter


def loss_weights(params: Params) -> LossWeights:
    """The default profile's; the weighting of positions is the one that both trainers share."""
    train = params.train
    return LossWeights(
        ce=train.ce_weight,
        tv=train.tv_weight,
        kl=train.kl_weight,
        confidence=train.confidence_weight,
        ce_label=train.ce_label,
        position_weighting="decay",
        position_decay=train.position_decay,
        dpace_smoothing=train.dpace_smoothing,
    )


def autocast(dtype: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=DTYPES[dtype]) if dtype != "float32" else nullcontext()


def build_ours(problem: Problem, params: Params, dtype: str) -> Contender:
    """As stages.train does it, with the weights and the optimiser of params.yaml."""
    train = params.train
    drafter = initial_weights(problem.config)
    weights = loss_weights(params)

    def loss() -> Tensor:
        with autocast(dtype):
            result = forward_batch(drafter, problem.batch, problem.frozen, weights=weights)
        return result.loss / result.weight

    def parity() -> float:
        with torch.no_grad(), autocast(dtype):
            result = forward_batch(drafter, problem.batch, problem.frozen, weights=weights)
        return float(result.loss / result.valid.sum())

    def stepper(kind: str) -> Callable[[], None]:
        optimizer = Optimizer(drafter, train.model_copy(update={"optimizer": kind}))
        return lambda: optimizer.step(LEARNING_RATE)

    steps = {kind: stepper(kind) for kind in OPTIMIZERS}
    return Contender(drafter, loss, parity, steps, train.max_grad_norm)


def build_peer(problem: Problem, params: Params, dtype: str) -> Contender:
    model = peer.build_model(problem, dict(initial_weights(problem.config).named_parameters()))
    arguments = peer.call_arguments(problem, loss_weights(params))

    def loss() -> Tensor:
        with autocast(dtype):
            value: Tensor = model(**arguments)[1]
        return value

    def parity() -> float:
        with torch.no_grad():
            return float(loss())

    def stepper(kind: str) -> Callable[[], None]:
        optimizers = peer.build_optimizers(model, kind)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE

        def step() -> None:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return step

    return Contender(model, loss, parity, {kind: stepper(kind) for kind in OPTIMIZERS}, 1.0)


BUILD = {"ours": build_ours, "peer": build_peer}


def timed_step(contender: Contender, kinds: Sequence[str]) -> Seconds:
    """One step; further kinds of optimiser step on the same gradients."""
    started, cores = time.perf_counter(), time.process_time()
    loss = contender.loss()
    loss.backward()
    parameters = list(contender.model.parameters())
    nn.utils.clip_grad_norm_(parameters, contender.max_grad_norm)
    float(loss.detach())
    shared, shared_cores = time.perf_counter() - started, time.process_time() - cores
    gradients = [parameter.grad for parameter in parameters]
    wall, used = {}, []
    for kind in kinds:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        started, cores = time.perf_counter(), time.process_time()
        contender.step[kind]()
        wall[kind] = shared + time.perf_counter() - started
        used.append(shared_cores + time.process_time() - cores)
    return Seconds(wall, used[0])


def compare(params: Params, shape: Shape, dtype: str, *, repetitions: int) -> dict[str, Any]:
    """Medians of alternating steps, after one pair that is not counted. Raises ValueError where the
    two contenders do not start from the same loss."""
    config = shape_config(shape, params)
    problem = make_problem(config, shape, dtype=DTYPES[dtype], seed=SEED)
    contenders = {name: BUILD[name](problem, params, dtype) for name in CONTENDERS}
    losses = {name: contender.parity() for name, contender in contenders.items()}
    if abs(losses["ours"] / losses["peer"] - 1) > LOSS_TOLERANCE[dtype]:
        raise ValueError(
            f"bench-train: {shape} {dtype}: expected equal losses within {LOSS_TOLERANCE[dtype]}, "
            f"found {losses}; the contenders do not compute the same thing"
        )
    taken: dict[str, list[Seconds]] = {name: [] for name in CONTENDERS}
    for repetition in range(repetitions + 1):
        order = CONTENDERS if repetition % 2 else CONTENDERS[::-1]
        for name in order:
            taken[name].append(timed_step(contenders[name], OPTIMIZERS))
    return {
        "shape": str(shape),
        "dtype": dtype,
        "loss": losses,
        "seconds": {
            kind: {
                name: statistics.median(s.wall[kind] for s in taken[name][1:])
                for name in CONTENDERS
            }
            for kind in OPTIMIZERS
        },
        "core_seconds": {
            name: statistics.median(s.cores for s in taken[name][1:]) for name in CONTENDERS
        },
    }


def measure_memory(name: str, shape: Shape, dtype: str, options: argparse.Namespace) -> float:
    """MiB, measured in a process of its own."""
    command = [sys.executable, "-m", "bench.train_step", "--memory-of", name]
    command += ["--shapes", str(SHAPES.index(shape)), "--dtypes", dtype]
    command += ["--threads", str(options.threads), "--params", str(options.params)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"bench-train: {' '.join(command)} failed:\n{done.stderr}")
    return int(done.stdout.split()[-1]) / 2**20


def peak_bytes(name: str, params: Params, shape: Shape, dtype: str) -> int:
    """Peak resident bytes of two steps above the loaded model and batch (Linux: VmHWM)."""
    config = shape_config(shape, params)
    problem = make_problem(config, shape, dtype=DTYPES[dtype], seed=SEED)
    contender = BUILD[name](problem, params, dtype)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or freed buffers of the construction hide a part of the peak
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at VmRSS
    loaded = _status_bytes("VmRSS")
    for _ in range(2):  # the second one beside the optimiser's state
        timed_step(contender, OPTIMIZERS[:1])
    return _status_bytes("VmHWM") - loaded


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def table_row(result: dict[str, Any]) -> str:
    seconds, memory = result["seconds"], result["memory_mib"]
    times = "  ".join(
        f"{kind} {by['ours']:6.2f} s against {by['peer']:6.2f} s ({by['peer'] / by['ours']:.2f}x)"
        for kind, by in seconds.items()
    )
    cores = result["core_seconds"]
    return (
        f"{result['shape']:>15} {result['dtype']:<8}  {times}  "
        f"{cores['ours']:.2f} / {cores['peer']:.2f} core-s  "
        f"{memory['ours']:.0f} / {memory['peer']:.0f} MiB ({memory['ours'] / memory['peer']:.2f})"
    )


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last line. Keys that need a shape or dtype that was not measured are null."""

    def ratios(kind: str) -> dict[str, dict[str, float]]:
        table: dict[str, dict[str, float]] = {}
        for result in results:
            by = result["seconds"][kind]
            table.setdefault(result["shape"], {})[result["dtype"]] = round(
                by["peer"] / by["ours"], 3
            )
        return table

    ratio = ratios(OPTIMIZERS[0])
    bfloat16 = [by["bfloat16"] for by in ratio.values() if "bfloat16" in by]
    memory = {
        f"{r['shape']} {r['dtype']}": round(r["memory_mib"]["ours"] / r["memory_mib"]["peer"], 3)
        for r in results
    }
    return {
        "ratio": ratio,
        "ratio_min_bf16": min(bfloat16, default=None),
        "ratio_long_bf16": ratio.get(str(SHAPES[-1]), {}).get("bfloat16"),
        "memory_ratio_max": max(memory.values(), default=None),
        "memory_ratio": memory,
        "ratio_adamw": ratios("adamw"),
        "results": results,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
