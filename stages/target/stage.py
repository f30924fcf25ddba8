"""Materialises the target: a Hugging Face folder in bfloat16 safetensors, checked.

Cost: one read and one write of the weights; the packaged SmolLM2 takes about 15 s on two cores.
"""

from __future__ import annotations

from pathlib import Path

from stages import contracts
from stages.params import TargetParams
from stages.target import describe, sources


def run(*, target: TargetParams, out: Path) -> None:
    """Writes the folder that vLLM, transformers and every later stage read as the target.

    Raises ValueError for a source, template or mask token that cannot work.
    """
    recipe = contracts.recipe({"target": target}, {})
    work = contracts.working_folder("target", recipe)
    name = sources.materialise(
        target.source,
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
        folder=work,
    )
    info = {
        "name": name,
        **describe.describe(
            work, mask_token=target.mask_token, trust_remote_code=target.trust_remote_code
        ),
    }
    # In a file as well, because a later stage's recipe holds what the files say, not the info.
    contracts.write_json(work / "mask_token.json", {"mask_token_id": info["mask_token_id"]})
    manifest = contracts.write_manifest(
        work, contracts.Manifest(kind="target", recipe=recipe, info=info)
    )
    contracts.publish(work, out)
    size = sum(entry["bytes"] for entry in manifest.files.values())
    print(
        f"target: {name}, {info['num_layers']} layers, hidden {info['hidden_size']}, vocabulary "
        f"{info['vocab_size']}, mask token {info['mask_token_id']}, {size / 1e6:.0f} MB in {out}"
    )
