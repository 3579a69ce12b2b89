"""The rules of the house that a program can check: sizes, import directions, light imports, honest code."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"orbit_cli": ROOT / "src" / "orbit_cli", "orbit_kernels": ROOT / "kernels" / "orbit_kernels"}
MAX_LINES = 400
MAX_LOOP_LINES = 250

# Which rooms a room may import. config, errors and types are open to all but the plugin, which lives in SGLang's
# processes and knows nothing of ours but the adapters' maths and the kernels.
EVERYWHERE = {"config", "errors", "types"}
ALLOWED = {
    "orbit_kernels": set(),
    "errors": set(),
    "types": set(),
    "config": {"errors"},
    "cli": {"commands", "errors"},
    "__main__": {"cli"},
    # Constants and checks of what is set, without torch.
    "planner": EVERYWHERE
    | {"engine.arguments", "engine.targets", "environments.params", "models.families", "quantization.folder"},
    "commands": EVERYWHERE | {"planner", "quantization", "runs", "sync", "telemetry"},  # of two their results' types
    "algorithms": set(),
    "quantization": EVERYWHERE | {"orbit_kernels"},
    "adapters": EVERYWHERE | {"orbit_kernels"},
    "rewards": EVERYWHERE,
    "environments": EVERYWHERE | {"rewards"},
    "sglang_plugin": {"adapters", "orbit_kernels"},
    "engine": EVERYWHERE | {"adapters", "orbit_kernels", "quantization", "sglang_plugin"},
    "models": EVERYWHERE | {"adapters", "orbit_kernels", "quantization", "trainer.logprobs"},  # a pure function
    "rollout": EVERYWHERE | {"algorithms", "engine", "environments", "rewards"},
    "telemetry": EVERYWHERE,
    "sync": EVERYWHERE | {"adapters", "engine", "models"},
    "trainer": EVERYWHERE | {"adapters", "algorithms", "models", "sync", "telemetry"},
    # The room that puts the parts together knows all of them, and no other room imports it but the commands.
    "runs": EVERYWHERE
    | {"adapters", "engine", "environments", "models", "planner", "quantization", "rollout", "sync"}
    | {"telemetry", "trainer"},
}
# What only some rooms may know.
OWNERS = {
    "sglang": {"engine", "sglang_plugin", "commands", "orbit_kernels.bench_sglang"},
    "hydra": {"config", "commands"},
    "omegaconf": {"config", "commands"},
    "typer": {"cli", "commands"},
    "wandb": {"telemetry"},
    "reasoning_gym": {"environments", "rewards"},
    "math_verify": {"rewards"},
    "peft": set(),  # its file format is ours to read and write; the library is for tests
}
VAGUE = re.compile(r"^(utils?|common|helpers?|misc)$")
BROAD = ("Exception", "BaseException")


def sources() -> Iterator[tuple[str, Path]]:
    """(room, file) of every module."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder).parts
            room = package if package == "orbit_kernels" else inside[0] if len(inside) > 1 else path.stem
            yield room, path


def everything() -> list[Path]:
    """Every text file that the project is made of."""
    folders = ("src", "kernels", "tests", "conf", "recipes", "docs", "scripts", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", ".gitignore")]
    return [path for path in files if "__pycache__" not in path.parts and path.suffix not in (".pyc", ".png", ".gguf")]


def imports(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module or ""


def test_no_file_is_too_long() -> None:
    files = [path for path in everything() if path.suffix in (".py", ".sh")]
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}
    assert long["src/orbit_cli/trainer/loop.py"] <= MAX_LOOP_LINES


def test_import_direction() -> None:
    wrong = []
    for room, path in sources():
        if path == PACKAGES["orbit_cli"] / "__init__.py":
            continue
        assert room in ALLOWED, (
            f"{room} is a new room: say in ALLOWED what it may import, and in docs/design.md what it owns"
        )
        for name in imports(path):
            parts = name.split(".")
            if parts[0] not in PACKAGES:
                continue
            other = "orbit_kernels" if parts[0] == "orbit_kernels" else ".".join(parts[1:2])
            fits = other == room or other in ALLOWED[room] or ".".join(parts[1:3]) in ALLOWED[room]
            if not fits and other:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_only_their_owners_know_outside_libraries() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for room, path in sources()
        for name in imports(path)
        if name.split(".")[0] in OWNERS and not {room, f"{room}.{path.stem}"} & OWNERS[name.split(".")[0]]
    ]
    assert wrong == []


@pytest.mark.timeout(120)
def test_light_rooms_import_without_torch() -> None:
    """Command line, commands, config and records must not wait for torch, and the command line not for Hydra."""
    folder = PACKAGES["orbit_cli"]
    light = ["orbit_cli.cli", "orbit_cli.types", "orbit_cli.errors"]
    for room in ("commands", "config", "planner", "telemetry"):
        light += [
            "orbit_cli." + ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
            for path in (folder / room).rglob("*.py")
        ]
    code = (
        "import sys, importlib\n"
        "import orbit_cli.cli\n"
        "early = [m for m in ('torch', 'hydra', 'omegaconf', 'sglang', 'transformers', 'wandb') if m in sys.modules]\n"
        "assert not early, early\n"
        f"for name in {light!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = [m for m in ('torch', 'sglang', 'transformers', 'wandb') if m in sys.modules]\n"
        "    assert not heavy, (name, heavy)\n"
    )
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_rooms_have_names_that_say_something() -> None:
    names = {part for _, path in sources() for part in path.relative_to(ROOT).with_suffix("").parts}
    folders = {part for _, path in sources() for part in path.parent.relative_to(ROOT).parts}
    assert [name for name in names if VAGUE.match(name)] == []
    assert [name for name in folders if name.startswith("base_")] == []


def test_the_folder_kernels_is_no_package() -> None:
    """An importable `kernels` would shadow the distribution of that name, which SGLang and transformers import."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for _, path in sources()
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_init_files_are_small() -> None:
    long = [path for _, path in sources() if path.name == "__init__.py" and len(path.read_text().splitlines()) > 20]
    assert long == []


def test_a_broad_except_gives_its_reason() -> None:
    """In a comment beside it; one that ends with a bare `raise` hides nothing and needs none."""
    silent = []
    for _, path in sources():
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id in BROAD)
            near = lines[node.lineno - 1] + (lines[node.lineno] if node.lineno < len(lines) else "")
            passed_on = any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
            if broad and not passed_on and "#" not in near:
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert silent == []


# Written in parts, so that this file does not match itself.
FORBIDDEN = {
    "a path of one machine": "/wo" + "rk/",
    "unfinished work": r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    "a stub": "NotImplemented" + "Error",
    "a skipped test": r"pytest\.(mark\.)?(ski" + r"p|xfai" + r"l)",
    "a stand-in": r"Magic" + r"Mock|unittest\.mo" + r"ck|mock\.pat" + r"ch",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_words_that_do_not_belong_here(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in everything()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def test_test_files_have_names_of_their_own() -> None:
    """Without __init__.py files pytest imports test modules by their base name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
