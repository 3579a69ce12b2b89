"""The backends that a config may name are those of the pinned SGLang, read from its source."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from orbit_cli.config.schema.system import EngineConfig
from orbit_cli.engine.arguments import ATTENTION_BACKENDS, MOE_RUNNER_BACKENDS, check_engine
from orbit_cli.errors import ConfigError


def test_the_backends_are_sglangs() -> None:
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent / "srt" / "server_args.py"
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List) and isinstance(node.targets[0], ast.Name)
    }
    assert tuple(lists["ATTENTION_BACKEND_CHOICES"]) == ATTENTION_BACKENDS
    assert tuple(lists["MOE_RUNNER_BACKEND_CHOICES"]) == MOE_RUNNER_BACKENDS


def test_what_sglang_does_not_know_is_refused() -> None:
    check_engine(EngineConfig(attention_backend="fa3"))
    with pytest.raises(ConfigError, match="engine.attention_backend=tritn is none of SGLang's; nearest are triton"):
        check_engine(EngineConfig(attention_backend="tritn"))
    with pytest.raises(ConfigError, match="engine.extra.dtype is set, but Orbit sets dtype itself"):
        check_engine(EngineConfig(extra={"dtype": "float16"}))
