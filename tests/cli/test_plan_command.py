"""`orbit plan` as people and scripts see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orbit_cli import cli


def orbit(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["orbit", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, fits: bool = True
) -> str:
    assert orbit(monkeypatch, "plan", *arguments) == (0 if fits else 1)
    return capsys.readouterr().out


def test_the_table_answers_at_a_glance(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(monkeypatch, capsys, "model=deepseek_v4_pro", "hardware=b200x8", fits=False)
    assert max(len(line) for line in text.splitlines()) <= 100
    for words in ("864.7 GB of files", "8 GPUs of 192.3 GB", "base: routed experts", "KV cache", "usable"):
        assert words in text
    assert "fits       NO" in text
    assert "two copies of the base alone take 237.8 GB" in text.replace("\n           ", " ")
    assert "nearest    set memory.offload=swap" in text
    assert "Orbit cannot run that yet, it needs: a trainer for deepseek_v4" in text
    bars = [line for line in text.splitlines() if "BBBB" in line]
    assert len(bars) == 2 and all("|" in bar and "%" in bar for bar in bars)


def test_the_default_is_the_main_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(monkeypatch, capsys)
    assert "smollm2_135m: 134.52 M parameters" in text and "fits       yes" in text
    assert "longest    responses of" in text


def test_explain_gives_every_formula(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(monkeypatch, capsys, "model=kimi_k26", "hardware=b200x8", "--explain")
    assert "1.015 T weights x 4.50 bit / 8 GPUs" in text
    assert "engine.max_total_tokens=131,072 x 70,272 B" in text


def test_json_for_scripts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(monkeypatch, capsys, "model=kimi_k26", "hardware=h200x8", "--json", fits=False))
    assert found["checkpoint_bytes"] == 595_148_192_736
    assert found["fits"] is False and "two copies" in found["limit"]
    assert found["nearest"] == ["memory.shared_base=true"]
    assert found["kv_bytes_per_token"] == 70_272
    train = found["phases"]["train"]
    assert train["total_bytes"] == sum(train["parts"].values())
    assert set(train["parts"]) == set(train["formulas"])
    bases = {
        side: sum(nbytes for key, nbytes in train["parts"].items() if key.startswith(f"{side}/base"))
        for side in ("trainer", "engine")
    }
    assert {side: f"{nbytes / 1e9:.1f}" for side, nbytes in bases.items()} == {"trainer": "95.7", "engine": "74.4"}


def test_a_machine_of_unknown_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("model=qwen3_4b", "hardware=h200x1", "hardware.memory_mib=null", "engine.max_total_tokens=8192")
    assert "cannot be told: hardware.memory_mib is not set" in shown(monkeypatch, capsys, *overrides)
    assert json.loads(shown(monkeypatch, capsys, *overrides, "--json"))["fits"] is None


def test_multirun_over_machines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("-m", "model=kimi_k26", "hardware=h200x8,b200x8", "memory.shared_base=true,false")
    *rows, legend = shown(monkeypatch, capsys, *arguments, fits=False).splitlines()[2:]
    assert legend.startswith("paper: it fits, and Orbit cannot run it yet")
    answers = {tuple(line.split()[:2]): ("paper" if "paper" in line else "no") for line in rows}
    assert answers == {
        ("hardware=h200x8", "memory.shared_base=true"): "paper",
        ("hardware=h200x8", "memory.shared_base=false"): "no",
        ("hardware=b200x8", "memory.shared_base=true"): "paper",
        ("hardware=b200x8", "memory.shared_base=false"): "paper",
    }
    rows = json.loads(shown(monkeypatch, capsys, "-m", "hardware=cpu,h200x1", "--json"))
    assert [row["fits"] for row in rows] == [True, True]


def test_the_study_with_its_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "study.svg"
    text = shown(monkeypatch, capsys, "--compare", "--plot", str(picture))
    assert "4,120" in text and "528" in text and "595.15" in text and "Left out there" in text
    assert "<svg" in picture.read_text()
    rows = json.loads(shown(monkeypatch, capsys, "--compare", "--json"))
    assert {row["name"] for row in rows} >= {"kimi_k26", "qwen3_4b"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plot", "x.svg"), "--compare"),
        (("--compare", "--plot", "x.jpeg"), "ends in .svg, .png, .pdf"),
        (("--compare", "--plot", "no/such/folder/x.svg"), "cannot be written (No such file or directory)"),
        (("model=kimi_k26", "hardware=h200x8", "hardware.gpus=-3"), "hardware.gpus=-3 must be at least 1"),
        (("hardware.gpus=-3",), "hardware.gpus=-3 must be at least 0"),
        (("model=deepseek_v4_flash", "quantization=int4"), "set quantization=mxfp4"),
        (("--compare", "model=kimi_k26"), "leave the overrides out"),
        (("model=kimi_k62",), "did you mean kimi_k26"),
        (("-m", "hardware=h200x8,b300"), "b300"),
        (("model=checkpoint",), "model.path"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert orbit(monkeypatch, "plan", *arguments) == 2
    told = capsys.readouterr()
    assert words in told.err and told.err.count("\n") == 1 and told.out == ""


def test_a_picture_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.svg").mkdir()
    assert orbit(monkeypatch, "plan", "--compare", "--plot", str(tmp_path / "study.svg")) == 2
    assert "cannot be written (Is a directory)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["study.svg"]


def test_the_exit_code_says_whether_it_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that `orbit plan ... && orbit train ...` starts only what fits."""
    assert orbit(monkeypatch, "plan", "model=qwen3_4b", "hardware=h200x1") == 0
    assert orbit(monkeypatch, "plan", "model=kimi_k26", "hardware=h200x8") == 1
    assert orbit(monkeypatch, "plan", "-m", "model=qwen3_4b", "hardware=h200x1,h200x8") == 0
    assert orbit(monkeypatch, "plan", "-m", "model=kimi_k26", "hardware=h200x8,b200x8") == 1
    assert orbit(monkeypatch, "plan", "-m", "model=qwen3_4b", "hardware=h200x1,h200x8", "engine.tensor_parallel=8") == 1
    assert orbit(monkeypatch, "plan", "--help") == 0
    assert "Exit code: 0 if it fits, 1 if not, 2 for bad input" in capsys.readouterr().out


def test_train_refuses_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("train", "rollout", "eval"):
        assert orbit(monkeypatch, command, "model=kimi_k26") == 2
        told = capsys.readouterr().err
        assert "model.path is not set" in told and told.count("\n") == 1


@pytest.mark.timeout(120)
def test_planning_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['orbit', 'plan', 'model=kimi_k26', 'hardware=b200x8']\n"
        "from orbit_cli.cli import main\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "heavy = [m for m in ('torch', 'sglang', 'transformers', 'numpy') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
