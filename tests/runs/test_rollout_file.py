"""A file of `orbit rollout` grows by rows of one making, and says in one sentence why it takes no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from orbit_cli.adapters.bundle import make_version
from orbit_cli.commands.rollout import written_text
from orbit_cli.config.compose import compose
from orbit_cli.environments.registry import build_environment
from orbit_cli.errors import ConfigError, StorageError
from orbit_cli.quantization.base_model import prepare_base
from orbit_cli.runs.adapters import ServedAdapter
from orbit_cli.runs.collect import _write_parquet, collect
from orbit_cli.runs.rollout_file import RolloutFile, making
from orbit_cli.types import AdapterSpec, Prompt

PROMPTS = [
    Prompt(id=f"sum/{n}", messages=[{"role": "user", "content": f"{n} + 1"}], answer=str(n + 1), environment="sum")
    for n in range(3)
]


def served(value: float) -> ServedAdapter:
    spec = AdapterSpec(kind="lora", targets=("q_proj",), rank=2)
    tensors = {"model.layers.0.self_attn.q_proj.lora_A": torch.full((2, 4), value, dtype=torch.bfloat16)}
    return ServedAdapter(name="mine", version=make_version(1, spec, tensors))


def opened(path: Path, *overrides: str, base: str = "tiny-int4-1", adapter: ServedAdapter | None = None) -> RolloutFile:
    config = compose([f"quantization.cache_dir={path.parent}", "rollout.group_size=2", *overrides])
    return RolloutFile(path, making(config, path.parent / "bases" / base, adapter, "float32"))


def rows(prompt: Prompt, count: int = 2) -> list[dict]:
    shown = {"prompt_id": prompt.id, "messages": prompt.messages, "reference_answer": prompt.answer}
    return [{**shown, "sample": sample} for sample in range(count)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two prompts, whole."""
    file = opened(tmp_path / "w.jsonl")
    assert file.complete(PROMPTS) == set() and not file.path.exists()
    file.append([*rows(PROMPTS[0]), *rows(PROMPTS[1])])
    return file.path


def test_what_is_whole_is_kept(path: Path) -> None:
    file = opened(path)
    before = path.read_text()
    with path.open("a") as text:
        text.write(json.dumps({**rows(PROMPTS[2])[0], "made_by": file.digest}) + "\n" + '{"prompt_id": "su')
    assert file.complete(PROMPTS) == {"sum/0", "sum/1"}
    assert path.read_text() == before
    assert opened(path, "rollout.collect_prompts=9", "hardware.threads=1").complete(PROMPTS) == {"sum/0", "sum/1"}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["seed=7"], "seed was 0 and is now 7"),
        (["rollout.group_size=3"], "rollout.group_size was 2 and is now 3"),
        (["rollout.temperature=0.5"], "rollout.temperature was 1.0 and is now 0.5"),
        (["rollout.collect_split=eval"], "rollout.collect_split was train and is now eval"),
        (["environment.system_prompt=hello"], "environment.system_prompt was Answer briefly. and is now hello"),
    ],
)
def test_other_settings_are_refused(overrides: list[str], sentence: str, path: Path) -> None:
    before = path.read_text()
    with pytest.raises(ConfigError) as caught:
        opened(path, *overrides).complete(PROMPTS)
    told = str(caught.value)
    assert f"({sentence})" in told and told.startswith(f"run.output={path} ") and told.endswith("to another file")
    assert path.read_text() == before


def test_another_base_or_adapter_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model was tiny-int4-1 and is now tiny-int4-2"):
        opened(path, base="tiny-int4-2").complete(PROMPTS)
    with pytest.raises(ConfigError, match=r"run\.adapter was null and is now [0-9a-f]{16}"):
        opened(path, adapter=served(1.0)).complete(PROMPTS)
    assert opened(path, adapter=served(1.0)).digest != opened(path, adapter=served(2.0)).digest


def test_rows_without_their_record(path: Path) -> None:
    """The rows say themselves whose they are, so a renamed file is known; only the words are lost."""
    opened(path).record.unlink()
    assert opened(path).complete(PROMPTS) == {"sum/0", "sum/1"}
    with pytest.raises(ConfigError, match=r"no w\.jsonl\.meta\.json that says of which"):
        opened(path, "seed=7").complete(PROMPTS)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"made": 3}'])
def test_a_damaged_record_is_said_to_be_damaged(text: str, path: Path) -> None:
    opened(path).record.write_text(text)
    assert opened(path).complete(PROMPTS) == {"sum/0", "sum/1"}
    with pytest.raises(ConfigError, match=r"another run, and w\.jsonl\.meta\.json beside it, .* is damaged; set run"):
        opened(path, "seed=7").complete(PROMPTS)


def test_a_record_of_other_rows(path: Path) -> None:
    record = opened(path).record
    record.write_text(record.read_text().replace('"digest": "', '"digest": "0'))
    with pytest.raises(ConfigError, match=r"w\.jsonl\.meta\.json beside it is of yet another"):
        opened(path, "seed=7").complete(PROMPTS)


@pytest.mark.parametrize("line", ['{"prompt_id": "sum/0"}', '{"question": 3}', "[1]", "no JSON"])
def test_lines_that_are_not_ours_are_left_alone(line: str, path: Path) -> None:
    path.write_text(line + "\n" + path.read_text())
    before = path.read_text()
    with pytest.raises(ConfigError, match="has a line 1 that does not say what made it"):
        opened(path).complete(PROMPTS)
    assert path.read_text() == before


def test_prompts_that_read_otherwise_now(path: Path) -> None:
    changed = Prompt(id="sum/1", messages=[{"role": "user", "content": "1 + 2"}], answer="3", environment="sum")
    with pytest.raises(ConfigError, match=r"a prompt sum/1 that reads otherwise now"):
        opened(path).complete([PROMPTS[0], changed])


def test_nothing_to_do_starts_no_engine(tmp_path: Path) -> None:
    target = tmp_path / "w.parquet"
    own = ["recipe=smoke_dense_oft", f"quantization.cache_dir={tmp_path / 'cache'}", f"run.root={tmp_path / 'runs'}"]
    config = compose([*own, "rollout.group_size=2", "rollout.collect_prompts=3", f"run.output={target}"])
    environment = build_environment(config.environment, config.seed)
    prompts = [environment.train_prompt(index) for index in range(3)]
    environment.close()
    base = prepare_base(config.model, config.quantization, lambda text: None)
    file = RolloutFile(tmp_path / "w.jsonl", making(config, base, None, "float32"))
    file.append([row for prompt in prompts for row in rows(prompt)])
    done = collect(config)
    assert done == {"output": str(target), "rows": 6, "prompts": 3, "new_rows": 0, "new_prompts": 0}
    assert written_text(done) == f"{target} has 6 rows of 3 prompts: none is new, all were there"
    assert target.is_file() and not (tmp_path / "runs").exists()
    file.path.unlink()
    with pytest.raises(ConfigError, match=r"w\.parquet is there already, and w\.jsonl, .* is not"):
        collect(config)


def test_no_file_is_begun_on_a_full_disk(tmp_path: Path, largest_file) -> None:
    file = opened(tmp_path / "new.jsonl")
    with largest_file(4000), pytest.raises(StorageError, match=r"new\.jsonl cannot be written"):
        file.append(rows(PROMPTS[0]) * 500)
    assert list(tmp_path.iterdir()) == []


def test_rows_on_a_full_disk_are_whole_or_not_there(path: Path, largest_file) -> None:
    before = path.read_text()
    with largest_file(max(4000, len(before) + 100)), pytest.raises(StorageError):
        opened(path).append(rows(PROMPTS[2]) * 500)
    assert path.read_text() == before


def test_nothing_is_left_of_a_parquet_file_on_a_full_disk(path: Path, largest_file) -> None:
    target = path.with_suffix(".parquet")
    before = sorted(path.parent.iterdir())
    with largest_file(50), pytest.raises(StorageError, match=r"\.parquet cannot be written"):
        _write_parquet(target)
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((80, 10, 16, 2), "out.parquet has 80 rows of 10 prompts: 16 rows of 2 prompts are new"),
        ((80, 10, 80, 10), "out.parquet has 80 rows of 10 prompts"),
        ((2, 2, 1, 1), "out.parquet has 2 rows of 2 prompts: 1 row of 1 prompt is new"),
    ],
)
def test_rows_and_prompts_new_and_old_are_told_apart(counts: tuple[int, ...], said: str) -> None:
    names = ("rows", "prompts", "new_rows", "new_prompts")
    assert written_text({"output": "out.parquet", **dict(zip(names, counts, strict=True))}) == said
