"""The states that a run trains on: from shards, from running servers, or first one, then the other.

extract.mode is the artifact's own fact, and so are the settings that made it; services.yaml says
where the servers are. With several ranks, rank 0 holds the managed servers for all; on several
machines they are given ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from stages import contracts
from stages.params import EngineParams, ExtractParams, Services
from stages.serving.launch import extract_servers
from stages.states import stream
from stages.states.source import CachedStates, Sample, Source
from stages.states.stream import StreamedStates
from stages.states.tee import Tee
from stages.train.distributed import Ranks

LANES = 2  # training, and a validation in its midst


@contextmanager
def opened(
    hidden_states: Path,
    manifest: contracts.Manifest,
    samples: Sequence[Sample],
    *,
    target: Path,
    services: Services,
    ranks: Ranks,
) -> Iterator[Source]:
    """The states of an extract artifact. Raises ValueError for a service that is not there."""
    if manifest.info["mode"] == "cache":
        yield CachedStates(hidden_states, manifest)
        return
    extract = ExtractParams.model_validate(manifest.recipe["params"]["extract"])
    engine = EngineParams.model_validate(manifest.recipe["params"]["engine"])
    with ExitStack() as stack:
        endpoints = []
        if ranks.first:
            endpoints = stack.enter_context(
                extract_servers(target=target, engine=engine, extract=extract, services=services)
            )
        endpoints = ranks.agreed(endpoints)
        tee = None
        if extract.mode == "tee":
            tee = Tee(
                ranks.agreed(tee_folder(manifest) if ranks.first else Path()),
                rank=ranks.index,
                num_planes=manifest.info["num_planes"],
                hidden_size=manifest.info["hidden_size"],
                encoding=extract.encoding,
                shard_bytes=extract.shard_bytes,
            )
            stack.callback(tee.close)
        source = stack.enter_context(
            stream.opened(
                endpoints,
                target=target,
                engine=engine,
                extract=extract,
                services=services,
                key_prefix=f"dspark-{manifest.fingerprint[:16]}-{ranks.index}",
                greedy=manifest.info["greedy"],
                num_samples=len(samples),
                lanes=LANES,
                share=ranks.size,
                tee=tee,
            )
        )
        yield source
        print(_summary(source, extract.mode, ranks), flush=True)
        ranks.agreed(None)  # nobody ends the servers while another still reads


def tee_folder(manifest: contracts.Manifest) -> Path:
    """run/tee-<fingerprint of the artifact>/."""
    return contracts.working_folder("tee", manifest.recipe)


def rejected(source: Source) -> dict[str, str]:
    """The reasons of samples that this rank could not get, by id."""
    if isinstance(source, StreamedStates):
        return {name: refusal.reason for name, refusal in source.rejected.items()}
    return {}


def _summary(source: StreamedStates, mode: str, ranks: Ranks) -> str:
    rank = f" on rank {ranks.index}" if ranks.size > 1 else ""
    retried = f", asked again by reason: {source.retried}" if source.retried else ""
    return (
        f"train: {mode}{rank}: {source.num_received} samples came from vLLM, at most "
        f"{source.most_bytes / 2**20:.0f} MiB at once, {len(source.rejected)} rejected{retried}"
    )
