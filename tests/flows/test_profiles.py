from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from flows import profiles
from stages.params import load_params

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def params_file(tmp_path: Path) -> Path:
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    return path


def apply(profile: str, file: Path, folder: Path = ROOT / "profiles", **overrides: object):
    return profiles.apply(profile, overrides=overrides, params_file=file, folder=folder)


@pytest.mark.parametrize("profile", profiles.names(ROOT / "profiles"))
def test_every_profile_gives_valid_params(profile: str, params_file: Path) -> None:
    apply(profile, params_file)
    load_params(params_file)


def test_default_restores_what_other_profiles_change(params_file: Path) -> None:
    apply("default", params_file)
    before = params_file.read_text()
    for profile in profiles.names(ROOT / "profiles"):
        apply(profile, params_file)
        apply("default", params_file)
        assert params_file.read_text() == before


def test_the_committed_params_are_those_of_the_default_profile() -> None:
    committed = yaml.safe_load((ROOT / "params.yaml").read_text())
    for key, value in profiles.values("default", folder=ROOT / "profiles").items():
        section, name = key.split(".")
        assert committed[section][name] == value, key


def test_only_changed_lines_change_and_comments_stay(params_file: Path) -> None:
    apply("default", params_file)
    before = params_file.read_text().splitlines()
    changes = profiles.apply(
        "default",
        overrides={"drafter.num_layers": 2, "extract.layer_ids": [1, 2]},
        params_file=params_file,
        folder=ROOT / "profiles",
    )
    after = params_file.read_text().splitlines()
    differing = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert len(differing) == len(changes) == 2
    assert all(a.partition("#")[2] == b.partition("#")[2] for a, b in differing)


def test_a_file_that_fits_already_is_not_touched(params_file: Path) -> None:
    apply("quick", params_file)
    stamp = params_file.stat()
    assert apply("quick", params_file) == []
    assert params_file.stat().st_mtime_ns == stamp.st_mtime_ns
    assert params_file.stat().st_ino == stamp.st_ino


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("drafter.num_layerz", 2, "drafter.num_layerz"),
        ("drafters.num_layers", 2, "drafters"),
        ("drafter.num_layers", 0, "greater than 0, found 0"),
        ("drafter.num_layers.deep", 2, "num_layers"),
        ("engine.kv_block_size", 20, "multiple of 32"),
    ],
)
def test_a_wrong_override_names_the_key_and_writes_nothing(
    key: str, value: object, message: str, params_file: Path
) -> None:
    before = params_file.read_text()
    with pytest.raises(ValueError, match=message):
        apply("quick", params_file, **{key: value})
    assert params_file.read_text() == before


def test_an_unknown_profile_is_answered_with_the_known_ones(params_file: Path) -> None:
    with pytest.raises(ValueError, match=r"default.*quick.*found 'quik'"):
        apply("quik", params_file)


def test_a_profile_may_only_name_what_default_can_restore(
    params_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "profiles"
    shutil.copytree(ROOT / "profiles", folder)
    (folder / "mine.yaml").write_text("target:\n  revision: abc\n")
    with pytest.raises(ValueError, match=r"target\.revision"):
        apply("mine", params_file, folder)


def test_dvcs_own_yaml_is_unaffected(params_file: Path) -> None:
    """ruamel's representers belong to a class: ours must not change how DVC writes dvc.lock."""
    import io

    from ruamel.yaml import YAML

    apply("quick", params_file)
    buffer = io.StringIO()
    YAML().dump({"key": None}, buffer)
    assert buffer.getvalue() == "key:\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("drafter.num_layers=2", ("drafter.num_layers", 2)),
        ("target.source=a=b", ("target.source", "a=b")),
        ("extract.layer_ids=[1, 2]", ("extract.layer_ids", [1, 2])),
        ("drafter.head_dim=null", ("drafter.head_dim", None)),
    ],
)
def test_an_override_is_a_key_and_a_yaml_value(text: str, expected: tuple) -> None:
    assert profiles.parse_override(text) == expected


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"section\.key=value"):
        profiles.parse_override("drafter.num_layers")
