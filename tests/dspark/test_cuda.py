"""On CUDA the step gives the CPU's loss and gradients."""

from contextlib import nullcontext

import pytest
import torch

from stages.dspark.step import Batch, Frozen, forward_batch
from tests.dspark.small import WEIGHTS, make_batch, make_drafter, make_frozen

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_loss_and_gradients_on_cuda_equal_the_cpus(dtype, tolerance):
    kind = getattr(torch, dtype)
    found = {}
    for device in ("cpu", "cuda"):
        drafter, frozen = make_drafter().to(device), make_frozen()
        batch = make_batch(frozen, seed=0)
        frozen = Frozen(
            frozen.embedding.to(device, kind),
            frozen.head.to(device, kind),
            frozen.norm.to(device),
            frozen.eps,
            frozen.draft_id.to(device),
        )
        batch = Batch(*(tensor.to(device) for tensor in batch))
        batch = batch._replace(planes=batch.planes.to(kind), last=batch.last.to(kind))
        cast = nullcontext() if dtype == "float32" else torch.autocast(device, dtype=kind)
        with cast:
            result = forward_batch(drafter, batch, frozen, weights=WEIGHTS)
        loss = result.loss / result.weight
        loss.backward()
        gradients = [p.grad.float().flatten().cpu() for p in drafter.parameters()]
        found[device] = float(loss.detach()), torch.cat(gradients)
    (loss, gradient), (cuda_loss, cuda_gradient) = found["cpu"], found["cuda"]
    assert cuda_loss == pytest.approx(loss, rel=tolerance)
    if dtype == "float32":
        assert float((cuda_gradient - gradient).norm() / gradient.norm()) < 1e-3
