"""Templates are filled completely and readably, and there are enough of them."""

from __future__ import annotations

import random
import re
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.params import DOMAINS
from stages.prepare.authored import expand, load
from stages.sources import AuthoredSource

FOLDER = Path(__file__).resolve().parents[2] / "data" / "authored"
WRITTEN = [domain for domain in DOMAINS if domain not in ("HumanEval", "tool_call")]
BANKS = {
    "thing": ["apple", "dog", "eel", "unicorn"],
    "who": [{"name": "Ann", "they": "she"}, {"name": "Bob", "they": "he"}],
    "topic": [{"facts": ["first.", "second.", "third.", "fourth."], "title": "a {thing}"}],
}


@given(seed=st.integers())
def test_placeholders_keep_their_value_and_numbered_ones_differ(seed: int) -> None:
    def fill(template: str) -> str:
        return expand(template, BANKS, random.Random(seed))

    one, again, other = fill("{thing} {thing} {thing.2}").lower().split()
    assert one == again != other
    assert fill("{who:name} {who:they}") in ("Ann she", "Bob he")
    low, again = map(int, fill("{n=10..20/5} {n}").split())
    assert low == again
    assert low in (10, 15, 20)
    assert fill("so [yes|no {thing}|]").startswith("So")
    assert fill("{topic:facts*3}").startswith("First. ")
    assert len(fill("{topic:facts*3}").split()) == 3
    assert re.fullmatch(r"See (an (apple|eel)|a (dog|unicorn))", fill("see {topic:title}"))


@pytest.mark.parametrize("template", ["{nothing}", "{who:age}", "a {b", "[a|b"])
def test_a_template_that_cannot_be_filled_is_an_error(template: str) -> None:
    with pytest.raises(ValueError, match=r"names no bank|no 'age'|not filled"):
        expand(template, BANKS, random.Random(1))


@pytest.mark.parametrize("domain", WRITTEN)
def test_a_domain_has_two_hundred_training_prompts_that_read_as_text(domain: str) -> None:
    (found,) = load(AuthoredSource(kind="authored", domains=[domain]), folder=FOLDER, seed=7)
    texts = [prompt.messages[0]["content"] for prompt in islice(found.train, 400)]
    assert len(set(texts)) >= 200
    assert len(list(found.evaluation)) >= 12
    for text in texts:
        assert text == text.strip()
        assert not re.search(r"[{}\[\]\0]|  |\ba [aei]\w|\n\n\n", text), text
        assert re.match(r"[A-Z0-9\"¿\"ÀÁÉÈÊÜÖÄ]", text), text


def test_the_seed_decides_the_training_prompts_and_not_the_evaluation_prompts() -> None:
    def draw(seed: int) -> tuple[list[str], list[str]]:
        (found,) = load(AuthoredSource(kind="authored", domains=["qa"]), folder=FOLDER, seed=seed)
        return [p.id for p in islice(found.train, 50)], [p.id for p in found.evaluation]

    assert draw(1) == draw(1)
    assert draw(1)[0] != draw(2)[0]
    assert draw(1)[1] == draw(2)[1]
