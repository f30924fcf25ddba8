"""Prompts that the target writes itself: its own user turns, begun for it (Magpie, Xu et al. 2024).

    python -m tools.sample_prompts --target data/target --out data/authored/sampled [--number 300]

A chat model continues its template's user turn as readily as an assistant's. Each domain's
openings (openings.yaml in the out folder) are taken in turn, and the target ends the turn at
temperature 0.9; turns that do not end within 140 tokens, repeat, or hold one of `skip` are dropped.
Writes <out>/<domain>.jsonl, for sources of kind file. Cost on two cores: about six minutes for
2,700 turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path

import yaml

TEMPERATURE = 0.9
MAX_TOKENS = 140
MAX_MODEL_LEN = 512
MARK = "@@user@@"  # stands for the user's text in the rendered template


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="holds openings.yaml")
    parser.add_argument("--number", type=int, default=300, help="turns to begin, a domain")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    plan = yaml.safe_load((arguments.out / "openings.yaml").read_text())
    begun = [
        (domain, opening)
        for domain, openings in plan["openings"].items()
        for opening in itertools.islice(itertools.cycle(openings), arguments.number)
    ]
    ended = continued(arguments.target, [opening for _, opening in begun], seed=arguments.seed)
    skip = re.compile("|".join(map(re.escape, plan["skip"])), re.IGNORECASE)
    kept: dict[str, dict[str, None]] = {domain: {} for domain in plan["openings"]}
    for (domain, opening), rest in zip(begun, ended, strict=True):
        if rest is not None and not skip.search(opening + rest):
            kept[domain][(opening + rest).strip()] = None
    for domain, prompts in kept.items():
        lines = (json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts)
        (arguments.out / f"{domain}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        print(f"{domain}: {len(prompts)} of {arguments.number}")


def continued(target: Path, openings: list[str], *, seed: int) -> list[str | None]:
    """What the target adds to each opening of a user turn; None where it does not end the turn."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(target)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before, _, after = rendered.partition(MARK)
    end = tokenizer.encode(after, add_special_tokens=False)[0]
    engine = LLM(str(target), max_model_len=MAX_MODEL_LEN, enforce_eager=True, seed=seed)
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS, stop_token_ids=[end])
    outputs = engine.generate([before + opening for opening in openings], sampling)
    return [
        output.outputs[0].text if output.outputs[0].finish_reason == "stop" else None
        for output in outputs
    ]


if __name__ == "__main__":
    main()
