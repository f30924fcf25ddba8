"""Shards hold exactly the bytes that were written, and a kill loses only the open one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import contracts
from stages.shards import SAMPLES_FILE, ShardReader, ShardWriter, read_samples, shard_name

PLANES, HIDDEN = 3, 8


def sample(index: int, num_tokens: int) -> dict[str, Any]:
    return {
        "id": f"s{index}",
        "domain": "qa",
        "split": "train",
        "looping": False,
        "num_tokens": num_tokens,
        "input_ids": list(range(num_tokens)),
        "loss_mask": [True] * num_tokens,
        "supervised": [True] * num_tokens,
        "log_sum_exp": [0.5] * num_tokens,
        "sha256": "",
    }


def states(index: int, num_tokens: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    size = num_tokens * PLANES * HIDDEN * 2
    return np.random.default_rng(index).integers(0, 256, size, np.uint8)


def writer(
    folder: Path, *, shard_bytes: int = 10**9, encoding: str = contracts.BFLOAT16
) -> ShardWriter:
    return ShardWriter(
        folder / "artifact",
        pieces=folder / "pieces",
        num_planes=PLANES,
        hidden_size=HIDDEN,
        shard_bytes=shard_bytes,
        encoding=encoding,
    )


def reader(
    folder: Path, rows: list[dict[str, Any]], *, encoding: str = contracts.BFLOAT16
) -> ShardReader:
    contracts.write_table(folder / "artifact" / SAMPLES_FILE, rows, contracts.SAMPLES)
    info = {"num_planes": PLANES, "hidden_size": HIDDEN, "encoding": encoding}
    manifest = contracts.Manifest(kind="extract", recipe={}, info=info)
    return ShardReader.of(folder / "artifact", manifest)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    shard_bytes=st.integers(1, 5000),
    encoding=st.sampled_from([contracts.BFLOAT16, contracts.BFLOAT16_ZSTD]),
    data=st.data(),
)
def test_every_sample_comes_back_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    shard_bytes: int,
    encoding: str,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    made = writer(folder, shard_bytes=shard_bytes, encoding=encoding)
    for index, length in enumerate(lengths):
        made.append(states(index, length), sample(index, length))
    made.close()
    found = reader(folder, made.samples, encoding=encoding)
    for row in data.draw(st.permutations(read_samples(folder / "artifact"))):
        index, length = int(row["id"][1:]), row["num_tokens"]
        bits = found.read(row)
        assert bits.shape == (length, PLANES * HIDDEN * 2)
        assert bits.tobytes() == states(index, length).tobytes()


def test_the_file_is_what_the_contract_says(tmp_path: Path) -> None:
    made = writer(tmp_path)
    for index, length in enumerate((5, 9)):
        made.append(states(index, length), sample(index, length))
    made.close()
    file = pq.ParquetFile(tmp_path / "artifact" / shard_name(0))
    assert file.schema_arrow.equals(contracts.states_schema(PLANES, HIDDEN))
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [5, 9]
    column = file.metadata.row_group(0).column(0)
    assert column.compression == "UNCOMPRESSED"
    assert not column.has_dictionary_page
    assert column.statistics is None


def test_torch_shares_the_memory_of_what_is_read(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.append(states(0, 7), sample(0, 7))
    made.close()
    bits = reader(tmp_path, made.samples).read(made.samples[0])
    tensor = torch.from_numpy(bits).view(torch.bfloat16)
    assert tensor.data_ptr() == bits.ctypes.data
    assert tensor.shape == (7, PLANES * HIDDEN)


def test_a_new_writer_keeps_closed_shards_and_deletes_the_rest(tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.append(states(0, 5), sample(0, 5))
    first.close()
    first.append(states(1, 6), sample(1, 6))  # in an open shard when the process dies
    (tmp_path / "artifact" / shard_name(7)).write_bytes(b"renamed, but no piece yet")
    second = writer(tmp_path)
    assert [row["id"] for row in second.samples] == ["s0"]
    assert [path.name for path in (tmp_path / "artifact").iterdir()] == [shard_name(0)]
    second.append(states(1, 6), sample(1, 6))
    second.close()
    assert [(row["id"], row["shard"]) for row in second.samples] == [("s0", 0), ("s1", 1)]
    found = reader(tmp_path, second.samples)
    assert found.read(second.samples[0]).tobytes() == states(0, 5).tobytes()
    assert found.read(second.samples[1]).tobytes() == states(1, 6).tobytes()


def test_a_row_that_lies_about_its_length_is_refused(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.append(states(0, 5), sample(0, 5))
    made.close()
    with pytest.raises(contracts.ArtifactError, match="has 6 tokens, its row group 0 has 5"):
        reader(tmp_path, made.samples).read({**made.samples[0], "num_tokens": 6})
