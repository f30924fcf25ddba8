"""The locks are full pins: pip installs them with --no-deps, so nothing may be left open."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "requirements"
PIN = re.compile(r"([a-z0-9][a-z0-9._-]*)==([0-9][\w.+]*)(?: ; .+)?")
LOCKS = ("cpu", "gpu", "data", "dev")


def pins(name: str) -> dict[str, str]:
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    found = {}
    for line in filter(None, lines):
        match = PIN.fullmatch(line)
        assert match, f"{name}.txt: not a full pin: {line!r}"
        assert match[1] not in found, f"{name}.txt names {match[1]} twice"
        found[match[1]] = match[2]
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_line_is_one_full_pin(name: str) -> None:
    assert pins(name)


@pytest.mark.parametrize("name", ["cpu", "gpu", "dev"])
def test_every_direct_dependency_is_pinned_as_asked(name: str) -> None:
    locked = pins("cpu") | pins("dev") if name == "dev" else pins(name)
    for line in (FOLDER / f"{name}.in").read_text().splitlines():
        if line and not line.startswith(("#", "-")):
            package, _, version = line.lower().partition("==")
            assert package in locked, package
            assert not version or locked[package] == version


def test_dev_pins_add_to_the_cpu_pins_and_repeat_none() -> None:
    assert not set(pins("cpu")) & (set(pins("dev")) | set(pins("data")))


def test_the_cpu_lock_leaves_out_what_is_built_for_cuda() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(pins("cpu"))
    assert pins("cpu")["torch"].endswith("+cpu")


def test_no_lock_names_a_host_or_a_path() -> None:
    for path in FOLDER.iterdir():
        assert "://" not in path.read_text(), path
        assert "file:" not in path.read_text(), path
