"""bench-quality: a split that depends on content alone, results that are found again, one judge."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.quality import results
from bench.quality.budget import train
from bench.quality.problem import Problem, held_out
from bench.quality.settings import load_settings
from bench.quality.split import read_sets, split_sets
from stages.prepare.prompt import user_prompt

SETTINGS = load_settings()


def _prompts(name, texts):
    return [user_prompt(name, text, source="") for text in texts]


def _texts(half):
    return {name: {p.messages[0]["content"] for p in prompts} for name, prompts in half.items()}


@given(
    sizes=st.lists(st.integers(2, 60), min_size=1, max_size=3),
    refused=st.sets(st.integers(0, 59), max_size=1),
    shuffled=st.randoms(use_true_random=False),
)
def test_every_set_is_on_both_sides_and_the_split_is_the_contents_alone(sizes, refused, shuffled):
    texts = {f"s{i}": [f"s{i} {n}" for n in range(size + 1)] for i, size in enumerate(sizes)}
    names = {f"s0 {n}" for n in refused}

    def split(order):
        sets = {name: _prompts(name, order(rows)) for name, rows in texts.items()}
        return split_sets(
            sets,
            settings=SETTINGS.split,
            refuse=lambda p: "too_long" if p.messages[0]["content"] in names else None,
        )

    found = split(lambda rows: rows)
    train, test = _texts(found.train), _texts(found.test)
    for name, rows in texts.items():
        assert train[name]
        assert test[name]
        assert not train[name] & test[name]
        assert train[name] | test[name] == set(rows) - names
        usable = len(train[name]) + len(test[name])
        assert len(test[name]) >= min(SETTINGS.split.min_test_prompts, usable // 2)
    assert found.left_out.total() == sum(text in names for rows in texts.values() for text in rows)
    again = split(lambda rows: shuffled.sample(rows, len(rows)))
    assert (_texts(again.train), _texts(again.test)) == (train, test)


def test_a_prompt_of_two_sets_is_in_one_half_only():
    sets = {"a": _prompts("a", map(str, range(30))), "b": _prompts("b", map(str, range(60)))}
    split = split_sets(sets, settings=SETTINGS.split, refuse=lambda _: None)
    assert split.left_out == {"duplicate": 30}
    halves = [_texts(split.train), _texts(split.test)]
    assert not set.union(*halves[0].values()) & set.union(*halves[1].values())


def test_a_set_of_one_prompt_is_refused_with_its_name():
    with pytest.raises(ValueError, match="set lonely: 1 of its 1 prompts can be used"):
        split_sets(
            {"lonely": _prompts("lonely", ["x"])}, settings=SETTINGS.split, refuse=lambda _: None
        )


def test_rows_that_are_no_prompts_are_counted(order):
    with (order.prompts / "chat.jsonl").open("a") as file:
        file.write('\n{"question": "no messages"}\nnot json\n')
    sets, rejected = read_sets(order.prompts)
    assert {name: len(prompts) for name, prompts in sets.items()} == {"chat": 8, "code": 8}
    assert rejected == {"unknown_shape": 1, "not_json": 1}


@given(
    reached=st.dictionaries(
        st.tuples(st.sampled_from(results.TRAINERS), st.integers(1, 3), st.sampled_from([0.1, 1])),
        st.lists(st.floats(1, 5), min_size=1, max_size=2),
        min_size=1,
    )
)
def test_the_summary_is_the_median_over_seeds_of_the_better_rate_and_later_lines_win(reached):
    own = {trainer: {"of": trainer} for trainer in results.TRAINERS}

    def row(trainer, seed, rate, value, settings):
        return {
            "trainer": trainer,
            "seed": seed,
            "budget_core_s": 300,
            "learning_rate": rate,
            "macro_acceptance_length": value,
            "settings": settings,
            "core_s": 300.0,
            "steps": 5,
        }

    rows = [row(t, s, r, v, own[t]) for (t, s, r), values in reached.items() for v in values]
    rows.append(row("ours", 1, 0.1, 99.0, {"of": "other settings"}))
    entry = results.summary(rows, budgets=[300, 1200], settings=own)["budget_300"]
    spreads = [0.0]
    for trainer in results.TRAINERS:
        by_seed = {}
        for (t, seed, _), values in reached.items():
            if t == trainer:
                by_seed[seed] = max(by_seed.get(seed, 0), values[-1])
        expected = round(median(by_seed.values()), 3) if by_seed else None
        assert entry[trainer] == expected
        spreads += [max(by_seed.values()) - min(by_seed.values())] if by_seed else []
    assert entry["spread"] == pytest.approx(max(spreads), abs=1e-3)
    if entry["ours"] and entry["peer"]:
        assert entry["ahead"] == pytest.approx(entry["ours"] - entry["peer"], abs=2e-3)


def test_the_timed_contender_is_thrown_away_and_the_schedule_ends_with_the_run():
    built = []

    class Busy:
        def __init__(self):
            self.factors = []
            built.append(self)

        def step(self, factor):
            self.factors.append(factor)
            sum(range(10_000))
            return 1.0

        def packaged(self):
            return {}

    kept, run = train(
        Busy,
        budget_core_s=0.05,
        schedule=lambda step, num_steps: (step + 1) / num_steps,
        settings=SETTINGS.budget,
        name="busy",
    )
    thrown_away, trained = built
    assert kept is trained
    assert set(thrown_away.factors) == {0.0}
    assert len(trained.factors) == run.steps
    assert trained.factors[-1] == 1.0
    assert all(factor < 1 for factor in trained.factors[:-1])


def test_a_finished_run_is_not_run_again_and_an_interrupted_bench_goes_on(bench, finished_data):
    first = bench.run()
    lines = bench.order.file.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    # both rates at the small budget, the better one at the other
    assert [(row["budget_core_s"], row["learning_rate"]) for row in rows[:2]] == [
        (0.2, bench.params.train.learning_rate),
        (0.2, bench.settings.peer.learning_rate),
    ]
    better = max(rows[:2], key=lambda row: row["macro_acceptance_length"])
    assert [row["learning_rate"] for row in rows[2:]] == [better["learning_rate"]]
    assert all(set(row["sets"]) == {"chat", "code"} for row in rows)
    assert first["budget_0.4"]["ours"] == round(rows[2]["macro_acceptance_length"], 3)

    # killed while the second line was written
    bench.order.file.write_text(lines[0] + "\n" + lines[1][:40])
    bench.run()
    again = bench.order.file.read_text().splitlines()
    assert again[0] == lines[0]
    assert len(again) == 3

    # a whole file needs no data; another seed does
    (finished_data / "target/manifest.json").unlink()
    fresh = replace(bench, order=replace(bench.order, cache=bench.order.cache / "none"))
    fresh.run()
    assert bench.order.file.read_text().splitlines() == again
    assert not fresh.order.cache.exists()


def test_a_diverged_run_is_a_result_and_no_error(bench, finished_data):
    train = bench.params.train.model_copy(update={"learning_rate": 1e30, "max_grad_norm": 1e30})
    params = bench.params.model_copy(update={"train": train})
    summary = replace(bench, params=params).run()
    rows = [json.loads(line) for line in bench.order.file.read_text().splitlines()]
    assert [row["diverged"] for row in rows] == [True, False, False]
    assert rows[0]["macro_acceptance_length"] == 1.0
    assert summary["budget_0.2"]["ours"] >= 1.0


@pytest.mark.peer
def test_both_trainers_learn_and_are_judged_by_the_same_drafter(bench, finished_data):
    from bench.quality.ours import Ours
    from bench.quality.peer import Peer, convert, disagreement

    problem = Problem.of(bench.make_data(), bench.params)
    peer = Peer(problem, settings=bench.settings.peer, seed=1, learning_rate=0.02)
    ours = Ours(problem, seed=1, learning_rate=0.02)
    reached = {}
    for name, contender in (("peer", peer), ("ours", ours)):
        losses = [contender.step(1.0) for _ in range(60)]
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), name
        sets = held_out(problem, contender.packaged())
        assert set(sets) == {"chat", "code"}
        reached[name] = min(entry["acceptance_length"] for entry in sets.values())
    assert min(reached.values()) > 1.3, reached

    # the check would notice another mask token's drafter: weights that are not the model's
    tensors = convert(peer.model, problem)
    assert disagreement(peer.model, tensors, problem) < 1e-5
    tensors["markov_head.markov_w2.weight"] += 0.1
    assert disagreement(peer.model, tensors, problem) > SETTINGS.peer.logit_tolerance
