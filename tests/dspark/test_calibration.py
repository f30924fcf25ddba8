"""Temperature scaling recovers known temperatures, and its measures agree with scikit-learn's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import roc_auc_score

from stages.dspark.calibration import (
    NUM_BINS,
    Blocks,
    area_under_curve,
    calibrated,
    expected_calibration_error,
    fit,
    reliability,
)

TEMPERATURES = torch.tensor([2.0, 0.5, 1.0])


def overconfident(num_blocks: int, *, seed: int = 0) -> Blocks:
    """Blocks whose confidences are right once their logits are divided by TEMPERATURES."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.rand(num_blocks, 3, generator=g).clamp(0.02, 0.98)
    hits = torch.rand(num_blocks, 3, generator=g) < truth
    return Blocks(
        confidences=(truth.logit() * TEMPERATURES).sigmoid(),
        accepted=hits.long().cumprod(-1).sum(-1),
        slots=torch.full((num_blocks,), 3),
        sample=torch.arange(num_blocks) // 10,
    )


def test_known_temperatures_are_found_and_errors_fall() -> None:
    fitted = fit(overconfident(60_000), min_blocks=200, max_temperature=4.0)
    found = [slot["temperature"] for slot in fitted["slots"]]
    assert found[:2] == pytest.approx(TEMPERATURES[:2].tolist(), rel=0.2)
    for slot in fitted["slots"][:2]:
        assert slot["kept"]
        assert slot["after"]["ece"] < 0.5 * slot["before"]["ece"]
    assert fitted["samples"] == 6_000
    assert fitted["blocks"] == 60_000


def test_temperatures_stay_within_their_bounds() -> None:
    fitted = fit(overconfident(20_000), min_blocks=200, max_temperature=1.3)
    assert all(1 / 1.301 <= slot["temperature"] <= 1.301 for slot in fitted["slots"])
    assert fitted["slots"][0]["temperature"] == pytest.approx(1.3, rel=1e-3)


def test_a_slot_with_too_few_blocks_keeps_its_temperature() -> None:
    blocks = overconfident(20_000)
    blocks = blocks._replace(slots=torch.where(torch.arange(20_000) < 300, 3, 1))
    fitted = fit(blocks, min_blocks=200, max_temperature=4.0)
    assert [slot["kept"] for slot in fitted["slots"]] == [True, False, False]
    assert [slot["blocks"] for slot in fitted["slots"]] == [20_000, 300, 300]


def test_what_only_the_first_set_asks_for_is_not_kept() -> None:
    """Every second response is calibrated already: there the other half's temperature harms."""
    blocks = overconfident(20_000)
    right = calibrated(blocks.confidences, TEMPERATURES)
    second = (blocks.sample % 2 == 1).unsqueeze(-1)
    mixed = blocks._replace(confidences=torch.where(second, right, blocks.confidences))
    fitted = fit(mixed, min_blocks=200, max_temperature=4.0)
    assert not fitted["slots"][0]["kept"]


def test_no_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="held-out blocks are empty"):
        fit(overconfident(0), min_blocks=1, max_temperature=4.0)


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=2, max_size=60))
def test_area_under_curve_and_bins_equal_scikit_learns(rows: list[tuple[int, bool]]) -> None:
    probability = torch.tensor([value / 20 for value, _ in rows])
    happened = torch.tensor([hit for _, hit in rows])
    got = area_under_curve(probability, happened)
    if bool(happened.all()) or not bool(happened.any()):
        assert got is None
    else:
        expected = roc_auc_score(happened.numpy(), probability.numpy())
        assert got == pytest.approx(expected, abs=1e-9)
    # Off the edges: which bin an edge falls into is a convention.
    inner = probability * 0.97 + 0.011
    bins = reliability(inner, happened)
    share, mean = calibration_curve(happened.numpy(), inner.numpy(), n_bins=NUM_BINS)
    assert [bin["accepted"] for bin in bins] == pytest.approx(share.tolist(), abs=1e-6)
    assert [bin["confidence"] for bin in bins] == pytest.approx(mean.tolist(), abs=1e-6)
    assert 0 <= expected_calibration_error(bins) <= 1


@given(st.floats(0.3, 3.0))
def test_scaling_keeps_the_order_of_confidences(temperature: float) -> None:
    confidences = torch.linspace(0.01, 0.99, 50).unsqueeze(-1)
    scaled = calibrated(confidences, torch.tensor([temperature])).flatten()
    assert bool((scaled.diff() > 0).all())
