"""Proves the package in the real engine: data/target, data/prompts and package -> evaluation.

Cost on two cores at the default settings: about six minutes, most of it the speed of one user; the
full depth (full.py) adds about ten. Losslessness and every response are kept in the working folder
as they finish; a stage that was killed, or that failed later, measures only what is missing.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from stages import contracts, summary
from stages.evaluate import formulas, full, intervals, lossless, measure, outputs, report, results
from stages.evaluate.measuring import Measuring
from stages.evaluate.prompts import read_prompts, room, spread
from stages.evaluate.responses import judged, read_draft_vocabulary
from stages.params import EngineParams, EvaluateParams, GenerateParams, ServeParams, Services
from stages.services import MANAGED
from stages.serving.chat import Renderer
from stages.serving.speculative import read_drafter_config

WARM_UP = "Count from one to thirty in words, one number a line."  # no evaluation prompt


def run(
    *,
    engine: EngineParams,
    generate: GenerateParams,
    serve: ServeParams,
    evaluate: EvaluateParams,
    services: Services,
    inputs: Mapping[str, Path],
    out: Path,
) -> None:
    """Measures and publishes metrics.json, tables, plots and the report, and prints the results.

    Raises ValueError when requests fail, counts contradict each other, or the drafter changes the
    target's output; nothing is published then.
    """
    earlier = None if evaluate.compare_with is None else Path(evaluate.compare_with)
    if earlier is not None:
        report.read_evaluation(earlier)  # refused before anything is measured
    manifests = {
        name: contracts.read_manifest(inputs[name], kind)
        for name, kind in (("target", "target"), ("prompts", "prepare"), ("package", "package"))
    }
    # generate's chat template arguments render these prompts too: the drafter learned that form.
    recipe = contracts.recipe(
        {"engine": engine, "generate": generate, "serve": serve, "evaluate": evaluate}, manifests
    )
    deep = evaluate.depth == full.FULL
    if deep and evaluate.longbench is not None:
        recipe["inputs"]["longbench"] = contracts.file_sha256(Path(evaluate.longbench))
    work = contracts.working_folder("evaluate", recipe)
    block_size = read_drafter_config(inputs["package"]).block_size
    prompts, rejects = read_prompts(
        inputs["prompts"],
        target=inputs["target"],
        evaluate=evaluate,
        chat_template_kwargs=generate.chat_template_kwargs,
        longest=room(
            max_model_len=engine.max_model_len,
            max_tokens=evaluate.max_tokens,
            block_size=block_size,
        ),
    )
    renderer = Renderer(inputs["target"])
    renderer.tokenizer.model_max_length = sys.maxsize  # long texts are rendered to be cut, silently

    def render(text: str) -> list[int]:
        return renderer.render(
            [{"role": "user", "content": text}], chat_template_kwargs=generate.chat_template_kwargs
        )

    measuring = Measuring(
        work,
        engine=engine,
        serve=serve,
        evaluate=evaluate,
        services=services,
        inputs=inputs,
        warm_up=render(WARM_UP),
    )
    long = None
    if deep:
        long = full.plan_context(
            inputs,
            engine=engine,
            evaluate=evaluate,
            services=services,
            block_size=block_size,
            render=render,
        )
    verdict = lossless.check(
        work / "lossless.json",
        spread(prompts, count=evaluate.lossless_prompts),
        target=inputs["target"],
        package=inputs["package"],
        engine=engine,
        services=services,
        max_tokens=evaluate.lossless_tokens,
        # The rule that drafts most.
        serve=serve.model_copy(update={"scheduler": "fixed"}),
    )
    for max_model_len, asked in full.parts(prompts, long=long, engine=engine, evaluate=evaluate):
        measuring.longer(max_model_len).served(asked)
    rows = measuring.rows([*prompts, *(long.prompts if long else ())])
    known = read_draft_vocabulary(inputs["package"])
    acceptance = [judged(row, generate=generate, known=known) for row in rows["acceptance"]]
    speed, sessions = rows["speed"], rows["sessions"]
    warnings = [
        warning
        for session in sessions
        for warning in measure.check_session(
            session, block_size=block_size, shared=services.evaluate.drafter != MANAGED
        )
    ]
    found = results.aggregate(
        acceptance, speed, block_size=block_size, min_speed_tokens=evaluate.min_speed_tokens
    )
    body = results.metrics(found, lossless=verdict)
    notes = results.notes(found, min_speed_tokens=evaluate.min_speed_tokens)
    full_body = None
    if long is not None:
        full_body = full.body(rows, long=long, evaluate=evaluate)
        body["full"] = full.metrics(full_body)
        notes += long.notes
    artifact = work / "artifact"
    shutil.rmtree(artifact, ignore_errors=True)
    (artifact / "plots").mkdir(parents=True)
    contracts.write_json(artifact / "metrics.json", body)
    contracts.write_json(
        artifact / "serving.json",
        {
            "package": manifests["package"].info["name"],
            "target": manifests["target"].info["name"],
            "settings": {**recipe["params"], "block_size": block_size},
            "environment": outputs.environment(services),
            "notes": notes,
            "warnings": warnings,
            "sessions": sessions,
            "domains": outputs.details(found),
            "macro": {
                "survival": found.macro_survivals,
                "conditional": formulas.conditional(found.macro_survivals, found.macro_reached),
            },
            "intervals": intervals.bootstrap(
                acceptance,
                speed,
                min_speed_tokens=evaluate.min_speed_tokens,
                resamples=evaluate.bootstrap_resamples,
                seed=evaluate.seed,
            ),
            "full": full_body,
            "acceptance": acceptance,
            "speed": speed,
            "lossless": json.loads((work / "lossless.json").read_text()),
        },
    )
    report.write(
        artifact / "report.html",
        evaluation=artifact,
        package=inputs["package"],
        compare_with=earlier,
    )
    outputs.write(artifact, found, block_size=block_size, deep=full_body)
    contracts.write_manifest(
        artifact,
        contracts.Manifest(
            kind="evaluate",
            recipe=recipe,
            counts={"prompts": len(acceptance), "speed_pairs": len(speed), **verdict},
            rejected=contracts.write_rejects(artifact, rejects),
            info={"package": manifests["package"].info["name"]},
        ),
    )
    contracts.publish(artifact, out)
    shutil.rmtree(work)
    print(summary.format_summary(body))
    for warning in warnings:
        print(f"warning: {warning}")
