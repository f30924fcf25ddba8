"""The results table says what was measured, and says plainly what is bad or missing."""

from __future__ import annotations

from typing import Any

from stages.params import DOMAINS
from stages.summary import format_summary


def metrics(**changes: Any) -> dict[str, Any]:
    domain = {
        "acceptance_length": 1.5,
        "tokens_per_s_per_user": 60.0,
        "baseline_tokens_per_s_per_user": 40.0,
        "speedup": 1.45,
        "prompts": 12,
        "drafts": 800,
    }
    return {
        "macro_acceptance_length": 1.5,
        "macro_speedup": 1.49,
        "domains": {name: dict(domain) for name in DOMAINS},
        "lossless": {"checked": 9, "identical": 9},
        **changes,
    }


def test_nine_domains_and_the_macro_average_are_printed() -> None:
    lines = format_summary(metrics()).splitlines()
    for name in DOMAINS:
        row = next(line for line in lines if line.startswith(name + " "))
        assert row.split()[-4:] == ["1.50", "60.0", "40.0", "1.45x"]
    assert next(line for line in lines if line.startswith("macro")).split()[-2:] == [
        "1.50",
        "1.49x",
    ]
    assert len({len(line) for line in lines[:13]}) == 1
    assert "below" not in format_summary(metrics()).lower()
    assert "9 of 9" in lines[-1]


def test_a_slow_domain_and_a_slow_whole_are_named() -> None:
    body = metrics(macro_speedup=0.93)
    body["domains"]["rag"]["speedup"] = 0.75
    text = format_summary(body)
    assert "BELOW the plain engine's: 0.93x" in text
    assert "below 1.0x in: rag (0.75x)" in text
    body["domains"]["rag"]["speedup"] = 0.996  # printed as 1.00x
    assert "below 1.0x" not in format_summary(body)


def test_what_was_not_measured_is_a_dash_and_said_so() -> None:
    body = metrics(macro_speedup=None)
    for domain in body["domains"].values():
        domain |= dict.fromkeys(
            ("tokens_per_s_per_user", "baseline_tokens_per_s_per_user", "speedup")
        )
    text = format_summary(body)
    assert text.splitlines()[2].split()[-3:] == ["-", "-", "-"]
    assert "Speed not measured" in text


def test_the_full_depth_is_summed_up_in_three_lines() -> None:
    full = {
        "throughput_c1": 50.2,
        "throughput_c16": 300.0,
        "baseline_throughput_c1": 38.0,
        "baseline_throughput_c16": 350.4,
        "matched_interactivity_ratio": 1.31,
        "matched_interactivity": 30.04,
        "acceptance_length_context_128": 1.5,
        "speedup_context_128": 1.25,
        "acceptance_length_context_2048": 1.1,
        "speedup_context_2048": None,
        "acceptance_length_c1": 1.4,
    }
    lines = format_summary(metrics(full=full)).splitlines()
    assert lines[-4:-1] == [
        "Tokens/s with/without the drafter by requests at once: 1: 50/38, 16: 300/350.",
        "Throughput at matched interactivity: 1.31x at 30.0 tokens/s a user.",
        "Acceptance length and speed-up by prompt tokens: 128: 1.50, 1.25x; 2048: 1.10, -.",
    ]
    assert format_summary(metrics()).splitlines()[:-1] == lines[:-4]
