"""The rules between rooms (DESIGN, docs): read from the imports, so that they hold everywhere."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("target", "prepare", "generate", "extract", "train", "package", "evaluate")
SOURCES = sorted(
    path.relative_to(ROOT)
    for room in ("stages", "flows", "tools", "tests", "bench")
    for path in (ROOT / room).rglob("*.py")
)
MODULES = [path for path in SOURCES if path.parts[0] in ("stages", "flows", "bench")]
MAX_LINES = 350


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere in it; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(path: Path) -> set[str]:
    """Top-level packages that a file imports, without the standard library and __future__."""
    return {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)


def under(room: str) -> list[Path]:
    return [path for path in MODULES if path.as_posix().startswith(room)]


def importing(package: str, files: list[Path]) -> set[str]:
    return {path.as_posix() for path in files if package in packages(path)}


@pytest.mark.parametrize("package", ["vllm", "mooncake"])
def test_only_serving_imports_the_engine_and_the_store(package: str) -> None:
    found = importing(package, MODULES)
    assert found, f"nothing imports {package}: the rule checks nothing"
    assert all(path.startswith("stages/serving/") for path in found), found


def test_only_store_imports_mooncake() -> None:
    assert importing("mooncake", MODULES) <= {"stages/serving/store.py"}


def test_only_tracking_imports_mlflow() -> None:
    assert importing("mlflow", MODULES) == {"stages/tracking.py"}


@pytest.mark.parametrize("package", ["prefect", "dvc", "flows", "ruamel"])
def test_stages_do_not_know_what_runs_them(package: str) -> None:
    assert not importing(package, under("stages/"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_no_other_stage(stage: str) -> None:
    others = {f"stages.{other}" for other in STAGES if other != stage}
    for path in under(f"stages/{stage}/"):
        crossed = {n for n in imports(path) if ".".join(n.split(".")[:2]) in others}
        assert not crossed, f"{path} imports {crossed}"


def test_shared_rooms_import_no_stage() -> None:
    shared = [p for p in under("stages/") if not (len(p.parts) > 2 and p.parts[1] in STAGES)]
    of_stages = {f"stages.{stage}" for stage in STAGES}
    for path in shared:
        crossed = {n for n in imports(path) if ".".join(n.split(".")[:2]) in of_stages}
        assert not crossed, f"{path} imports {crossed}"


def test_the_pipeline_does_not_know_its_benchmarks() -> None:
    assert not importing("bench", under("stages/") + under("flows/"))


def test_flows_import_the_shared_rooms_alone() -> None:
    allowed = re.compile(
        r"stages\.(params|services|contracts|tracking|summary|serving\.(launch|supervisor))\b"
    )
    for path in under("flows/"):
        names = {n for n in imports(path) if n.split(".")[0] == "stages"}
        assert all(allowed.match(name) for name in names), f"{path}: {names}"


def test_params_and_contracts_stay_light() -> None:
    assert packages(Path("stages/params.py")) <= {"yaml", "pydantic", "stages"}
    assert packages(Path("stages/contracts.py")) <= {"pyarrow", "stages"}
    of_params = {n for n in imports(Path("stages/params.py")) if n.startswith("stages")}
    allowed = re.compile(r"stages\.(section|services|sources|dspark\.served)\.")
    assert all(allowed.match(name) for name in of_params), of_params
    for name in ("section", "services", "sources"):
        assert packages(Path(f"stages/{name}.py")) <= {"pydantic", "stages"}
    assert {n for n in imports(Path("stages/contracts.py")) if n.startswith("stages")} <= {
        "stages.params.Section"
    }
    described = {f"stages/dspark/{name}.py" for name in ("config", "rope", "served")}
    for path in described:
        assert packages(Path(path)) <= {"stages"}, path
        own = {n for n in imports(Path(path)) if n.startswith("stages.")}
        assert all("/".join(n.split(".")[:3]) + ".py" in described for n in own), path


def test_the_drafter_imports_torch_and_its_own_files() -> None:
    for path in under("stages/dspark/"):
        assert packages(path) <= {"torch", "stages"}, path
        own = {n for n in imports(path) if n.startswith("stages.")}
        assert all(n.startswith("stages.dspark.") for n in own), f"{path}: {own}"


def test_drafter_maths_touches_no_files_processes_or_clocks() -> None:
    forbidden = {"os", "pathlib", "logging", "time", "io", "json", "safetensors"}
    for path in under("stages/dspark/"):
        top = {name.split(".")[0] for name in imports(path)}
        assert not top & forbidden, f"{path}: {top & forbidden}"
        assert not any(name.startswith("torch.distributed") for name in imports(path)), path


def test_serving_imports_shared_rooms_alone() -> None:
    allowed = re.compile(r"stages\.(params|services|contracts|weights|dspark|serving)\b")
    for path in under("stages/serving/"):
        names = {n for n in imports(path) if n.split(".")[0] == "stages"}
        assert all(allowed.match(name) for name in names), f"{path}: {names}"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_modules_are_short_and_open_with_their_contract(path: Path) -> None:
    text = (ROOT / path).read_text()
    assert len(text.splitlines()) <= MAX_LINES
    if text.strip() and path.name != "__main__.py":
        assert ast.get_docstring(ast.parse(text)), "a module opens with its contract"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_command_is_short(stage: str) -> None:
    assert len((ROOT / "stages" / stage / "__main__.py").read_text().splitlines()) <= 27


def test_nothing_is_read_from_the_environment_at_import() -> None:
    for path in MODULES:
        tree = ast.parse((ROOT / path).read_text())
        top = [n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
        reads = [
            node
            for statement in top
            for node in ast.walk(statement)
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        ]
        assert not reads, path


def test_no_file_names_a_path_of_one_machine() -> None:
    home = re.compile(r"(?<![\w.])/(?:work|home|root|Users)/\w")
    tracked = [p for p in ROOT.iterdir() if p.suffix in (".yaml", ".toml", ".md", ".txt")]
    tracked += [ROOT / "Makefile", ROOT / ".ci/run", ROOT / ".dvc/config", *ROOT.glob("tools/*")]
    tracked += [ROOT / path for path in SOURCES] + list((ROOT / "profiles").glob("*"))
    for path in tracked:
        if path.is_file() and path != Path(__file__).resolve():
            assert not home.search(path.read_text()), path
