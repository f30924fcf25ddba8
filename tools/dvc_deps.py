"""What dvc.yaml must say about a stage, read from its code: params sections, inputs, code files.

    python -m tools.dvc_deps            prints what differs; exit code 1 if anything does
    python -m tools.dvc_deps --write    mends dvc.yaml

Code counts at file granularity: the stage's own package, and exactly the shared files that it can
reach, so that a change reruns the stages it can affect and no others. Modules that are named in a
string count as imports ("stages.serving.connector" is loaded by vLLM, in its own process).
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DVC_FILE = Path("dvc.yaml")
PACKAGE = "stages"
_NAMED = re.compile(rf"{PACKAGE}(\.\w+)+")


def expected(stage: str, command: str, *, root: Path = ROOT) -> dict[str, list[str]]:
    """{"params": sections, "deps": paths} of a stage whose dvc.yaml command is `command`."""
    main = root / PACKAGE / stage / "__main__.py"
    return {
        "params": params_sections(main),
        "deps": input_paths(command) + code_paths(stage, root=root),
    }


def params_sections(main: Path) -> list[str]:
    """The sections that a __main__.py reads as `params.<section>`, in order of appearance."""
    found = [
        node
        for node in ast.walk(ast.parse(main.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "params"
    ]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return list(dict.fromkeys(node.attr for node in found))


def input_paths(command: str) -> list[str]:
    """The paths that a command takes as --<name> PATH, without --out."""
    _, _, _, *arguments = shlex.split(command)
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return [path for name, path in pairs if name != "--out"]


def code_paths(stage: str, *, root: Path = ROOT) -> list[str]:
    """The stage's package, then the shared files that its code can reach, sorted."""
    own = f"{PACKAGE}/{stage}"
    reached = {path.relative_to(root).as_posix() for path in reachable(stage, root=root)}
    return [own, *sorted(path for path in reached if not path.startswith(own + "/"))]


def reachable(stage: str, *, root: Path = ROOT) -> set[Path]:
    """Files of this project that the stage's files import or name, and so on from those.

    An __init__.py counts where it holds code.
    """
    queue = sorted((root / PACKAGE / stage).rglob("*.py"))
    seen: set[Path] = set()
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        queue += imported_files(path, root=root)
    return {path for path in seen if path.name != "__init__.py" or path.stat().st_size}


def imported_files(path: Path, *, root: Path = ROOT) -> Iterator[Path]:
    """The project's files that one file imports or names in a string."""
    for name in modules_named(ast.parse(path.read_text())):
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            base = root.joinpath(*parts[:length])
            for candidate in (base.with_suffix(".py"), base / "__init__.py"):
                if candidate.is_file():
                    yield candidate


def modules_named(tree: ast.AST) -> set[str]:
    """Dotted names under `stages` that a module imports, or holds as a string of its own."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from stages import contracts` names a module or an attribute; files decide which.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _NAMED.fullmatch(node.value)
        ):
            names.add(node.value)
    return {name for name in names if name.split(".")[0] == PACKAGE}


def main(arguments: list[str]) -> int:
    from ruamel.yaml import YAML

    editor = YAML()
    editor.width = 4096
    editor.indent(mapping=2, sequence=4, offset=2)
    document: Any = editor.load(DVC_FILE.read_text())
    wrong = False
    for stage, entry in document["stages"].items():
        for key, values in expected(stage, entry["cmd"]).items():
            if list(entry[key]) != values:
                wrong = True
                print(f"{stage}.{key}: expected {values}")
                entry[key] = values
    if wrong and "--write" in arguments:
        with DVC_FILE.open("w") as file:
            editor.dump(document, file)
        return 0
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
