"""Muon's update: orthogonal within the bounds it states, with the matrix's singular vectors."""

import pytest
import torch

from stages.train.muon import Muon, orthogonalise

SHAPES = [(24, 24), (24, 70), (70, 24), (5, 9), (1, 6)]


def _matrix(shape, spectrum, seed=0):
    g = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(
        torch.randn(shape, generator=g, dtype=torch.float64), full_matrices=False
    )
    return u, v, (u * spectrum) @ v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape, size):
    """Against the singular value decomposition in float64."""
    spectrum = torch.logspace(0, -2.4, min(shape), dtype=torch.float64) * size
    assert float(spectrum.min() / spectrum.norm()) > 0.002
    u, v, matrix = _matrix(shape, spectrum)
    made = orthogonalise(matrix.float()).double()
    inner = u.T @ made @ v.T
    assert float((inner - inner.diag().diag()).abs().max()) < 2e-3
    assert float(inner.diag().min()) >= 0.84
    assert float(inner.diag().max()) <= 1.16
    torch.testing.assert_close(made, u @ inner.diag().diag() @ v, rtol=0, atol=2e-3)


def test_noise_far_below_the_norm_is_not_made_as_large_as_the_signal():
    spectrum = torch.tensor([1.0, 0.5, 1e-6], dtype=torch.float64)
    u, v, matrix = _matrix((3, 8), spectrum)
    inner = (u.T @ orthogonalise(matrix.float()).double() @ v.T).diag()
    assert float(inner[2].abs()) < 1e-2


def test_a_matrix_of_zeros_has_no_update():
    assert not orthogonalise(torch.zeros(4, 6)).any()


def test_the_spread_is_smaller_than_that_of_torchs_newton_schulz():
    from torch.optim._muon import _zeropower_via_newtonschulz

    matrix = torch.randn(48, 96, generator=torch.Generator().manual_seed(1))
    reference = _zeropower_via_newtonschulz(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)
    theirs = torch.linalg.svdvals(reference.float()) - 1
    ours = torch.linalg.svdvals(orthogonalise(matrix)) - 1
    assert float(ours.abs().max()) < float(theirs.abs().max())


def test_a_step_equals_torchs_but_for_the_spread_of_singular_values():
    """Momentum, Nesterov, decay and scale are those of torch.optim.Muon."""
    g = torch.Generator().manual_seed(2)
    start = torch.randn(40, 90, generator=g)
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = (
        Muon([ours], **settings),
        torch.optim.Muon([theirs], **settings, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        ours.grad = torch.randn(40, 90, generator=g)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    first, second = ours.detach() - start, theirs.detach() - start
    assert torch.nn.functional.cosine_similarity(first.flatten(), second.flatten(), 0) > 0.98
    assert float(first.norm() / second.norm()) == pytest.approx(1, abs=0.2)
    torch.testing.assert_close(
        optimizers[0].state[ours]["momentum_buffer"],
        optimizers[1].state[theirs]["momentum_buffer"],
    )
