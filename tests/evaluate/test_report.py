"""The report is one page that holds what the files hold, from any depth and age of evaluation."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stages.evaluate import report
from stages.params import DOMAINS

BLOCK = 4
SVG = "{http://www.w3.org/2000/svg}"
UNWRITTEN = r"\b(?:None|nan|inf|Undefined)\b"  # what a missing value must not become
VOID = {"meta", "br", "hr", "img", "input", "link"}
FULL_CHAPTERS = ("Under load", "Throughput against speed", "Longer prompts", "Sampled against")


def oldest() -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of the first evaluations."""
    domains = {
        name: {
            "acceptance_length": 1.25 + i / 16,
            "tokens_per_s_per_user": 40.5 + i,
            "baseline_tokens_per_s_per_user": 36.25 + i / 2,
            "prompts": 12,
            "drafts": 800 + i,
        }
        for i, name in enumerate(DOMAINS)
    }
    details = {
        name: {
            "accepted": 300 + i,
            "accepted_as_vllm_counts": 301 + i,
            "survival": [0.5, 0.25, 0.125, 0.0],
            "speedup": 0.95 + i / 32,
            "speed_pairs": 4,
            "first_token_s": {"drafter": 0.125 + i / 64, "baseline": 0.0625 + i / 64},
        }
        for i, name in enumerate(DOMAINS)
    }
    metrics = {
        "macro_acceptance_length": 1.5,
        "macro_speedup": 1.0625,
        "domains": domains,
        "lossless": {"checked": 9, "identical": 9},
    }
    serving = {
        "settings": {"evaluate": {"seed": 1, "compare_with": None}, "block_size": BLOCK},
        "environment": {"device": "cpu", "cpus": 2, "versions": {"torch": "2.13.0"}},
        "notes": [],
        "warnings": [],
        "domains": details,
    }
    return metrics, serving


def core() -> tuple[dict[str, Any], dict[str, Any]]:
    metrics, serving = oldest()
    metrics |= {"macro_tokens_per_round": 1.4375, "macro_acceptance_length_without_looping": 1.375}
    for i, domain in enumerate(metrics["domains"].values()):
        domain |= {
            "acceptance_length_without_looping": domain["acceptance_length"] - 0.03125,
            "looping": i % 3,
            "out_of_vocabulary": i / 128,
            "tokens_per_round": domain["acceptance_length"] - 0.015625,
        }
    serving |= {"package": "dspark-drafter", "target": "SmolLM2-135M-Instruct", "full": None}
    serving["intervals"] = {
        "macro_acceptance_length": [1.46875, 1.53125],
        "macro_speedup": [1.03125, 1.09375],
        "domains": {
            name: {
                "acceptance_length": [domain["acceptance_length"] - 0.0625, 2.0],
                "speedup": [0.9375, 1.25],
            }
            for name, domain in metrics["domains"].items()
        },
    }
    return metrics, serving


def full() -> tuple[dict[str, Any], dict[str, Any]]:
    metrics, serving = core()
    points: dict[str, list[dict[str, Any]]] = {"drafter": [], "baseline": []}
    load: dict[str, dict[str, Any]] = {}
    for concurrency in (1, 2, 4, 8, 16):
        load[str(concurrency)] = {}
        for engine, of_one in (("drafter", 50.0), ("baseline", 40.0)):
            speed = of_one / concurrency**0.375
            load[str(concurrency)][engine] = {
                "requests": 8 * concurrency,
                "failed": 0,
                "output_tokens": 800 * concurrency,
                "elapsed_s": 800 / speed,
                "tokens_per_s": speed * concurrency,
                "tokens_per_s_per_user": speed,
                "first_token_s": {"median": 0.125 * concurrency, "p95": 0.25 * concurrency},
                "inter_token_s": {"median": 1 / speed, "p95": 2 / speed},
                "acceptance_length": 1.5 if engine == "drafter" else None,
                "tokens_per_round": 1.4375 if engine == "drafter" else None,
            }
            points[engine].append(
                {
                    "concurrency": concurrency,
                    "interactivity": speed,
                    "throughput": speed * concurrency,
                }
            )
    matched = [
        {"interactivity": x, "drafter": 200 - 2 * x, "baseline": 180 - 2 * x, "ratio": 1.125 + x}
        for x in (20.0, 30.0)
    ]
    serving["full"] = {
        "load": load,
        "pareto": {
            "points": points,
            "matched": matched,
            "best_ratio": 31.125,
            "at_interactivity": 30.0,
        },
        "context": [
            {
                "prompt_tokens": tokens,
                "prompts": 6,
                "acceptance_length": 1.5,
                "tokens_per_round": 1.4375,
                "drafter_tokens_per_s": 44.0,
                "baseline_tokens_per_s": 40.0,
                "speedup": 1.1,
            }
            for tokens in (128, 256, 512)
        ],
        "context_source": "authored",
        "sampled": {
            "temperature": 1.0,
            "macro_acceptance_length": 1.3125,
            "domains": {
                name: {"acceptance_length": 1.3125, "tokens_per_round": 1.25, "prompts": 12}
                for name in DOMAINS
            },
        },
    }
    return metrics, serving


def calibration() -> dict[str, Any]:
    def side(ece: float) -> dict[str, Any]:
        bands = [(0.125, 0.0625, 40), (0.5, 0.375, 200), (0.875, 0.8125, 87), (0.95, 1.0, 3)]
        named = [{"confidence": c, "accepted": a, "blocks": n} for c, a, n in bands]
        return {"ece": ece, "auc": None, "reliability": named}

    slots = [
        {
            "slot": slot,
            "temperature": 1.25,
            "kept": slot < BLOCK,
            "blocks": 330,
            "before": side(0.0625),
            "after": side(0.015625),
        }
        for slot in range(1, BLOCK + 1)
    ]
    method = "sequential temperature scaling"
    return {"method": method, "samples": 90, "blocks": 330, "slots": slots}


BODIES = {"oldest": oldest, "core": core, "full": full}


def page(name: str, **more: Any) -> str:
    metrics, serving = BODIES[name]()
    return report.render(metrics=metrics, serving=serving, **more)


class Reader(HTMLParser):
    """Text and exact numbers of every table, by its column; refuses tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.exact: list[float] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        elif tag == "data":
            self.exact.append(float(dict(attrs)["value"] or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.words.append(data)
        if {"th", "td"} & set(self._open):
            self.tables[-1][-1][-1] += data


def numbers(value: Any) -> list[float]:
    """Every number in a body."""
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers(inner)]
    if isinstance(value, list):
        return [n for inner in value for n in numbers(inner)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def check(text: str) -> Reader:
    """What holds of every page."""
    read = Reader(text)
    assert not {"script", "link", "img", "iframe", "object"} & read.tags
    addresses = set(re.findall(r"\w+://[^\s\"'<>]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}, addresses
    assert "url(" not in text
    assert "@import" not in text
    visible = " ".join(read.words)
    assert not re.findall(UNWRITTEN, visible)
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        root = ElementTree.fromstring(picture)
        assert root.get("aria-label")
        assert root.find(f"{SVG}desc") is not None
        for element in root.iter():
            places = [element.get(key) for key in ("x", "y", "x1", "x2", "cx", "cy", "width")]
            assert all(re.fullmatch(r"-?[\d.]+(e-?\d+)?%?", place) for place in places if place)
    return read


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("calibrated", [False, True])
def test_it_is_one_self_contained_page_of_any_depth(name: str, calibrated: bool) -> None:
    text = page(name, calibration=calibration() if calibrated else None)
    check(text)
    assert ("measures it" in text) == (name != "full")
    assert ("The package holds no calibration.json." in text) != calibrated
    assert all(chapter in text for chapter in FULL_CHAPTERS)
    assert "Against" not in text
    assert text == page(name, calibration=calibration() if calibrated else None)


def test_every_number_is_in_a_table_exactly() -> None:
    metrics, serving = full()
    text = report.render(metrics=metrics, serving=serving, calibration=calibration())
    read = check(text)
    found = set(read.exact)
    shares = {d["out_of_vocabulary"] * 100 for d in metrics["domains"].values()}
    unscaled = copy.deepcopy(metrics)
    for domain in unscaled["domains"].values():
        del domain["out_of_vocabulary"]
    details = copy.deepcopy(serving["domains"])
    for detail in details.values():
        del detail["accepted_as_vllm_counts"]  # in serving.json alone
    load = copy.deepcopy(serving["full"]["load"])
    latencies = {
        value * 1000
        for engines in load.values()
        for body in engines.values()
        for value in body.pop("inter_token_s").values()
    }
    tables = [serving["full"][key] for key in ("context", "sampled")]
    expected = numbers([{k: v for k, v in unscaled.items() if k != "lossless"}, details, load])
    expected += numbers([*tables, serving["full"]["pareto"]["matched"]])
    slots = calibration()["slots"]
    expected += [slot[which]["ece"] for slot in slots for which in ("before", "after")]
    expected += [slot["temperature"] for slot in slots]
    assert {*expected, *shares, *latencies} <= found
    acceptance = read.tables[0]
    assert [row[0] for row in acceptance[1:]] == [*DOMAINS, "macro average"]
    assert acceptance[1][:3] == ["HumanEval", "1.25 1.19 – 2.00", "1.22"]
    assert acceptance[-1][1] == "1.50 1.47 – 1.53"
    assert "9 of 9" in text


def test_intervals_are_drawn_and_named_in_tooltips() -> None:
    text = page("core")
    assert "qa, with the drafter: 1.375 tokens a round, interval 1.3125 to 2" in text
    assert "interval" not in page("oldest")


def test_reliability_of_a_handful_of_blocks_is_not_drawn() -> None:
    text = page("core", calibration=calibration())
    assert "87 blocks" in text
    assert not re.search(r"\b3 blocks", text)


def test_what_is_missing_is_a_dash() -> None:
    metrics, serving = core()
    metrics["domains"]["qa"] |= {"acceptance_length": None, "tokens_per_s_per_user": None}
    metrics["macro_speedup"] = None
    serving["domains"]["qa"] |= {"speedup": None, "first_token_s": {"drafter": None}}
    serving["intervals"]["domains"]["qa"] = {"acceptance_length": None, "speedup": None}
    serving["intervals"]["macro_speedup"] = None
    text = report.render(metrics=metrics, serving=serving)
    read = check(text)
    rows = {row[0]: row for row in read.tables[0]}
    assert rows["qa"][1] == report.DASH
    speed = {row[0]: row for row in read.tables[1]}
    assert speed["qa"][1:5] == [report.DASH, report.DASH, "37.2", report.DASH]
    assert "not measured" in text


def test_a_package_without_drafts_says_so() -> None:
    metrics, serving = oldest()
    for domain in metrics["domains"].values():
        domain["acceptance_length"] = None
    metrics["macro_acceptance_length"] = None
    text = report.render(metrics=metrics, serving=serving)
    check(text)
    assert "No draft was made." in text


def test_what_is_bad_stands_out() -> None:
    metrics, serving = core()
    assert 'class="tile bad"' not in report.render(metrics=metrics, serving=serving)
    metrics["macro_speedup"] = 0.9375
    metrics["lossless"]["identical"] = 8
    serving["warnings"] = ["the machine was busy"]
    text = report.render(metrics=metrics, serving=serving)
    assert text.count('class="tile bad"') == 2
    assert "Warning: the machine was busy" in text


def test_names_and_remarks_are_text_and_not_markup() -> None:
    hostile = '<script>alert("1")</script>&\'"'
    metrics, serving = full()
    serving |= {"package": hostile, "target": hostile, "warnings": [hostile], "notes": [hostile]}
    serving["environment"][hostile] = hostile
    serving["full"]["context_source"] = hostile
    for body in (metrics, serving, serving["intervals"]):
        body["domains"][hostile] = body["domains"].pop("qa")
    body = calibration() | {"method": hostile}
    text = report.render(
        metrics=metrics, serving=serving, calibration=body, earlier=(hostile, *oldest())
    )
    read = check(text)
    assert sum(hostile in words for words in read.words) >= 10


def test_an_earlier_evaluation_is_compared_with_its_noise() -> None:
    metrics, serving = core()
    earlier_metrics, earlier_serving = core()
    earlier_metrics["macro_acceptance_length"] = 1.375
    earlier_serving["intervals"]["macro_acceptance_length"] = [1.34375, 1.40625]
    earlier_serving["intervals"]["domains"]["qa"]["acceptance_length"] = None
    earlier_serving["settings"]["evaluate"] |= {"seed": 7, "compare_with": "before"}
    earlier_serving["environment"]["extra"] = None
    text = report.render(
        metrics=metrics, serving=serving, earlier=("last week", earlier_metrics, earlier_serving)
    )
    read = check(text)
    assert "Against last week" in text
    assert "Acceptance length, macro average: 1.38 earlier, 1.50 now; higher." in text
    assert "Speed-up of one user, macro average: 1.06 earlier, 1.06 now; within noise." in text
    rows = {row[0]: row for row in read.tables[3]}
    assert rows["macro average"][3:] == ["+0.12", "higher"]
    assert rows["rag"][3:] == ["0.00", "within noise"]
    assert rows["qa"][4] == "no interval: may be noise"
    changed = read.tables[5]
    assert changed[1:] == [
        ["settings.evaluate.seed", "7", "1"],
        ["environment.extra", "null", report.DASH],
    ]


def test_every_setting_is_a_dotted_key() -> None:
    read = check(page("oldest"))
    environment, chosen = (dict(table[1:]) for table in read.tables[-2:])
    assert environment == {"device": "cpu", "cpus": "2", "versions.torch": "2.13.0"}
    assert chosen == {
        "evaluate.seed": "1",
        "evaluate.compare_with": "null",
        "block_size": str(BLOCK),
    }


def write(folder: Path, name: str) -> Path:
    folder.mkdir()
    for file, body in zip(("metrics.json", "serving.json"), BODIES[name](), strict=True):
        (folder / file).write_text(json.dumps(body))
    return folder


def test_the_command_renders_folders_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    now, earlier = write(tmp_path / "now", "full"), write(tmp_path / "earlier", "oldest")
    package = tmp_path / "package"
    package.mkdir()
    (package / "calibration.json").write_text(json.dumps(calibration()))
    out = tmp_path / "report.html"
    report.main([str(now), f"--package={package}", f"--compare={earlier}", f"--out={out}"])
    expected = page("full", calibration=calibration(), earlier=(str(earlier), *oldest()))
    assert out.read_text() == expected
    (earlier / "serving.json").unlink()
    with pytest.raises(SystemExit):
        report.main([str(now), f"--compare={earlier}", f"--out={out}"])
    assert "earlier/serving.json: no such file" in capsys.readouterr().err


positive = st.floats(0, 1e6, allow_nan=False)
maybe = st.none() | positive
interval = st.none() | st.tuples(positive, positive).map(lambda pair: sorted(pair))
count = st.integers(0, 10**6)
words = st.text(
    st.characters(exclude_categories=["C"], exclude_characters="\\/:"), max_size=12
).filter(lambda text: not re.search(UNWRITTEN, text))


def by_domain(body: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries(dict.fromkeys(DOMAINS, body))


quantiles = st.fixed_dictionaries({"median": maybe, "p95": maybe})
loads = st.fixed_dictionaries(
    {
        "requests": count,
        "failed": count,
        "output_tokens": count,
        "elapsed_s": positive,
        "tokens_per_s": positive,
        "tokens_per_s_per_user": maybe,
        "first_token_s": quantiles,
        "inter_token_s": quantiles,
        "acceptance_length": maybe,
        "tokens_per_round": maybe,
    }
)
points = st.lists(
    st.fixed_dictionaries({"concurrency": count, "interactivity": maybe, "throughput": positive}),
    max_size=4,
)
metrics_bodies = st.fixed_dictionaries(
    {
        "macro_acceptance_length": maybe,
        "macro_speedup": maybe,
        "domains": by_domain(
            st.fixed_dictionaries(
                {
                    "acceptance_length": maybe,
                    "tokens_per_s_per_user": maybe,
                    "baseline_tokens_per_s_per_user": maybe,
                    "prompts": count,
                    "drafts": count,
                },
                optional={"tokens_per_round": maybe, "out_of_vocabulary": maybe, "looping": count},
            )
        ),
        "lossless": st.fixed_dictionaries({"checked": count, "identical": count}),
    },
    optional={"macro_tokens_per_round": maybe, "macro_acceptance_length_without_looping": maybe},
)
full_bodies = st.fixed_dictionaries(
    {},
    optional={
        "load": st.dictionaries(
            st.integers(1, 4096).map(str),
            st.fixed_dictionaries({}, optional={"drafter": loads, "baseline": loads}),
            max_size=4,
        ),
        "pareto": st.fixed_dictionaries(
            {
                "points": st.fixed_dictionaries({"drafter": points, "baseline": points}),
                "matched": st.lists(
                    st.fixed_dictionaries(
                        dict.fromkeys(("interactivity", "drafter", "baseline", "ratio"), positive)
                    ),
                    max_size=3,
                ),
                "best_ratio": maybe,
                "at_interactivity": maybe,
            }
        ),
        "context": st.lists(
            st.fixed_dictionaries(
                {
                    "prompt_tokens": st.integers(1, 10**6),
                    "prompts": count,
                    "acceptance_length": maybe,
                    "tokens_per_round": maybe,
                    "drafter_tokens_per_s": maybe,
                    "baseline_tokens_per_s": maybe,
                    "speedup": maybe,
                }
            ),
            max_size=4,
        ),
        "context_source": words,
        "sampled": st.fixed_dictionaries(
            {
                "temperature": positive,
                "macro_acceptance_length": maybe,
                "domains": by_domain(
                    st.fixed_dictionaries(
                        {"acceptance_length": maybe, "tokens_per_round": maybe, "prompts": count}
                    )
                ),
            }
        ),
    },
)
serving_bodies = st.fixed_dictionaries(
    {
        "settings": st.dictionaries(words, words | count | st.none(), max_size=3),
        "environment": st.dictionaries(words, words | st.lists(count, max_size=2), max_size=3),
        "notes": st.lists(words, max_size=2),
        "warnings": st.lists(words, max_size=2),
        "domains": by_domain(
            st.fixed_dictionaries(
                {
                    "accepted": count,
                    "survival": st.lists(st.floats(0, 1), min_size=BLOCK, max_size=BLOCK).map(
                        lambda shares: sorted(shares, reverse=True)
                    ),
                    "speedup": maybe,
                    "speed_pairs": count,
                    "first_token_s": st.fixed_dictionaries({"drafter": maybe, "baseline": maybe}),
                }
            )
        ),
    },
    optional={
        "package": words,
        "full": st.none() | full_bodies,
        "intervals": st.fixed_dictionaries(
            {
                "macro_acceptance_length": interval,
                "macro_speedup": interval,
                "domains": by_domain(
                    st.fixed_dictionaries({"acceptance_length": interval, "speedup": interval})
                ),
            }
        ),
    },
)


@given(
    now=st.tuples(metrics_bodies, serving_bodies), before=st.tuples(metrics_bodies, serving_bodies)
)
@settings(max_examples=25, phases=(Phase.reuse, Phase.generate))  # shrinking takes minutes
def test_every_body_of_the_schema_renders(now: Any, before: Any) -> None:
    check(report.render(metrics=now[0], serving=now[1], earlier=("earlier", *before)))
