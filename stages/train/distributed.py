"""The processes of one training run: who starts them, what they share and how they add up.

Every process (rank) holds the same plan. A step's documents are dealt to the ranks, and losses add
up as numerator and denominator, so a run on any number of ranks takes the steps of a run on one.
Gradients are averaged by DDP, which keeps the whole drafter on every rank, or by FSDP2, which keeps
a part of each parameter and of its optimiser state. Rank 0 alone writes; what it writes is whole.

Collectives are called by all ranks in the same order: what depends on a clock or on a file is rank
0's, see Ranks.agreed. Without a group (ALONE) nothing here touches torch.distributed.
Backends: gloo on CPU; on CUDA nccl, with gloo for what stays on the CPU.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from stages.dspark.model import Layer
from stages.services import TrainServices
from stages.serving.launch import OWNER, SERVICES_OWNER, services_owner

T = TypeVar("T")
LET_GO_S = 0.5
"""Gloo's threads take Python's lock to let go of the last tensors, and a group's end waits for them
while it holds the lock, forever (torch 2.13): they are given this long before it."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One process's view of the run's processes."""

    index: int
    size: int
    local_index: int  # among those of this machine; the CUDA device
    local_size: int
    sharding: Literal["ddp", "fsdp2"] | None  # None: one process without a group

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.index == 0

    def device(self, kind: str) -> torch.device:
        """This rank's device of services.train.device."""
        return torch.device(kind if self.sharding is None else own_device(kind, self.local_index))

    def deal(self, documents: Sequence[int]) -> list[int]:
        """This rank's documents of a batch, every size-th; a rank may get none."""
        return list(documents[self.index :: self.size])

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks, on all of them."""
        if self.sharding is not None:
            dist.all_reduce(values)
        return values

    def agreed(self, value: T) -> T:
        """Rank 0's value, a small object, on all of them."""
        if self.sharding is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gathered(self, values: dict[str, str]) -> dict[str, str]:
        """The ranks' small dictionaries as one, on all of them."""
        if self.sharding is None:
            return values
        found: list[dict[str, str]] = [{}] * self.size
        dist.all_gather_object(found, values)
        return {name: value for one in found for name, value in one.items()}

    def agreed_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rank 0's named CPU tensors, on all of them; the others' are not looked at."""
        if self.sharding is None:
            return dict(tensors)
        described = self.agreed({name: (t.shape, t.dtype) for name, t in tensors.items()})
        found = {}
        for name, (shape, dtype) in described.items():
            found[name] = tensors[name] if self.first else torch.empty(shape, dtype=dtype)
            dist.broadcast(found[name], src=0)
        return found

    @torch.no_grad()
    def agree_on(self, module: nn.Module) -> None:
        """Gives every rank's CPU module the parameters and buffers of rank 0's."""
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        for name, value in self.agreed_tensors(own).items():
            own[name].copy_(value)

    def wrapped(self, module: nn.Module, *, device: torch.device) -> nn.Module:
        """The module whose backward leaves the mean over ranks of each gradient.

        With fsdp2 the parameters become DTensors, whole only while the module runs.
        """
        if self.sharding is None:
            return module
        if self.sharding == "ddp":
            return DistributedDataParallel(
                module, forward_sync_buffers=False, gradient_as_bucket_view=True
            )
        mesh = init_device_mesh(device.type, (self.size,))
        for layer in module.modules():
            if isinstance(layer, Layer):  # its two halves are what is called
                fully_shard(layer.self_attn, mesh=mesh)
                fully_shard(layer.mlp, mesh=mesh)
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        return module

    def leave(self) -> None:
        """Ends this process's part in the group, when all have come here."""
        if self.sharding is not None:
            dist.barrier()
            time.sleep(LET_GO_S)
            dist.destroy_process_group()


ALONE = Ranks(index=0, size=1, local_index=0, local_size=1, sharding=None)


def whole(value: Tensor) -> Tensor:
    """All of a tensor of which every rank may hold a part; all ranks call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def part_of(value: Tensor, owner: Tensor) -> Tensor:
    """This rank's part of a whole tensor (the same on all ranks), split as `owner` of its shape is;
    the tensor itself where owner is not split."""
    if not isinstance(owner, DTensor) or value.shape != owner.shape:
        return value
    return distribute_tensor(
        value.to(owner.device), owner.device_mesh, owner.placements, src_data_rank=None
    )


def parts(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """part_of for tensors named as the model's parameters; others pass."""
    owners = dict(model.named_parameters())
    return {
        name: part_of(value, owners[name]) if name in owners else value
        for name, value in tensors.items()
    }


def is_rank() -> bool:
    """Whether torchrun started this process (ours or the user's, on one machine or several)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def own_device(kind: str, local_index: int) -> str:
    return f"cuda:{local_index}" if kind == "cuda" else kind


def join(services: TrainServices) -> Ranks:
    """Joins the group that torchrun started; ALONE where it did not."""
    if not is_rank():
        assert services.num_processes == 1, "launch() starts several"
        return ALONE
    local_index = int(os.environ["LOCAL_RANK"])
    device = torch.device(own_device(services.device, local_index))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    atexit.register(time.sleep, LET_GO_S)  # after an error nobody leaves: the interpreter ends it
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    return Ranks(
        index=dist.get_rank(),
        size=dist.get_world_size(),
        local_index=local_index,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        sharding=services.sharding,
    )


def launch(services: TrainServices) -> None:
    """Runs this command again as services.num_processes ranks and waits for them.

    torchrun ends all of them when one dies. They end too when this process does, however it dies:
    they hold the read end of its pipe as their owner (stages/command.py). Raises ValueError where a
    rank failed; what it said is above.
    """
    count = services.num_processes
    if services.device == "cuda" and count > torch.cuda.device_count():
        raise ValueError(
            f"services.train.num_processes is {count}, but this machine has "
            f"{torch.cuda.device_count()} CUDA devices; every process needs one of its own"
        )
    environment = {
        "OMP_NUM_THREADS": str(services.num_threads),
        # Ranks of one machine need no other interface, and its host name may not resolve.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        **os.environ,
        SERVICES_OWNER: services_owner() or "",
        OWNER: "-",
    }
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    with subprocess.Popen(
        [sys.executable, "-m", *torchrun, "-m", "stages.train", *sys.argv[1:]],
        stdin=subprocess.PIPE,
        env=environment,
    ) as ranks:
        try:
            status = ranks.wait()
        finally:
            assert ranks.stdin is not None
            ranks.stdin.close()
    if status:
        raise ValueError(
            f"one of the {count} training processes failed, so all were ended (torchrun's status "
            f"{status}); what it said is above. Started again, the run resumes"
        )
