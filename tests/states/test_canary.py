"""What the canary compares, and with which measure."""

from __future__ import annotations

import pytest
import torch

from stages.states.canary import chosen, relative_errors


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_chosen_samples_differ_and_the_longest_is_among_them(count: int) -> None:
    samples = [{"id": str(n), "num_tokens": n} for n in (5, 90, 12, 40, 33)]
    picked = [sample["num_tokens"] for sample in chosen(samples, count=count)]
    assert len(set(picked)) == len(picked) == min(count, len(samples))
    assert 90 in picked


def test_one_plane_off_shows_in_that_plane_alone() -> None:
    torch.manual_seed(0)
    expected = torch.randn(7, 3, 16) * torch.tensor([1e-3, 1.0, 1e4]).view(1, 3, 1)
    found = (expected * (1 + 0.004 * torch.randn_like(expected))).bfloat16()
    found[:, 1] = torch.randn(7, 16)
    errors = relative_errors(found, expected)
    assert errors[1] > 0.5
    assert max(errors[0], errors[2]) < 0.02


def test_nan_is_an_error() -> None:
    expected = torch.ones(2, 1, 4)
    found = expected.bfloat16()
    found[0, 0, 0] = float("nan")
    assert not relative_errors(found, expected)[0] <= 1e9
