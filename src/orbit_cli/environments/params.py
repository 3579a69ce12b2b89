"""What an environment's config asks for, judged from source text: nothing is imported, so a plan can afford it.

A reasoning-gym task declares its parameters in a dataclass, a class of ours in its `__init__`; both say names, types,
and defaults. What only the task itself can judge (ranges, combinations) is left to the environment when it is built.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from orbit_cli.config.schema.learning import EnvironmentConfig, EnvironmentKind
from orbit_cli.errors import ConfigError

FILES = (".jsonl", ".parquet")
OURS = "orbit_cli.environments."
_REGISTERED = re.compile(r"""(?:register_dataset\(\s*|^DATASET_NAME\s*=\s*)["'](\w+)["']""", re.MULTILINE)
_WANTED = {
    "int": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "float": ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("text", lambda value: isinstance(value, str)),
}

Declared = dict[str, tuple[str, str]]  # parameter -> its annotation and its default, as written


def check_environment(config: EnvironmentConfig) -> None:
    """Refuse a task, a parameter or a file that is not there, and values of another type. Raises ConfigError."""
    if config.kind is EnvironmentKind.file:
        for field in ("path", "eval_path"):
            if getattr(config, field) is not None:
                check_file(f"environment.{field}", getattr(config, field))
        return
    declared, whose = None, f"{config.target}"
    if config.kind is EnvironmentKind.reasoning_gym:
        declared, whose = _task(str(config.task)), f"the task {config.task}"
    elif str(config.target).startswith(OURS):
        declared = _class(str(config.target))
    for name, value in config.params.items() if declared else ():
        if name in declared:
            _check_value(name, value, *declared[name], whose)
        else:
            near = difflib.get_close_matches(name, list(declared), n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(declared) or 'none'}"
            raise ConfigError(f"environment.params.{name} is no parameter of {whose}; {hint}")


def check_file(config_field: str, path: str) -> Path:
    """The file of a config field. Raises ConfigError if it is not there or has another ending."""
    file = Path(path).expanduser()
    if not file.is_file():
        beside = sorted(p.name for p in file.parent.glob("*") if p.suffix in FILES) if file.parent.is_dir() else []
        there = f"; {file.parent} has {', '.join(beside[:8])}" if beside else ""
        raise ConfigError(f"{config_field}={path} is no file{there}; set it to a .jsonl or .parquet file")
    if file.suffix not in FILES:
        raise ConfigError(f"{config_field}={path} must end in .jsonl or .parquet; convert the file")
    return file


def _check_value(name: str, value: Any, annotation: str, default: str, whose: str) -> None:
    kind, fits = _WANTED.get(annotation.removeprefix("Optional[").removesuffix("]"), ("", lambda value: True))
    if fits(value) or (value is None and annotation.startswith("Optional[")):
        return
    example = f", for example {default}, its default" if default else ""
    raise ConfigError(f"environment.params.{name}={value} must be {kind} for {whose}; set one{example}")


def _task(name: str) -> Declared | None:
    """Parameters of a reasoning-gym task; None where its source cannot be read. Raises ConfigError for no task."""
    sources = _tasks()
    if not sources:
        return None
    if name not in sources:
        near = difflib.get_close_matches(name, list(sources), n=4, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(sorted(sources))}"
        raise ConfigError(f"environment.task={name} is no reasoning-gym task; {hint}")
    tree = ast.parse(sources[name].read_text(encoding="utf-8"))
    for call in ast.walk(tree):  # register_dataset(name, class, config class, ...)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "register_dataset":
            named = call.args[0]
            config = call.args[2]
            same = not isinstance(named, ast.Constant) or named.value == name  # else a constant, one in a file
            if same and isinstance(config, ast.Name) and (found := _fields(tree, config.id)):
                return {key: kind for key, kind in found.items() if key not in ("seed", "size")}  # the environment's
    return None


@cache
def _tasks() -> dict[str, Path]:
    """Name of each reasoning-gym task -> the file that registers it; empty if the package is not here."""
    package = importlib.util.find_spec("reasoning_gym")
    found: dict[str, Path] = {}
    for root in (package.submodule_search_locations or ()) if package is not None else ():
        for path in Path(root).rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if "register_dataset(" in text:
                found |= dict.fromkeys(_REGISTERED.findall(text), path)
    return found


def _fields(tree: ast.Module, name: str) -> Declared:
    """Fields of a dataclass."""
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])
    return {
        node.target.id: (ast.unparse(node.annotation), ast.unparse(node.value) if node.value else "")
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _class(target: str) -> Declared | None:
    """Keyword arguments of a class of ours, module:Class; None where there is no such class: the run says so."""
    module, _, name = target.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name):
        for made in (node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"):
            arguments = made.args.args[2:]  # after self and setup
            defaults = [None] * (len(arguments) - len(made.args.defaults)) + list(made.args.defaults)[-len(arguments) :]
            return {
                one.arg: (
                    ast.unparse(one.annotation) if one.annotation else "",
                    ast.unparse(default) if default else "",
                )
                for one, default in zip(arguments, defaults, strict=False)
            }
    return None
