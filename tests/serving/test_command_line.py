"""The printed command of an extract server that somebody starts themselves."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.params import Params, Services
from stages.serving import __main__ as command_line


def test_it_names_connector_master_planes_and_address(
    write_settings: Callable[[Params, Services], None],
    params: Params,
    services: Services,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_settings(params, services)
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"num_hidden_layers": 30}))
    monkeypatch.chdir(tmp_path)
    arguments = "--target target --host 10.0.0.1 --port 8000 --master 10.0.0.9:50051"
    monkeypatch.setattr(sys, "argv", ["serving", *arguments.split()])
    command_line.main()
    words = shlex.split(capsys.readouterr().out)
    values = dict(itertools.pairwise(words))
    transfer = json.loads(values["--kv-transfer-config"])
    assert transfer["kv_connector_module_path"] == "stages.serving.connector"
    extra = transfer["kv_connector_extra_config"]
    assert (extra["master"], extra["host"]) == ("10.0.0.9:50051", "10.0.0.1")
    assert extra["segment_bytes"] == services.segment_bytes
    planes = json.loads(values["--speculative-config"])["draft_model_config"]["hf_config"]
    assert planes["eagle_aux_hidden_state_layer_ids"] == [*params.extract.layer_ids, 30]
    assert (values["--host"], values["--port"]) == ("10.0.0.1", "8000")
    assert not any(word.startswith("VLLM_HOST_IP") for word in words)
