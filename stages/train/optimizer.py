"""Muon for the backbone's matrices, AdamW for everything else, under one schedule.

Muon (stages/train/muon.py) costs about two fifths of a default step, and wins it back: on the same
data 529 steps in 346 core-seconds reached 1.466, 1,058 of AdamW's in 355 1.390; and fc under
Muon too raised the default's macro acceptance length from 1.502 to 1.526 (docs/LOG.md).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stages.params import TrainParams
from stages.train.distributed import part_of
from stages.train.muon import Muon


def muon_matrices(model: nn.Module, params: TrainParams) -> list[nn.Parameter]:
    """The parameters that Muon steps: what maps channels to channels, not the Markov head's tables.
    None where train.optimizer is adamw."""
    if params.optimizer != "muon":
        return []
    return [
        p
        for name, p in model.named_parameters()
        if p.dim() == 2 and name.startswith(("fc.", "layers."))
    ]


class Optimizer:
    """Steps, schedules and exposes the state of both optimisers as named tensors."""

    def __init__(self, model: nn.Module, params: TrainParams) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        matrices = muon_matrices(model, params)
        chosen = set(matrices)
        rest = [p for p in self._names if p not in chosen]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": params.weight_decay},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, betas=params.betas, fused=True)
        ]
        if chosen:
            self._parts.append(
                Muon(
                    matrices,
                    lr=params.learning_rate,
                    weight_decay=params.muon_weight_decay,
                    momentum=params.muon_momentum,
                )
            )

    def step(self, learning_rate: float) -> None:
        """One update of every parameter; gradients are cleared."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """All state tensors, named <entry>:<parameter>, split as their parameters are."""
        return {
            f"{entry}:{self._names[parameter]}": value
            for part in self._parts
            for parameter, entries in part.state.items()
            for entry, value in entries.items()
        }

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of state(), from whole tensors; names without a colon are ignored."""
        named: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            entry, colon, name = key.partition(":")
            if colon:
                named.setdefault(name, {})[entry] = value
        for part in self._parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    if self._names[parameter] in named:
                        part.state[parameter] = {
                            entry: part_of(value.to(parameter.device), parameter)
                            for entry, value in named[self._names[parameter]].items()
                        }
