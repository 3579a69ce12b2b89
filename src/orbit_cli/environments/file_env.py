"""Prompts and answers from a JSONL or Parquet file, as an environment.

Held-out rows come from a second file, or are the last rows of the first; training rows with the same prompt as a
held-out row are left out. Every epoch has its own order, a function of (seed, epoch).
"""

from __future__ import annotations

import difflib
import functools
import json
import random
from pathlib import Path
from typing import Any

from orbit_cli.environments.params import check_file
from orbit_cli.environments.protocol import EnvironmentSetup, Step
from orbit_cli.errors import ConfigError
from orbit_cli.types import Prompt


class FileEnvironment:
    """Single-turn tasks of a file.

    Raises ConfigError for a file that is missing, empty or unreadable, a column that is not there (naming those that
    are), a row without prompt or answer, and where nothing is left to train on.
    """

    def __init__(
        self,
        setup: EnvironmentSetup,
        *,
        path: str,
        eval_path: str | None,
        prompt_column: str,
        answer_column: str,
        held_out: int,
    ) -> None:
        self.name, self.max_turns = setup.name, setup.max_turns
        self._setup, self._prompt_column, self._answer_column = setup, prompt_column, answer_column
        rows = self._read("environment.path", path)
        if eval_path is not None:
            self._eval = [("eval", n, row) for n, row in enumerate(self._read("environment.eval_path", eval_path))]
            train = [("train", n, row) for n, row in enumerate(rows)]
        else:
            if held_out >= len(rows):
                raise ConfigError(
                    f"environment.path={path} has {len(rows)} rows and evaluation.prompts={held_out} would hold out "
                    "all; lower evaluation.prompts, or set environment.eval_path"
                )
            numbered = [("train", n, row) for n, row in enumerate(rows)]
            train = numbered[: len(rows) - held_out]
            self._eval = [("eval", n, row) for _, n, row in numbered[len(rows) - held_out :]]
        held_out_prompts = {self._key(row) for _, _, row in self._eval}
        self._train = [item for item in train if self._key(item[2]) not in held_out_prompts]
        if not self._train:
            raise ConfigError(f"every prompt of environment.path={path} is also held out; nothing is left to train on")

    def train_prompt(self, index: int) -> Prompt:
        """Row of epoch index // rows, in that epoch's order."""
        epoch, position = divmod(index, len(self._train))
        return self._prompt(*self._train[epoch_order(self._setup.seed, epoch, len(self._train))[position]])

    def eval_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out rows."""
        if count > len(self._eval):
            raise ConfigError(
                f"evaluation.prompts={count} is more than the {len(self._eval)} held-out rows; lower it, or give a "
                "longer environment.eval_path"
            )
        return [self._prompt(*item) for item in self._eval[:count]]

    def step(self, prompt: Prompt, responses: list[str]) -> Step:
        """Grade the response."""
        return self._setup.single_turn(prompt, responses)

    def close(self) -> None:
        """Stop the grader's processes."""
        self._setup.close()

    def _read(self, config_field: str, path: str) -> list[dict[str, Any]]:
        rows = read_rows(config_field, path)
        for field, column in (("prompt_column", self._prompt_column), ("answer_column", self._answer_column)):
            for number, row in enumerate(rows):
                if column not in row:
                    near = difflib.get_close_matches(column, list(row), n=1)
                    hint = f"; set environment.{field}={near[0] if near else 'one of them'}"
                    raise ConfigError(
                        f"environment.{field}={column} is not in row {number} of {path}, which has the columns "
                        f"{', '.join(row)}{hint}"
                    )
                if row[column] is None:
                    raise ConfigError(f"row {number} of {path} has no {column}; fill it in or remove the row")
        bad = next((n for n, row in enumerate(rows) if not _is_prompt(row[self._prompt_column])), None)
        if bad is not None:
            raise ConfigError(
                f"the {self._prompt_column} of row {bad} of {path} is neither text nor a list of messages with role "
                "and content; set environment.prompt_column to a column that is"
            )
        return rows

    def _key(self, row: dict[str, Any]) -> str:
        return json.dumps(row[self._prompt_column], sort_keys=True)

    def _prompt(self, split: str, number: int, row: dict[str, Any]) -> Prompt:
        return Prompt(
            id=f"{self.name}/{split}/{number}",
            messages=self._messages(row[self._prompt_column]),
            answer=str(row[self._answer_column]),
            environment=self.name,
            metadata={k: v for k, v in row.items() if k not in (self._prompt_column, self._answer_column)},
        )

    def _messages(self, prompt: str | list[dict[str, str]]) -> list[dict[str, str]]:
        if isinstance(prompt, str):
            return self._setup.messages(prompt)
        # A conversation: the template goes around its last message, the system prompt before it unless it has its own.
        messages = [{"role": m["role"], "content": m["content"]} for m in prompt]
        posed = self._setup.messages(messages[-1]["content"])
        system = [] if messages[0]["role"] == "system" else posed[:-1]
        return [*system, *messages[:-1], messages[-1] | {"content": posed[-1]["content"]}]


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, rows: int) -> list[int]:
    """Order of the rows in one epoch; the same for the same arguments on every machine."""
    order = list(range(rows))
    random.Random(f"order/{seed}/{epoch}").shuffle(order)
    return order


def read_rows(config_field: str, path: str) -> list[dict[str, Any]]:
    """All rows of a .jsonl or .parquet file. Raises ConfigError naming the config field."""
    file = check_file(config_field, path)
    rows = READERS[file.suffix](config_field, file)
    if not rows:
        raise ConfigError(f"{config_field}={path} has no rows; write a JSON object per line, or set another file")
    return rows


def _read_jsonl(config_field: str, file: Path) -> list[dict[str, Any]]:
    rows = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ConfigError(f"{config_field}={file}: line {number} is not UTF-8; convert the file") from error
            except json.JSONDecodeError as error:
                raise ConfigError(f"{config_field}={file}: line {number} is no JSON ({error}); correct it") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{config_field}={file}: line {number} is no JSON object; write one object per line")
            rows.append(row)
    return rows


def _read_parquet(config_field: str, file: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{config_field}={file} cannot be read as Parquet: {error}") from error


READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(_is_message(message) for message in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
