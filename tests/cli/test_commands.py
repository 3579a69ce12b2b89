"""The command line as a person sees it: help, exit codes, one-line errors, and what is printed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from orbit_cli import cli
from orbit_cli.config import compose as compose_module
from orbit_cli.config.compose import compose
from orbit_cli.errors import ToldInterrupt

COMMANDS = ["train", "rollout", "eval", "quantize", "sync-test", "config", "doctor", "report"]


def orbit(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["orbit", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def run(checkout: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    path = os.pathsep.join([str(checkout / "src"), str(checkout / "kernels")])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}
    command = [sys.executable, "-m", "orbit_cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, **options)


def test_help_lists_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert orbit(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert [name for name in COMMANDS if f"  {name} " not in shown] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_examples(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert orbit(monkeypatch, command, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.strip().startswith(f"orbit {command}")]


def test_help_is_fast(checkout: Path) -> None:
    """CPU time, which a busy machine does not change much; the best of three."""
    times = []
    for _ in range(3):
        before = os.times()
        assert run(checkout, "--help").returncode == 0
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < 0.7


def test_a_config_mistake_is_one_line_and_exit_code_2(checkout: Path, tmp_path: Path) -> None:
    done = run(checkout, "train", "adapter.blok_size=3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("orbit: command line: there is no key adapter.blok_size")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []  # nothing half-written


@pytest.mark.parametrize("command", ["train", "rollout", "eval", "sync-test", "config"])
def test_commands_refuse_bad_overrides(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert orbit(monkeypatch, command, "model=tiny_mo") == 2
    assert "did you mean tiny_moe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("trian",), "there is no command trian; commands are train, plan, "),
        (("report",), "orbit report needs RUN: run folder; for example `orbit report runs/NAME`"),
        (("quantize", "smollm2"), "orbit quantize needs OUTPUT: folder to write"),
        (("plan", "--for", "sync"), "--for=sync is unknown; --for is one of train, rollout, eval"),
        (("plan", "--cfg", "hydra"), "--cfg=hydra is unknown; --cfg is one of job"),
        (("plan", "--jsn"), "orbit plan has no option --jsn; options are --for"),
        (("report", "a", "b"), "; `orbit report --help` shows what it takes"),
    ],
)
def test_what_no_command_takes_is_answered_in_one_line(
    arguments: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert orbit(monkeypatch, *arguments) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
    assert told.err.startswith("orbit: ") and sentence in told.err and "Value error" not in told.err


def test_training_on_a_truncated_policy_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert orbit(monkeypatch, "train", "rollout.top_p=0.9") == 2
    assert "rollout.top_p=1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "plan"])
def test_training_does_not_take_an_adapter_to_serve(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert orbit(monkeypatch, command, "recipe=smoke_dense_oft", f"run.adapter={tmp_path}") == 2
    told = capsys.readouterr()
    assert "would not start from it; set adapter.init_from" in told.err and told.err.count("\n") == 1
    assert told.out == "" and list(tmp_path.iterdir()) == []


def test_cfg_job_prints_the_composed_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert orbit(monkeypatch, "train", "--cfg", "job", "trainer.steps=3", "adapter=lora") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["trainer"]["steps"], shown["adapter"]["kind"]) == (3, "lora")


def test_config_shows_and_explains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert orbit(monkeypatch, "config", "trainer.steps=3") == 0
    assert "command line" in capsys.readouterr().out
    assert orbit(monkeypatch, "config", "explain", "adapter.rank") == 0
    assert "lora: rank r" in capsys.readouterr().out
    assert orbit(monkeypatch, "config", "explain", "adapter.block_size", "model=tiny_moe", "adapter.block_size=16") == 0
    assert "now      16, from command line with model=tiny_moe" in capsys.readouterr().out
    assert orbit(monkeypatch, "config", "explain", "engine.tensor_parallel", "model=kimi_k26", "hardware=b200x8") == 0
    assert "now      8 (${at_least_one:${hardware.gpus}}), from conf/model/kimi_k26.yaml" in capsys.readouterr().out
    assert orbit(monkeypatch, "config", "explain", "recipe") == 0
    assert "recipe=NAME with kimi_shaped_h200, main_job" in capsys.readouterr().out
    assert orbit(monkeypatch, "config", "explain", "model=tiny_moe") == 2
    assert "needs a key" in capsys.readouterr().err
    assert orbit(monkeypatch, "config", "explain", "adapter.rank", "adapter.rnk=3") == 2
    assert "did you mean adapter.rank" in capsys.readouterr().err
    assert orbit(monkeypatch, "config", "explain", "adapter.rnk") == 2
    assert "did you mean adapter.rank" in capsys.readouterr().err


def test_report_of_what_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert orbit(monkeypatch, "report", str(tmp_path / "none")) == 2
    assert "no folder" in capsys.readouterr().err
    assert orbit(monkeypatch, "report", str(tmp_path)) == 2
    assert "no run folder" in capsys.readouterr().err


def test_quantize_with_swapped_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert orbit(monkeypatch, "quantize", "smollm2", "quantization=int4") == 2
    assert "SOURCE" in capsys.readouterr().err


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    assert orbit(monkeypatch, "train") == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(("stop", "told"), [(KeyboardInterrupt, "orbit: interrupted\n"), (ToldInterrupt, "")])
def test_an_interrupted_command_says_so_once(
    stop: type[BaseException], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through Typer, which would end with 130 and no word."""

    def interrupted(*_: object) -> None:
        raise stop

    monkeypatch.setattr(compose_module, "read_overrides", interrupted)
    assert orbit(monkeypatch, "config", "trainer.steps=3") == 130
    assert capsys.readouterr().err == told


def test_an_interrupt_while_importing_is_quiet(checkout: Path, tmp_path: Path) -> None:
    """The first 0.1 s of every command; Python 3.11 makes a RuntimeError of one inside a class that is made."""
    (tmp_path / "typer.py").write_text(
        "import os, signal, time\n"
        "class Name:\n"
        "    def __set_name__(self, *_):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(5)\n"
        "class Made:\n"
        "    name = Name()\n"
    )
    path = os.pathsep.join([str(tmp_path), str(checkout / "src")])
    for start in (["-m", "orbit_cli"], ["-c", f"from {_entry_point(checkout)} import main; main()"]):
        command = [sys.executable, *start, "--help"]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "orbit: interrupted\n")


def _entry_point(checkout: Path) -> str:
    """The module that the installed command calls."""
    scripts = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["scripts"]
    return scripts["orbit"].removesuffix(":main")


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(ZeroDivisionError):
        orbit(monkeypatch, "train")


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from orbit_cli.commands import machine

    real = machine.metadata.version

    def version(name: str) -> str:
        return "0.0.1" if name == "transformers" else real(name)

    monkeypatch.setattr(machine.metadata, "version", version)
    assert orbit(monkeypatch, "doctor") == 1
    shown = capsys.readouterr()
    line = next(line for line in shown.out.splitlines() if " transformers " in line)
    assert line.startswith("FAIL") and "0.0.1" in line and "5.12.1" in line
    assert "pip install 'transformers==5.12.1'" in shown.out
    assert "transformers" in shown.err


def test_doctor_is_content_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert orbit(monkeypatch, "doctor") == 0, capsys.readouterr().out
    assert "engine plugin" in capsys.readouterr().out


def test_completion_of_overrides() -> None:
    from orbit_cli.commands.options import complete_override

    assert complete_override("adapter=") == ["adapter=lora", "adapter=oft"]
    assert "recipe=main_job" in complete_override("recipe=")
    assert "adapter.kind=oft" in complete_override("adapter.k")
    assert complete_override("trainer.ste") == ["trainer.steps="]


def test_shell_completion_script(checkout: Path) -> None:
    environment = {**os.environ, "_ORBIT_COMPLETE": "complete_bash", "COMP_WORDS": "orbit tra", "COMP_CWORD": "1"}
    script = Path(sys.executable).with_name("orbit")
    done = subprocess.run([str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert "train" in done.stdout.split()


def test_it_works_from_any_folder(checkout: Path, tmp_path: Path) -> None:
    done = run(checkout, "config", "recipe=smoke_dense_oft", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "recipes/smoke_dense_oft.yaml" in done.stdout


def test_config_is_the_config_of_the_run(checkout: Path) -> None:
    done = run(checkout, "eval", "--cfg", "job", "run.name=2E3")
    assert yaml.safe_load(done.stdout)["run"]["name"] == "2E3" == compose(["run.name=2E3"]).run.name
