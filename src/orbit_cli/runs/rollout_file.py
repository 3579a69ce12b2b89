"""The rows of `orbit rollout`: a JSONL file, and beside it FILE.meta.json, which says what made them.

Only rows of one making lie in a file: base, adapter, seed, environment and sampling. Each row carries the digest of its
making as `made_by`, so a file that was renamed, joined or parted from its record is still known; the record beside it
says in words what differs. Prompts are complete or not in it: what a killed run left of one is dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orbit_cli.config.compose import flatten
from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.config.serialize import to_plain
from orbit_cli.errors import ConfigError, StorageError, UserError
from orbit_cli.quantization.identity import source_identity
from orbit_cli.runs.adapters import ServedAdapter
from orbit_cli.telemetry.files import AppendedFile, read_json, write_atomic, write_json
from orbit_cli.types import Prompt

ABOUT = "what made the rows of the file of this name; each of them has the digest as made_by"
SAMPLING = ("group_size", "collect_split", "max_new_tokens", "temperature", "top_p", "top_k")  # of rollout
SHOWN = 3  # differences that are told


def making(config: OrbitConfig, base: Path, adapter: ServedAdapter | None, dtype: str) -> dict[str, Any]:
    """Everything that decides the samples, by config key; not how many prompts are sampled, nor on what machine."""
    cache = Path(config.quantization.cache_dir).expanduser().absolute()
    made_here = base.is_relative_to(cache)  # its name holds a digest of source and settings
    plain = to_plain(config)
    environment = flatten(plain["environment"], "environment")
    environment.pop("environment.reward.timeout_s")
    return {
        "model": base.name if made_here else f"{base.name}, {source_identity(base)[:16]}",
        "model.dtype": dtype,
        "model.tokenizer": config.model.tokenizer,
        "model.stop_token_ids": config.model.stop_token_ids,
        "run.adapter": adapter.version.checksum[:16] if adapter else None,
        "seed": config.seed,
        **{f"rollout.{name}": plain["rollout"][name] for name in SAMPLING},
        **environment,
    }


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """One file of rows of one making."""

    path: Path
    made: Mapping[str, Any]

    @property
    def record(self) -> Path:
        return self.path.with_name(f"{self.path.name}.meta.json")

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.made, sort_keys=True).encode()).hexdigest()[:16]

    def complete(self, prompts: Sequence[Prompt]) -> set[str]:
        """Ids of prompts that have all their samples in the file; what else is in it is dropped, as is a cut last line.

        Raises ConfigError, and changes nothing, if a row is of another making or no row of ours, or if one of `prompts`
        is not what it was.
        """
        rows = self._rows()
        wanted = {prompt.id: prompt for prompt in prompts}
        seen: dict[str, int] = {}
        for row in rows:
            prompt = wanted.get(row["prompt_id"])
            if prompt and (row.get("messages"), row.get("reference_answer")) != (prompt.messages, prompt.answer):
                raise ConfigError(
                    f"run.output={self.path} has samples of a prompt {prompt.id} that reads otherwise now, so the "
                    "environment's data changed; set run.output to another file"
                )
            seen[row["prompt_id"]] = seen.get(row["prompt_id"], 0) + 1
        done = {identity for identity, count in seen.items() if count >= self.made["rollout.group_size"]}
        kept = "".join(_line(row) for row in rows if row["prompt_id"] in done)
        if self.path.exists() and kept != self.path.read_text(encoding="utf-8", errors="replace"):
            write_atomic(self.path, kept)
        return done

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add whole prompts; they are on disk when this returns. The record is there before the first row.

        Raises StorageError if the disk is full; nothing of these rows is in the file then, and no file was begun.
        """
        begun = self.path.exists()
        write_json(self.record, {"about": ABOUT, "digest": self.digest, "made": dict(self.made)})
        try:
            with AppendedFile(self.path) as file:
                file.append("".join(_line({**row, "made_by": self.digest}) for row in rows))
        except StorageError:
            if not begun:
                self.record.unlink(missing_ok=True)
            raise

    def _rows(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                made_by = row.get("made_by") if isinstance(row, dict) and "prompt_id" in row else None
            except ValueError:
                if number == len(lines):  # empty, or what a killed run was writing
                    continue
                made_by = None
            if made_by != self.digest:
                raise ConfigError(
                    f"run.output={self.path} {self._difference(made_by, number)}; set run.output to another file"
                )
            rows.append(row)
        return rows

    def _difference(self, made_by: str | None, number: int) -> str:
        """What the file has that this command would not have written."""
        if made_by is None:
            return f"has a line {number} that does not say what made it, so nothing can be added to it"
        another = "holds samples of another run"
        try:
            found = read_json(self.record)
        except UserError:  # the rows themselves have said that they are of another making
            found = {}
        if found is None:
            return f"{another}, and there is no {self.record.name} that says of which"
        before = found.get("made")
        if not isinstance(before, dict):
            return f"{another}, and {self.record.name} beside it, which would say of which, is damaged"
        if found.get("digest") != made_by:
            return f"{another}, and {self.record.name} beside it is of yet another"
        other = [key for key in {**before, **self.made} if before.get(key) != self.made.get(key)]
        told = ", ".join(
            f"{key} was {_shown(before.get(key))} and is now {_shown(self.made.get(key))}" for key in other[:SHOWN]
        )
        more = f" and {len(other) - SHOWN} more differ" if len(other) > SHOWN else ""
        return f"{another} ({told}{more})"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"
