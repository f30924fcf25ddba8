"""The sections of services.yaml: where things run. Nothing here decides a result.

Imports: pydantic and section.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.section import Positive, Section

MANAGED = "managed"
"""In services.yaml: the pipeline starts and ends that server itself."""


class VllmServices(Section):
    endpoint: str | Annotated[list[str], Field(min_length=1)]
    num_servers: Positive
    devices: list[str]
    num_threads: Positive
    kv_cache_gib: Annotated[float, Field(gt=0)]
    max_num_seqs: Positive
    tensor_parallel_size: Positive
    start_timeout_s: Annotated[float, Field(gt=0)]
    request_timeout_s: Annotated[float, Field(gt=0)]
    outage_s: Annotated[float, Field(ge=0)]
    extra_args: list[str]

    @property
    def managed(self) -> bool:
        return self.endpoint == MANAGED

    @property
    def urls(self) -> list[str]:
        """Of given servers."""
        return [self.endpoint] if isinstance(self.endpoint, str) else self.endpoint

    @model_validator(mode="after")
    def _one_device_each(self) -> VllmServices:
        if self.devices and len(self.devices) != self.num_servers:
            raise ValueError(
                f"devices names those of {len(self.devices)} servers, num_servers is "
                f"{self.num_servers}; name one string a server, or none"
            )
        return self


class MooncakeServices(Section):
    master: str
    protocol: Literal["tcp", "rdma"]
    device: str
    local_buffer_mib: Positive
    call_timeout_s: Annotated[float, Field(gt=0)]


class GenerateServices(Section):
    concurrency: Positive


class ExtractServices(Section):
    concurrency: Positive
    in_flight_mib: Positive
    device: str
    num_threads: Positive
    kv_cache_gib: Annotated[float, Field(gt=0)]


class TrainServices(Section):
    device: str
    num_threads: Positive
    num_processes: Positive
    sharding: Literal["ddp", "fsdp2"]


class EvaluateServices(Section):
    drafter: str
    baseline: str


class Services(Section):
    """All of services.yaml: placement, never part of a fingerprint."""

    host: str
    vllm: VllmServices
    mooncake: MooncakeServices
    generate: GenerateServices
    extract: ExtractServices
    train: TrainServices
    evaluate: EvaluateServices

    @property
    def segment_bytes(self) -> int:
        """Memory that each producer lends to the store: what may be in flight, all of which may be
        one producer's, fills 80% of it. Mooncake refuses very small ones."""
        return max(16, self.extract.in_flight_mib * 5 // 4) * 2**20
