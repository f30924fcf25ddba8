"""How long a run is and what it does when: pure, so checked without training."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.params import TrainParams, check_params, load_params
from stages.train import schedule
from stages.train.divergence import FEWEST, Divergence, Watch
from stages.train.report import time_left_s

PARAMS = load_params(Path(__file__).parents[2] / "params.yaml").train
LENGTHS = [20, 30, 40, 50] * 25


def changed(**changes: object) -> TrainParams:
    return PARAMS.model_copy(update=changes)


def test_the_learning_rate_warms_up_and_ends_at_its_minimum() -> None:
    rates = [schedule.learning_rate(step, num_steps=100, params=PARAMS) for step in range(100)]
    peak = max(range(100), key=rates.__getitem__)
    assert rates[peak] == pytest.approx(PARAMS.learning_rate)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] >= PARAMS.learning_rate * PARAMS.min_learning_rate_fraction


@given(num_steps=st.integers(schedule.PROBE_STEPS, 5000))
def test_the_rate_of_a_budgets_probe_does_not_depend_on_what_the_probe_finds(
    num_steps: int,
) -> None:
    params = changed(budget_s=100.0)
    for step in range(schedule.PROBE_STEPS):
        known = schedule.learning_rate(step, num_steps=num_steps, params=params)
        assert known == schedule.learning_rate(step, num_steps=None, params=params)


def test_a_budget_becomes_the_steps_that_fit_it() -> None:
    probe = [5.0, 1.0, 1.0] + [0.5] * (schedule.PROBE_STEPS - 3)
    spent = sum(probe)
    assert schedule.steps_in_budget(probe, budget_s=spent + 100) == schedule.PROBE_STEPS + 200
    assert schedule.steps_in_budget(probe, budget_s=1.0) == schedule.PROBE_STEPS


def test_epochs_repeat_or_are_cut_to_the_steps() -> None:
    whole = schedule.known_steps(LENGTHS, changed(num_epochs=2))
    assert whole is not None
    steps = list(itertools.islice(schedule.plan(LENGTHS, PARAMS), whole + 1))
    for epoch in (0, 1):
        documents = [i for at, batch in steps if at == epoch for i in batch]
        assert sorted(documents) == list(range(len(LENGTHS)))
    assert steps[whole][0] == 2
    assert schedule.known_steps(LENGTHS, changed(max_steps=3)) == 3
    assert schedule.known_steps(LENGTHS, changed(budget_s=3.0)) is None


def test_two_lengths_at_once_are_refused() -> None:
    params = load_params(Path(__file__).parents[2] / "params.yaml").model_dump()
    params["train"] |= {"max_steps": 10, "budget_s": 60.0}
    with pytest.raises(ValueError, match=r"max_steps \(10\) and budget_s \(60\).*to null"):
        check_params(params, "here")


@given(gains=st.lists(st.sampled_from([0.0, 0.004, 0.02]), max_size=30), patience=st.integers(1, 4))
def test_a_run_stalls_after_that_many_validations_without_a_gain(
    gains: list[float], patience: int
) -> None:
    lengths = list(itertools.accumulate(gains, initial=1.0))
    curve = [{"validation_acceptance_length": length} for length in lengths]
    params = changed(early_stop_patience=patience, early_stop_min_gain=0.01)
    best_at, best = 0, lengths[0]
    for at, length in enumerate(lengths):
        if length >= best + 0.01:
            best_at, best = at, length
    assert schedule.stalled(curve, params) == (len(lengths) - 1 - best_at >= patience)
    assert not schedule.stalled(curve, changed(early_stop_patience=None))


def test_noise_is_no_divergence_and_a_few_bad_steps_are_forgiven() -> None:
    watch = Watch(changed(divergence_factor=1.5, divergence_steps=3))
    losses = [2.0, 1.2, 2.8, 1.9] * 20 + [9.0, 9.0] + [2.0] * 10 + [9.0, 9.0]
    for step, loss in enumerate(losses):
        watch.check(step=step, loss=loss, gradient_norm=1.0)
    assert watch.suspicious
    with pytest.raises(Divergence, match=r"9 at step 99.*1.5 times its median of 2"):
        watch.check(step=99, loss=9.0, gradient_norm=1.0)


def test_the_first_losses_may_be_anything_but_must_be_finite() -> None:
    watch = Watch(changed(divergence_steps=1))
    for step in range(FEWEST):
        watch.check(step=step, loss=10.0**-step, gradient_norm=1.0)
    with pytest.raises(Divergence, match="the gradient norm is inf at step 7"):
        watch.check(step=7, loss=1.0, gradient_norm=float("inf"))


def test_the_time_left_counts_validations() -> None:
    left = time_left_s(step=50, num_steps=100, validations=4, step_s=2.0, validation_s=30.0)
    assert left == 50 * 2.0 + 2 * 30.0
