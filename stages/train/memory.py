"""How much memory a run will take, said before it starts, and refused where it cannot fit.

An estimate from shapes alone: what lives through the run (target, weights, optimiser), and the most
of what comes and goes (a training step, a validation pass, the writing of a resume point). Counts
follow stages/dspark (model.py, loss.py) and are rounded up; tests/train/test_memory.py holds them
against measured peaks. The interpreter and its libraries (0.5 GB) are in memory before.

B documents, T tokens, M blocks, N slots; H hidden, I intermediate, Q query and K key-value widths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stages.dspark.config import DrafterConfig
from stages.dspark.loss import CHUNK_LOGITS, CHUNK_SLOTS
from stages.dspark.model import Drafter
from stages.params import TrainParams
from stages.states.source import Sample
from stages.train.batches import plan_epoch
from stages.train.optimizer import muon_matrices

FLOAT = 4  # bytes
ONEDNN_PRIMITIVES = 64  # that oneDNN may keep; shapes rarely repeat, and it would keep 1,024
ONEDNN_CACHE = 1 << 30  # bytes of what it keeps for bfloat16 on the CPU all the same: measured
RESERVE = 0.1  # of what is available, left to everything else
_UNLIMITED = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The shape of one pass of the drafter: B documents of T tokens with M blocks each."""

    documents: int
    tokens: int
    blocks: int
    backward: bool


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes, by what they hold."""

    target: int  # embedding, logit head
    weights: int
    optimizer: int
    gradients: int
    casts: int  # whole weights in the computation's dtype, and what FSDP2 gathers
    activations: int  # of the largest pass, its batch among them
    loss: int  # target logits and one chunk of draft logits
    resume_point: int  # copies while one is written
    libraries: int  # what they keep for later

    @property
    def peak(self) -> int:
        step = self.gradients + self.casts + self.activations + self.loss
        lasting = self.target + self.weights + self.optimizer + self.libraries
        return lasting + max(step, self.resume_point)

    def __str__(self) -> str:
        parts = (f"{name} {gib(value)}" for name, value in vars(self).items())
        return f"{gib(self.peak)} GiB at its peak ({', '.join(parts)})"


def estimate(
    config: DrafterConfig,
    params: TrainParams,
    *,
    passes: Iterable[Pass],
    tied: bool,
    on_host: bool,
    shards: int,
) -> Estimate:
    """Of one process, for the largest of `passes`.

    tied: the target's head is its embedding; on_host: the device is the CPU, so that the target's
    tensors as read stay beside those of the computation; shards: processes that share weights,
    gradients and optimiser state between them (FSDP2), else 1.
    """
    compute = 2 if params.dtype == "bfloat16" else FLOAT
    with torch.device("meta"):
        drafter = Drafter(config)
    numbers = sum(p.numel() for p in drafter.parameters())
    matrices = muon_matrices(drafter, params)
    by_muon = sum(p.numel() for p in matrices)
    largest = max((p.numel() for p in matrices), default=0)
    state = FLOAT * (by_muon + 2 * (numbers - by_muon))
    embedding = config.vocab_size * config.hidden_size
    target = compute * config.draft_vocab_size * config.hidden_size
    if not on_host or compute != 2:
        target += compute * embedding
    if on_host:
        target += 2 * embedding * (1 if tied else 2)
    fc = drafter.fc.weight.numel()
    activations, loss = max(
        (_pass(config, shape, compute=compute) for shape in passes), key=lambda both: sum(both)
    )
    own = FLOAT * numbers // shards
    gathered = 2 * FLOAT * numbers if shards > 1 else 0  # whole weights and gradients, in a step
    return Estimate(
        target=target,
        weights=own,
        optimizer=state // shards + 4 * FLOAT * largest,  # Muon's copies of one matrix
        gradients=own,
        casts=(compute * numbers if compute != FLOAT else 0) + 2 * FLOAT * fc + gathered,
        activations=activations,
        loss=loss,
        resume_point=on_host * (FLOAT * numbers + state) * (2 if shards > 1 else 1),
        libraries=ONEDNN_CACHE if on_host and compute != FLOAT else 0,
    )


def _pass(config: DrafterConfig, shape: Pass, *, compute: int) -> tuple[int, int]:
    """Bytes of activations and of the loss."""
    H, I, N = config.hidden_size, config.intermediate_size, config.block_size  # noqa: E741
    Q = config.num_attention_heads * config.head_dim
    K = config.num_key_value_heads * config.head_dim
    context, slots = shape.documents * shape.tokens, shape.documents * shape.blocks * N
    captured = len(config.layer_ids) * H
    # What a layer keeps for its backward, and what comes and goes in one layer at a time. A norm
    # keeps its input in float32 and its output.
    norm = FLOAT + compute
    per_key = K * (norm + 2 * compute)
    per_slot = H * (2 * norm + 3 * compute) + Q * (norm + 3 * compute) + per_key + 2 * I * compute
    scores = slots * config.num_attention_heads * (shape.tokens + N)
    kept = context * per_key + slots * per_slot + scores * compute
    passing = context * K * 4 * FLOAT + slots * ((Q + H) * 4 * FLOAT + 3 * I * compute)
    passing += scores * (2 * FLOAT + compute)
    batch = context * (captured + H) * (2 + (compute if compute != 2 else 0))
    embedded = (context + slots) * H * (norm + compute)
    heads = slots * (H + config.markov_rank) * 2 * (compute + FLOAT)
    layers = passing + (config.num_layers * kept if shape.backward else 0)
    Vd = config.draft_vocab_size
    rows = min(CHUNK_SLOTS, CHUNK_LOGITS // Vd + 1, slots)
    chunk = rows * Vd * (2 * compute + 4 * FLOAT)
    table = Vd * (H + config.markov_rank) * 2 * compute + Vd * config.markov_rank * FLOAT
    return batch + embedded + heads + layers, chunk + table + min(context, slots) * Vd * compute


def check(estimated: Estimate, *, device: torch.device, processes: int) -> str:
    """A line that says what is needed and what there is; `processes` share the host.

    Raises ValueError where it cannot fit.
    """
    available = available_bytes(device)
    sharing = processes if device.type == "cpu" else 1
    need = estimated.peak * sharing
    line = f"train: memory on {device}: {estimated}"
    if sharing > 1:
        line += f", {gib(need)} GiB for {sharing} processes"
    if available is None:
        return line
    line += f"; {gib(available)} GiB available"
    if need > available * (1 - RESERVE):
        raise ValueError(
            f"{line}, of which {RESERVE:.0%} stay free: it does not fit. Lower train.batch_tokens "
            "or train.anchors_per_sample (activations), drafter.draft_vocab_size (loss), or "
            "drafter.num_layers and drafter.markov_rank (weights, gradients, optimizer)"
        )
    return line


def available_bytes(device: torch.device) -> int | None:
    """What this process can still allocate; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_bytes(Path("/"))


def host_bytes(root: Path) -> int | None:
    """The least of MemAvailable and the room in every memory cgroup (v1 or v2) of this process.

    `root` is the folder that holds proc and sys. Page cache counts as room: it is given back.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.is_file():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    rooms = [int(fields["MemAvailable"].split()[0]) * 1024]
    groups = root / "proc/self/cgroup"
    lines = groups.read_text().splitlines() if groups.is_file() else []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            mount, limit, usage = "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        folder = root / mount / name.strip("/")
        while True:  # the limit of every ancestor counts; inside a container there may be only one
            rooms += _room(folder, limit=limit, usage=usage)
            if folder == root / mount:
                break
            folder = folder.parent
    return min(rooms)


def _room(folder: Path, *, limit: str, usage: str) -> list[int]:
    if not (folder / limit).is_file() or not (folder / usage).is_file():
        return []
    allowed = (folder / limit).read_text().strip()
    if allowed == "max" or int(allowed) > _UNLIMITED:
        return []
    statistics = folder / "memory.stat"
    values = dict(line.split() for line in statistics.read_text().splitlines())
    cache = int(values.get("total_inactive_file", values.get("inactive_file", 0)))
    return [int(allowed) - int((folder / usage).read_text()) + cache]


def gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def passes(
    train: Sequence[Sample], validation: Sequence[Sample], params: TrainParams, *, ranks: int
) -> Iterator[Pass]:
    """The shapes of a run's passes on one of `ranks`: one epoch, a validation, a greedy replay."""
    lengths = [sample["num_tokens"] for sample in train]
    for batch in plan_epoch(lengths, batch_tokens=params.batch_tokens, seed=params.seed):
        yield Pass(
            documents=math.ceil(len(batch) / ranks),
            tokens=max(lengths[i] for i in batch),
            blocks=params.anchors_per_sample,
            backward=True,
        )
    lengths = [sample["num_tokens"] for sample in validation]
    for tokens, blocks in (
        (params.batch_tokens, params.validation_anchors),
        (params.batch_tokens // 4, None),
    ):
        for batch in plan_epoch(lengths, batch_tokens=tokens, seed=params.seed):
            yield Pass(
                documents=math.ceil(len(batch) / ranks),
                tokens=max(lengths[i] for i in batch),
                blocks=blocks or max(sum(validation[i]["loss_mask"]) for i in batch),
                backward=False,
            )
