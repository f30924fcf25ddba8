"""Prompts for training and validation, and nine frozen evaluation sets.

Cost: seconds, most of them the import of the tokenizer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages import contracts
from stages.params import DOMAINS, PrepareParams
from stages.prepare import authored as authored_source
from stages.prepare import bfcl, datasets_source, files, human_eval
from stages.prepare.overlap import OverlapIndex
from stages.prepare.prompt import Candidates, Prompt, Reject
from stages.prepare.selection import Fault, Selection, choose_evaluation, choose_train
from stages.serving.chat import Renderer, RenderError
from stages.sources import (
    AuthoredSource,
    BfclSource,
    DatasetSource,
    FileSource,
    HumanEvalSource,
    Source,
)


def run(*, prepare: PrepareParams, target: Path, authored: Path, out: Path) -> None:
    """Writes train, validation and evaluation-<domain>.parquet with the reject ledger.

    Raises ValueError for a source that cannot be read, a domain without its evaluation prompts,
    evaluation sets that differ from prepare.evaluation_checksum, or too many rejects.
    """
    target_manifest = contracts.read_manifest(target, "target")
    recipe = contracts.recipe({"prepare": prepare}, {"target": target_manifest})
    recipe["inputs"]["authored"] = _folder_fingerprint(authored)
    recipe["inputs"]["files"] = {
        source.path: contracts.file_sha256(Path(source.path).expanduser())
        for source in prepare.sources
        if isinstance(source, FileSource) and Path(source.path).expanduser().is_file()
    }
    work = contracts.working_folder("prepare", recipe)
    trusted = target_manifest.recipe["params"]["target"]["trust_remote_code"]
    limits = _Limits(
        Renderer(target, trust_remote_code=trusted),
        max_tokens=prepare.max_prompt_tokens,
        mask_token_id=target_manifest.info["mask_token_id"],
    )
    sources = [
        candidates
        for source in prepare.sources
        for candidates in _load(source, prepare=prepare, authored=authored)
    ]
    selection = _select(prepare, sources, limits)
    domain_checksums = {d: checksum(selection.evaluation[d]) for d in DOMAINS}
    found = contracts.fingerprint(domain_checksums)
    if prepare.evaluation_checksum not in (None, found):
        raise ValueError(
            f"prepare.evaluation_checksum: expected {prepare.evaluation_checksum}, found {found}: "
            "the evaluation sets changed, so results are not comparable with earlier ones. Undo "
            "the change of their sources, or write the new checksum (null: not frozen)"
        )
    rejected = contracts.write_rejects(work, selection.rejects)
    _check_yield(prepare, sources, selection, ledger=work / contracts.REJECTS)
    _write(work, selection)
    manifest = contracts.write_manifest(
        work,
        contracts.Manifest(
            kind="prepare",
            recipe=recipe,
            counts=_counts(selection),
            rejected=rejected,
            info={
                "evaluation_checksum": found,
                "domain_checksums": domain_checksums,
                "tools_ignored_by_template": limits.tools_ignored,
                "shared_phrases": dict(selection.shared_phrases.most_common(5)),
            },
        ),
    )
    contracts.publish(work, out)
    counts = manifest.counts
    print(
        f"prepare: {counts['train']} training, {counts['validation']} validation and "
        f"{counts['evaluation']} evaluation prompts in {len(DOMAINS)} domains; "
        f"rejected {rejected or 'none'}; evaluation {found[:12]}"
    )
    if limits.tools_ignored:
        print(
            f"prepare: the target's chat template ignores tools; {limits.tools_ignored} prompts "
            "with tools reach the target without them"
        )


def _load(source: Source, *, prepare: PrepareParams, authored: Path) -> list[Candidates]:
    if isinstance(source, AuthoredSource):
        return authored_source.load(source, folder=authored, seed=prepare.seed)
    if isinstance(source, HumanEvalSource):
        return [human_eval.load(source, seed=prepare.seed)]
    if isinstance(source, BfclSource):
        return [bfcl.load(source, seed=prepare.seed)]
    if isinstance(source, FileSource):
        return [files.load(source, seed=prepare.seed, role_map=prepare.role_map)]
    assert isinstance(source, DatasetSource)
    return [datasets_source.load(source, seed=prepare.seed, role_map=prepare.role_map)]


class _Limits:
    """Whether the target can take a prompt, by the target's own rendering."""

    def __init__(self, renderer: Renderer, *, max_tokens: int, mask_token_id: int) -> None:
        self.renderer = renderer
        self.max_tokens = max_tokens
        self.mask_token_id = mask_token_id
        self.tools_ignored = 0

    def check(self, prompt: Prompt) -> Fault | None:
        try:
            ids = self.renderer.render(prompt.messages, tools=prompt.tools)
        except RenderError as error:
            return "template_refuses", str(error)
        if len(ids) > self.max_tokens:
            return (
                "too_long",
                f"{len(ids)} tokens, prepare.max_prompt_tokens is {self.max_tokens}",
            )
        if self.mask_token_id in ids:
            return "mask_token", f"holds the mask token (id {self.mask_token_id})"
        if prompt.tools and ids == self.renderer.render(prompt.messages):
            self.tools_ignored += 1
        return None


def _select(prepare: PrepareParams, sources: list[Candidates], limits: _Limits) -> Selection:
    selection = Selection()
    for source in sources:
        selection.rejects.extend(source.rejects)
    selection.evaluation = choose_evaluation(
        sources,
        number=prepare.num_evaluation_prompts,
        check=limits.check,
        rejects=selection.rejects,
    )
    index = OverlapIndex(
        (prompt for prompts in selection.evaluation.values() for prompt in prompts),
        n=prepare.overlap_ngram,
        boilerplate=prepare.boilerplate,
    )
    choose_train(
        sources,
        number=prepare.num_train_prompts,
        index=index,
        check=limits.check,
        validation_fraction=prepare.validation_fraction,
        selection=selection,
    )
    return selection


def _check_yield(
    prepare: PrepareParams, sources: list[Candidates], selection: Selection, *, ledger: Path
) -> None:
    """Raises ValueError for too many rejects or an empty split, with what to do about overlaps.

    The limit holds for the rows of each source, and for the prompts that were looked at: rows that
    were good but not needed do not hide what was wrong with the others.
    """
    limit = prepare.max_rejected_fraction
    for source in sources:
        if source.rejects:
            where = source.rejects[0]["id"]
            with _explained(f"; the first is {where}, all are in {ledger}"):
                contracts.check_yield(
                    "prepare",
                    kept=source.num_rows - len(source.rejects),
                    rejected=_reasons(source.rejects),
                    limit=limit,
                )
    chosen = len(selection.train) + len(selection.validation)
    chosen += sum(map(len, selection.evaluation.values()))
    phrases = selection.shared_phrases.most_common(3)
    hint = (
        f"; phrases shared most often with evaluation: {phrases} (list task instructions in "
        "prepare.boilerplate)"
        if phrases
        else ""
    )
    with _explained(f"; see {ledger}{hint}"):
        looked_at = selection.rejects[sum(len(source.rejects) for source in sources) :]
        contracts.check_yield("prepare", kept=chosen, rejected=_reasons(looked_at), limit=limit)
    empty = [
        name
        for name, prompts, wanted in (
            (contracts.TRAIN, selection.train, True),
            (contracts.VALIDATION, selection.validation, prepare.validation_fraction > 0),
        )
        if wanted and not prompts
    ]
    if empty:
        raise ValueError(
            f"prepare: no {' and no '.join(empty)} prompt is left of {chosen}; add sources, or "
            "raise prepare.num_train_prompts or prepare.validation_fraction"
        )


@contextmanager
def _explained(hint: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}{hint}") from None


def _reasons(rejects: Iterable[Reject]) -> Counter[str]:
    return Counter(item["reason"] for item in rejects)


def checksum(prompts: Iterable[Prompt]) -> str:
    """sha256 of the prompts' content in their order."""
    return contracts.fingerprint([prompt.content for prompt in prompts])


def _counts(selection: Selection) -> dict[str, int]:
    by_domain = Counter(f"{contracts.TRAIN}/{prompt.domain}" for prompt in selection.train)
    return {
        contracts.TRAIN: len(selection.train),
        contracts.VALIDATION: len(selection.validation),
        contracts.EVALUATION: sum(map(len, selection.evaluation.values())),
        **dict(sorted(by_domain.items())),
    }


def _write(work: Path, selection: Selection) -> None:
    tables = {
        contracts.TRAIN: (contracts.TRAIN, selection.train),
        contracts.VALIDATION: (contracts.VALIDATION, selection.validation),
        **{
            f"{contracts.EVALUATION}-{domain}": (contracts.EVALUATION, prompts)
            for domain, prompts in selection.evaluation.items()
        },
    }
    for name, (split, prompts) in tables.items():
        rows = [prompt_row(prompt, split) for prompt in prompts]
        contracts.write_table(work / f"{name}.parquet", rows, contracts.PROMPTS)


def prompt_row(prompt: Prompt, split: str) -> dict[str, Any]:
    """One row of contracts.PROMPTS."""
    return {
        "id": prompt.id,
        "domain": prompt.domain,
        "split": split,
        "messages": json.dumps(list(prompt.messages), ensure_ascii=False),
        "tools": json.dumps(list(prompt.tools), ensure_ascii=False) if prompt.tools else "",
        "source": prompt.source,
    }


def _folder_fingerprint(folder: Path) -> str:
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; it holds the authored material")
    return contracts.fingerprint(
        {path.name: contracts.file_sha256(path) for path in sorted(folder.glob("*.yaml"))}
    )
