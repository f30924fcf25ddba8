"""The data of both trainers, made once by the project's own stages and kept in a cache folder.

target, generate and extract run as they do in the pipeline, through a real vLLM and Mooncake; only
the prompts come from elsewhere. A set's name stands in the domain column, and the test prompts in
the split `validation`. Cost: about 9 core-ms a response token. An interrupted run resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.quality.settings import Settings
from bench.quality.split import Refusal, content_fingerprint, read_sets, split_sets
from stages import contracts
from stages.extract import stage as extract_stage
from stages.generate import stage as generate_stage
from stages.params import Params, Services
from stages.prepare.prompt import Prompt
from stages.prepare.stage import prompt_row
from stages.serving.chat import Renderer, RenderError
from stages.shards import ShardReader, read_samples
from stages.states.source import CachedStates
from stages.target import stage as target_stage
from stages.train.stage import trainable

# The keys of params.yaml that decide the data; the others in these sections bound its making.
DECIDES = {
    "target": ("source", "revision", "mask_token"),
    "engine": ("dtype", "max_model_len"),
    "generate": (
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "chat_template_kwargs",
        "truncated",
        "looping",
        "loop_ngram",
        "loop_repeats",
    ),
    "extract": ("layer_ids", "prompt_tokens"),
}

Sample = dict[str, Any]  # a row of contracts.SAMPLES; its domain is the set's name


@dataclass(frozen=True, kw_only=True)
class Data:
    """What both trainers are given."""

    target: Path
    target_manifest: contracts.Manifest
    reader: ShardReader
    source: CachedStates
    layer_ids: tuple[int, ...]
    train: Sequence[Sample]
    test: Sequence[Sample]
    counts: dict[str, Any]


def recipe(prompts: Path, *, params: Params, settings: Settings) -> dict[str, Any]:
    """Everything that decides the data. Raises ValueError for a folder without sets."""
    return {
        "prompts": content_fingerprint(prompts),
        "split": settings.split.model_dump(mode="json"),
        "max_prompt_tokens": params.prepare.max_prompt_tokens,
        **{
            section: {key: body[key] for key in keys}
            for section, keys in DECIDES.items()
            for body in [getattr(params, section).model_dump(mode="json")]
        },
    }


def make(
    prompts: Path,
    *,
    recipe: dict[str, Any],
    params: Params,
    services: Services,
    settings: Settings,
    cache: Path,
) -> Data:
    """The data of `prompts`, from the cache where it is there. Raises ValueError for prompts that
    cannot be used and for services that fail."""
    folder = folder_of(cache, recipe).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prompts = prompts.resolve()
    # The stages keep their unfinished work in ./run and wipe what is of other recipes there.
    with chdir(folder):
        _run_stages(prompts, recipe=recipe, params=params, services=services, settings=settings)
    return load(folder)


def folder_of(cache: Path, recipe: dict[str, Any]) -> Path:
    """Where the data of a recipe lies."""
    return cache / f"data-{contracts.fingerprint(recipe)[:12]}"


def load(folder: Path) -> Data:
    """Finished data, checked against its manifests."""
    manifest = contracts.read_manifest(folder / "hidden_states", "extract")
    samples = [s for s in read_samples(folder / "hidden_states") if trainable(s)]
    prompts = contracts.read_manifest(folder / "prompts", "prepare")
    return Data(
        target=folder / "target",
        target_manifest=contracts.read_manifest(folder / "target", "target"),
        reader=ShardReader.of(folder / "hidden_states", manifest),
        source=CachedStates(folder / "hidden_states", manifest),
        layer_ids=tuple(manifest.info["layer_ids"]),
        train=[s for s in samples if s["split"] == contracts.TRAIN],
        test=[s for s in samples if s["split"] == contracts.VALIDATION],
        counts={**prompts.counts, "left_out": prompts.rejected},
    )


def _run_stages(
    prompts: Path,
    *,
    recipe: dict[str, Any],
    params: Params,
    services: Services,
    settings: Settings,
) -> None:
    """Runs what the current folder does not have yet."""
    target, chosen = Path("target"), Path("prompts")
    conversations, states = Path("conversations"), Path("hidden_states")
    if not _made(target):
        target_stage.run(target=params.target, out=target)
    if not _made(chosen):
        _write_prompts(prompts, recipe=recipe, params=params, settings=settings, out=chosen)
    if not _made(conversations):
        generate_stage.run(
            engine=params.engine,
            generate=params.generate,
            services=services,
            target=target,
            prompts=chosen,
            out=conversations,
        )
    if not _made(states):
        extract_stage.run(
            engine=params.engine,
            extract=params.extract,
            services=services,
            target=target,
            conversations=conversations,
            out=states,
        )


def _made(artifact: Path) -> bool:
    return (artifact / contracts.MANIFEST).is_file()


def _write_prompts(
    prompts: Path, *, recipe: dict[str, Any], params: Params, settings: Settings, out: Path
) -> None:
    """The artifact that `generate` reads, with the sets' names as domains."""
    renderer = Renderer(Path("target"), trust_remote_code=params.target.trust_remote_code)
    mask_token_id = contracts.read_manifest(Path("target"), "target").info["mask_token_id"]

    def refuse(prompt: Prompt) -> Refusal:
        try:
            ids = renderer.render(
                prompt.messages,
                tools=prompt.tools,
                chat_template_kwargs=params.generate.chat_template_kwargs,
            )
        except RenderError:
            return "template_refuses"
        if len(ids) > params.prepare.max_prompt_tokens:
            return "too_long"
        return "mask_token" if mask_token_id in ids else None

    sets, rejected = read_sets(prompts)
    split = split_sets(sets, settings=settings.split, refuse=refuse)
    work = Path("run/prompts")
    work.mkdir(parents=True, exist_ok=True)
    halves = {contracts.TRAIN: split.train, contracts.VALIDATION: split.test}
    for half, chosen in halves.items():
        rows = [prompt_row(prompt, half) for name in chosen for prompt in chosen[name]]
        contracts.write_table(work / f"{half}.parquet", rows, contracts.PROMPTS)
    counts = {
        f"{side}/{name}": len(chosen[name])
        for side, chosen in (("train", split.train), ("test", split.test))
        for name in chosen
    }
    left_out = dict(sorted((split.left_out + rejected).items()))
    contracts.write_manifest(
        work,
        contracts.Manifest(kind="prepare", recipe=recipe, counts=counts, rejected=left_out),
    )
    contracts.publish(work, out)
    print(f"prompts: {counts}; left out {left_out or 'none'}", flush=True)
