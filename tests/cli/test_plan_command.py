"""`orbit plan` as people and scripts see it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orbit_cli import cli

KIMI = "kimi_k26 (model type kimi_k25)"
SMALL_SHARE = "engine.mem_fraction_static=0.13"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def orbit(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["orbit", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert orbit(monkeypatch, "plan", *arguments) == code
    return capsys.readouterr().out


def test_the_table_answers_at_a_glance(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(monkeypatch, capsys, "model=deepseek_v4_pro", "hardware=b200x8", code=1)
    assert max(len(line) for line in text.splitlines()) <= 100
    for words in ("864.7 GB of files", "8 GPUs of 192.3 GB", "base: routed experts", "KV cache", "usable"):
        assert words in text
    assert "fits       NO" in text
    assert "two copies of the base alone take 237.8 GB" in text.replace("\n           ", " ")
    assert "nearest    set memory.offload=swap" in text
    assert "not built  Orbit cannot train that yet: it needs a trainer for deepseek_v4_pro" in text
    bars = [line for line in text.splitlines() if "BBBB" in line]
    assert len(bars) == 2 and all("|" in bar and "%" in bar for bar in bars)


def test_absurd_sizes_stay_in_their_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(monkeypatch, capsys, "hardware=h200x1", "engine.max_total_tokens=99999999999999", code=1)
    assert "PB (10^15 bytes) on each GPU" in text and max(map(len, text.splitlines())) <= 100
    cache = next(line for line in text.splitlines() if line.startswith("  KV cache"))
    assert len(cache.split()) == 4 and len(cache) == 44 + 24


def test_the_default_is_the_main_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(monkeypatch, capsys)
    assert "smollm2_135m: 134.52 M parameters" in text and "fits       yes" in text
    assert "longest    responses of" in text


def test_explain_gives_every_formula(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(monkeypatch, capsys, "model=kimi_k26", "hardware=b200x8", "--explain", code=3)
    assert "tokens   192 = 1 x 128 prompt + 8 x 8 response; a micro-batch takes samples up to" in text
    assert "1.015 T weights x 4.50 bit / 8 GPUs" in text
    assert "engine.max_total_tokens=131,072 x 70,272 B" in text
    assert "fits  " not in text and "longest  " not in text  # the plan itself is not said again
    for words in ("trainer: train ", "usable   188.4 GB = 192.3 GB x (1 - memory.headroom=0.02)", "\nwords\n"):
        assert words in text
    for total in re.findall(
        r"^(?:train|rollout) +([0-9.]+) GB = trainer ([0-9.]+) GB \+ engine ([0-9.]+) GB$", text, re.M
    ):
        assert float(total[0]) == pytest.approx(float(total[1]) + float(total[2]), abs=0.11)


def test_json_for_scripts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(monkeypatch, capsys, "model=kimi_k26", "hardware=h200x8", "--json", code=1))
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
    text = shown(monkeypatch, capsys, *overrides)
    assert "cannot be told: hardware.memory_mib is not set" in text and "Not in the sum" not in text
    text = shown(monkeypatch, capsys, *overrides[:-1]).replace("\n           ", " ")
    assert "Not in the sum: SGLang fills engine.mem_fraction_static=0.7 of a GPU" in text
    found = json.loads(shown(monkeypatch, capsys, *overrides, "--json"))
    assert found["longest_response_overrides"] == []
    assert found["fits"] is None and found["longest_response_tokens"] is None and found["verdict"] == "cannot be told"


def test_multirun_over_machines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("-m", "model=kimi_k26", "hardware=h200x8,b200x8", "memory.shared_base=true,false")
    about, shared, head, *rows, legend = shown(monkeypatch, capsys, *arguments, code=1).splitlines()
    assert "1 GB = 10^9 bytes" in about and shared == "for all: model=kimi_k26" and "runs today" in head
    assert legend == "not built: it fits, and Orbit cannot run it yet"
    assert head.split()[:2] == ["hardware", "memory.shared_base"]
    answers = {tuple(line.split()[:2]): "GB  not built" in line for line in rows if "200x8" in line}
    assert list(answers.items()) == [
        (("h200x8", "true"), True),
        (("h200x8", "false"), False),
        (("b200x8", "true"), True),
        (("b200x8", "false"), True),
    ]
    rows = json.loads(shown(monkeypatch, capsys, "-m", "hardware=cpu,h200x1", "--json"))
    assert [row["fits"] for row in rows] == [True, True]


@pytest.mark.parametrize("width", [40, 60, 72, 100, 300])
@pytest.mark.parametrize(
    "arguments",
    [
        ("model=kimi_k26", "hardware=h200x8"),
        ("hardware=cpu",),
        ("--for", "rollout", "model=qwen3_4b", "hardware=h200x1"),
        ("model=kimi_k26", "hardware=b200x8", "--explain"),
        ("--compare",),
    ],
)
def test_a_plan_is_as_wide_as_the_terminal(
    width: int, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From 60 to 100 columns; only a key or override that is longer than a line stands out, uncut."""
    texts = {}
    for columns in (width, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        orbit(monkeypatch, "plan", *arguments)
        texts[columns] = capsys.readouterr().out
    lines = texts[width].splitlines()
    wide = [line for line in lines if len(line) > min(max(width, 60), 100)]
    assert [line for line in wide if len(line.split()) > 1] == []
    number = re.compile(r"\d[\d,.]*\d")
    assert sorted(set(number.findall(texts[width]))) == sorted(set(number.findall(texts[100])))


def test_a_share_that_binds_is_said_where_the_gpu_has_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    share = ("engine.mem_fraction_static=0.03", "engine.max_total_tokens=131072")
    text = " ".join(
        shown(monkeypatch, capsys, "--for", "rollout", "model=qwen3_4b", "hardware=h200x1", *share, code=1).split()
    )
    assert "fits NO" in text and "that share binds: the GPU itself has memory left" in text


def test_padded_and_computed_tokens_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(shown(monkeypatch, capsys, "model=qwen3_4b", "hardware=h200x1").split())
    assert "computes up to 960 tokens (4,096 padded): 64 samples that share 8 prompts" in text
    assert "one of 8,704 padded tokens (trainer.micro_batch_tokens=8704) takes all of a step" in text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("width", [40, 80, 120, 300])
def test_wide_tables_are_readable_in_narrow_terminals(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys are said once where there is room, in a line of their own elsewhere; figures are never cut."""
    monkeypatch.setenv("COLUMNS", str(width))
    experts, pools = "adapter.expert_targets=[gate_proj,up_proj,down_proj],[]", "engine.max_total_tokens=131072,65536"
    arguments = ("-m", "model=kimi_k26", "hardware=h200x8,b200x8", experts, pools, "experiment=long_answers")
    lines = shown(monkeypatch, capsys, *arguments, code=1).splitlines()
    assert max(map(len, lines)) <= min(max(width, 60), 120)
    figures = [re.findall(r"\d[\d.]* GB", line) for line in lines[2:]]
    rows = [row for row in figures if len(row) == 3]
    plans = json.loads(shown(monkeypatch, capsys, *arguments, "--json", code=1))
    exact = [[*(phase["total_bytes"] for phase in plan["phases"].values()), plan["budget_bytes"]] for plan in plans]
    assert rows == [[f"{nbytes / 1e9:.1f} GB" for nbytes in row] for row in exact] and len(rows) == 8
    named = sum("adapter.expert_targets" in line for line in lines)
    assert named == (1 if width >= 120 else 8)
    assert "for all: model=kimi_k26 experiment=long_answers" in lines


def test_keys_are_shortened_before_they_get_lines_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ("-m", "hardware=h200x1", "engine.max_total_tokens=65536,131072", "trainer.micro_batch_tokens=512,1024")
    _, _, *legend, head, first, _, _, _ = shown(monkeypatch, capsys, *arguments).splitlines()
    assert "micro_batch_tokens is trainer.micro_batch_tokens" in " ".join(map(str.strip, legend))
    assert head.split()[:2] == ["max_total_tokens", "micro_batch_tokens"]
    assert first.split()[:2] == ["65536", "512"]


def test_a_combination_that_cannot_be_laid_out_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("-m", "model=qwen3_4b", "engine.tensor_parallel=4", "hardware=h200x1,h200x8")
    lines = shown(monkeypatch, capsys, *arguments, code=1).splitlines()
    assert lines[3].startswith("h200x1") and " refused " in lines[3]
    assert next(line for line in lines[4:] if line.startswith("h200x8"))
    first, second = json.loads(shown(monkeypatch, capsys, *arguments, "--json", code=1))
    assert list(first) == list(second)  # the same keys
    assert first["overrides"] == [*arguments[1:3], "hardware=h200x1"]
    assert first["verdict"] == "refused" and first["runnable"] is False and first["phases"] is None
    assert second["verdict"] == "not built"


@pytest.mark.parametrize(
    ("arguments", "code", "answer", "words"),
    [
        (("model=qwen3_30b_a3b", "hardware=h200x1"), 0, "runs", "yes, for prompts of 128 and responses of 8 tokens"),
        (("model=qwen3_30b_a3b", "hardware=h200x8"), 3, "not built", "it needs a trainer on more than one GPU"),
        (("model=kimi_k26", "hardware=b200x8"), 3, "not built", f"an engine for {KIMI}"),
        (("model=kimi_k26", "hardware=h200x8"), 1, "does not fit", "NO, for prompts of 128"),
        (("model=kimi_k26", "memory.context_gib=500"), 1, "does not fit", "this yet: it needs an engine for kimi_k26"),
        (("memory.shared_base=true",), 3, "not built", "set memory.shared_base=false"),
        (("hardware.memory_mib=3000",), 1, "does not fit", "orbit train starts it all the same"),
        (("--for", "rollout", "model=qwen3_4b", "hardware=h200x8"), 0, "runs", "7 GPUs stay idle"),
    ],
)
def test_text_table_json_and_exit_code_agree(
    arguments: tuple[str, ...],
    code: int,
    answer: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(monkeypatch, capsys, *arguments, code=code)
    assert words in " ".join(text.split())
    assert len(text.splitlines()) <= 48 and max(len(line) for line in text.splitlines()) <= 100
    assert not re.search(r"-0\.0\b", text)
    found = json.loads(shown(monkeypatch, capsys, *arguments, "--json", code=code))
    assert (found["verdict"], found["runnable"], bool(found["not_built"])) == (
        answer,
        answer == "runs",
        answer == "not built" or "model=kimi_k26" in arguments,
    )
    assert found["longest_response_tokens"] is None or found["longest_response_tokens"] > 0
    table = shown(monkeypatch, capsys, "-m", *arguments, code=code)
    assert {"runs": " yes", "not built": " not built ", "does not fit": " no "}[answer] in table


def test_sampling_alone_is_planned_without_a_trainer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("model=qwen3_30b_a3b", "hardware=rtx4090x1", "engine.mem_fraction_static=0.9")
    shown(monkeypatch, capsys, *overrides, code=1)
    text = shown(monkeypatch, capsys, "--for", "eval", *overrides)
    assert "trainer" not in text and "micro-batch" not in text
    found = json.loads(shown(monkeypatch, capsys, "--for", "eval", *overrides, "--json"))
    assert found["for"] == "eval" and list(found["phases"]) == ["rollout"]
    assert found["largest_micro_batch_tokens"] is None


def test_the_study_with_its_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "study.svg"
    text = shown(monkeypatch, capsys, "--compare", "--plot", str(picture))
    assert "4,120" in text and "528" in text and "595.15" in text and "Sphere-AI-Lab/orbit" in text
    assert "<svg" in picture.read_text()
    rows = json.loads(shown(monkeypatch, capsys, "--compare", "--json"))
    assert {row["name"] for row in rows} >= {"kimi_k26", "qwen3_4b"}
    small = next(row for row in rows if row["name"] == "qwen3_4b")
    plan = json.loads(shown(monkeypatch, capsys, "model=qwen3_4b", "hardware=h200x1", "--json"))
    assert {key: small[key] for key in ("checkpoint_bytes", "base_bytes")} == {
        key: plan[key] for key in ("checkpoint_bytes", "base_bytes")
    }


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
        (("--explain", "--compare"), "leave out --compare"),
        (("--explain", "-m", "hardware=cpu,h200x1"), "leave out -m"),
        (("model=kimi_k62",), "did you mean kimi_k26"),
        (("model=qwen3_4b", "evaluation.max_new_tokens=50000"), "the model has positions for 40,960"),
        (("model=llama32_1b", "evaluation.max_new_tokens=70000"), "a CPU's cache has room for 65,536"),
        (
            ("model=qwen3_30b_a3b", "hardware=h200x1", SMALL_SHARE, "evaluation.max_new_tokens=30000"),
            f"of 30,128 tokens, and the cache (what base and slots leave of {SMALL_SHARE}) has room for 1",
        ),
        (("model=kimi_k26", "adapter.targets=[foo,o_proj]"), f"no linear of {KIMI}; accepted are"),
        (("evaluation.max_new_tokens=500", "engine.max_total_tokens=600"), "engine.max_total_tokens has room for 600"),
        (("-m", "hardware=h200x8,b300"), "b300"),
        (("hardware=h200x1", "engine.extra.chunked_prefill_size=abc"), "chunked_prefill_size=abc is no whole number"),
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
    """So that `orbit plan ... && orbit train ...` starts only what fits and runs."""
    assert orbit(monkeypatch, "plan", "model=qwen3_4b", "hardware=h200x1") == 0
    assert orbit(monkeypatch, "plan", "model=kimi_k26", "hardware=h200x8") == 1
    assert orbit(monkeypatch, "plan", "model=kimi_k26", "hardware=b200x8") == 3
    assert orbit(monkeypatch, "plan", "-m", "model=qwen3_4b", "hardware=h200x1", "seed=1,2") == 0
    assert orbit(monkeypatch, "plan", "-m", "model=qwen3_4b", "hardware=h200x1,h200x8") == 3
    assert orbit(monkeypatch, "plan", "-m", "model=kimi_k26", "hardware=h200x8,b200x8") == 1
    assert orbit(monkeypatch, "plan", "-m", "model=qwen3_4b", "hardware=h200x1,h200x8", "engine.tensor_parallel=8") == 1
    assert orbit(monkeypatch, "plan", "--help") == 0
    assert "Exit code: 0 if it fits and runs" in capsys.readouterr().out


def test_train_refuses_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("train", "rollout", "eval"):
        assert orbit(monkeypatch, command, "model=kimi_k26") == 2
        told = capsys.readouterr().err
        assert "Orbit cannot" in told and f"an engine for {KIMI}" in told and told.count("\n") == 1


@pytest.mark.timeout(120)
def test_planning_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['orbit', 'plan', 'model=kimi_k26', 'hardware=b200x8']\n"
        "from orbit_cli.cli import main\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert ended.code == 3\n"
        "heavy = [m for m in ('torch', 'sglang', 'transformers', 'numpy') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_serves_a_runs_adapter_is_planned_as_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from orbit_cli.config.compose import compose
    from orbit_cli.config.serialize import to_yaml

    (tmp_path / "config.yaml").write_text(to_yaml(compose(["recipe=smoke_dense_oft"])))
    for work in ("eval", "rollout"):
        found = json.loads(shown(monkeypatch, capsys, "--for", work, f"run.adapter={tmp_path}", "--json"))
        same = json.loads(shown(monkeypatch, capsys, "--for", work, "recipe=smoke_dense_oft", "--json"))
        parts, expected = (one["phases"]["rollout"]["parts"] for one in (found, same))
        fixed = [name for name in expected if name.startswith("engine/base") or "slots" in name or "cache" in name]
        assert found["model"] == "tiny_dense" and len(fixed) > 3
        assert [parts[name] for name in fixed] == [expected[name] for name in fixed]
    rows = json.loads(shown(monkeypatch, capsys, "-m", "--for", "eval", f"run.adapter={tmp_path}", "--json"))
    assert [row["model"] for row in rows] == ["tiny_dense"]
