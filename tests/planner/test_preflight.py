"""What train, rollout and eval refuse before they load anything, and what they never refuse."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from planning import composed

from orbit_cli import cli
from orbit_cli.config.compose import compose
from orbit_cli.config.locate import recipe_names
from orbit_cli.errors import CheckpointError, ConfigError
from orbit_cli.planner import preflight as room
from orbit_cli.planner.built import not_built
from orbit_cli.planner.gpus import Gpu
from orbit_cli.planner.machine import host_memory
from orbit_cli.planner.measured import planned_peaks
from orbit_cli.planner.plan import make_plan
from orbit_cli.planner.preflight import preflight

WITHOUT_GPU = 0
EIGHT = 8
KIMI = "kimi_k26 (model type kimi_k25)"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    def show(count: int | None) -> None:
        monkeypatch.setattr(room, "usable_gpus", lambda: None if count is None else [Gpu()] * count)

    return show


def weights(path: Path, name: str = "model.norm.weight", cut: int = 0) -> None:
    """A safetensors file with one tensor, `cut` bytes short."""
    header = json.dumps({name: {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(8)
    path.write_bytes(whole[: len(whole) - cut])


def folder(tmp_path: Path, **config: object) -> str:
    """A checkpoint folder, complete as far as its headers can tell."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    weights(tmp_path / "model.safetensors")
    return f"model.path={tmp_path}"


@pytest.mark.parametrize("recipe", [name for name in recipe_names() if not name.endswith("_h200")])
def test_what_works_on_a_cpu_is_not_refused(recipe: str) -> None:
    plan = preflight(composed(f"recipe={recipe}"), command="train")
    assert plan is not None and plan.certain_bytes < 1e9


def test_a_model_that_a_script_makes_is_told_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "python scripts/upcycle_smollm2.py"
    assert (Path(__file__).parents[2] / script.split()[1]).is_file()
    monkeypatch.chdir(tmp_path)
    for said, sentence in (
        ([], f"models/smollm2-moe is no folder; make it with `{script} models/smollm2-moe`, or set it to"),
        (["model.path=null"], f"needs model.path; set it to .*, as `{script} FOLDER` makes it$"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=sentence):
            preflight(compose(["recipe=upcycled_moe_h200", *said]), command="train")
    with pytest.raises(
        ConfigError, match=f"nothing to plan with; set model.path to .*, as `{script} FOLDER` makes it$"
    ):
        make_plan(compose(["recipe=upcycled_moe_h200", "model.path=null"]))


def test_a_small_machine_is_not_refused_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned on a CPU is a bound; only base and adapter are certain."""
    config = compose(["hardware.memory_mib=2048"])
    plan = preflight(config, command="train")
    assert plan is not None and not plan.fits


def refusal(*overrides: str, command: str = "train") -> str:
    """The sentence with which a command refuses these overrides."""
    with pytest.raises(ConfigError) as caught:
        preflight(composed(*overrides), command=command, overrides=overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_run_yet_is_said_first_and_completely(gpus) -> None:
    """Nobody downloads 595 GB, or looks for GPUs, for a run that would be refused there."""
    gpus(WITHOUT_GPU)
    for overrides in (("memory.shared_base=true",), ()):  # the second does not fit, the nearest that fits is the first
        sentence = refusal("model=kimi_k26", "hardware=h200x8", *overrides)
        assert sentence.startswith("Orbit cannot train kimi_k26 on h200x8 yet: it needs ")
        assert "it would not fit either: " in sentence if not overrides else "not fit" not in sentence
        for missing in (f"an engine for {KIMI}", "splits its base", "splits routed experts", "memory.shared_base"):
            assert missing in sentence
        assert "download" not in sentence and "GPU(s)" not in sentence
        assert "`orbit plan model=kimi_k26 hardware=h200x8" in sentence
    trainer = "a trainer for deepseek_v4_flash (model type deepseek_v4)"
    assert trainer in refusal("model=deepseek_v4_flash", "hardware=h200x8")


def test_several_gpus_are_refused_for_training_with_what_runs_on_one(gpus) -> None:
    gpus(EIGHT)
    sentence = refusal("model=qwen3_30b_a3b", "hardware=h200x8")
    assert "it needs a trainer on more than one GPU; set hardware.gpus=1" in sentence
    alone = make_plan(composed("model=qwen3_30b_a3b", "hardware=h200x8", "hardware.gpus=1"))
    assert alone.fits and not not_built(alone)


@pytest.mark.parametrize("command", ["train", "rollout", "eval"])
@pytest.mark.parametrize("hardware", ["cpu", "h200x1"])
@pytest.mark.parametrize(
    "knob", ["shared_base=true", "offload=swap", "routing_replay=true", "trainer_layout=sharded", "colocated=false"]
)
def test_knobs_that_nothing_reads_are_refused_everywhere(command: str, hardware: str, knob: str, gpus) -> None:
    gpus(EIGHT)
    overrides = ("model=tiny_moe", f"hardware={hardware}", f"memory.{knob}")
    if knob == "colocated=false" and hardware == "h200x1":
        return  # one GPU cannot be shared out: another sentence
    sentence = refusal(*overrides, command=command)
    assert "yet: it needs" in sentence
    assert f"set memory.{knob.partition('=')[0]}=" in sentence and "to run it today" in sentence


def test_missing_files_and_gpus_are_told_together(gpus) -> None:
    gpus(WITHOUT_GPU)
    sentence = refusal("model=qwen3_4b", "hardware=h200x1")
    assert "its 8.0 GB of files" in sentence and "needs 1 GPU and this machine shows none" in sentence
    assert "download Qwen/Qwen3-4B and set model.path=FOLDER, on the machine with the GPUs" in sentence
    assert "hardware=h200x1 needs 1 GPU and this machine shows none; set" in refusal("hardware=h200x1")
    assert "GPU" not in refusal("model=qwen3_30b_a3b", command="rollout")  # on a CPU nothing more is certain


def test_a_refusal_names_the_plan_that_shows_it(gpus) -> None:
    """What is advised for sampling fits when it is planned for sampling."""
    gpus(EIGHT)
    overrides = ("model=qwen3_30b_a3b", "hardware=rtx4090x1")
    sentence = refusal(*overrides, "run.output=x.jsonl", command="rollout")
    pasted = sentence.partition("`orbit plan --for rollout ")[2].partition("`")[0].split()
    assert pasted[: len(overrides)] == list(overrides) and "run.output=x.jsonl" not in pasted
    assert make_plan(composed(*pasted), trains=False).fits


def test_a_machine_that_does_not_say_is_left_to_the_run(gpus) -> None:
    gpus(None)
    assert preflight(composed("hardware=h200x1"), command="train") is not None


def test_what_cannot_fit_is_refused_with_numbers_and_a_remedy(gpus) -> None:
    gpus(EIGHT)
    config = compose(["model=qwen3_30b_a3b", "hardware=h200x1", "quantization=bf16"])
    config.model.source = composed("model=tiny_moe").model.source  # random weights need no files
    with pytest.raises(ConfigError) as caught:
        preflight(config, command="train")
    sentence = str(caught.value)
    assert "does not fit hardware=h200x1" in sentence and "GB to use" in sentence
    assert "; set engine.max_total_tokens=" in sentence
    config.memory.preflight = False
    assert preflight(config, command="train") is None


def test_sampling_needs_less_than_training(gpus) -> None:
    gpus(EIGHT)
    engine = ["engine.mem_fraction_static=0.9", "engine.max_total_tokens=12288"]
    config = compose(["model=qwen3_30b_a3b", "hardware=rtx4090x1", *engine])
    config.model.source = composed("model=tiny_moe").model.source
    assert preflight(config, command="rollout") is not None
    with pytest.raises(ConfigError, match="does not fit"):
        preflight(config, command="train")


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (Gpu(total_mib=143_771, used_mib=4), None),
        (Gpu(total_mib=143_771), None),
        (Gpu(split=True), None),
        (Gpu(total_mib=24_564, used_mib=0), "GPU 0 here has 25.8 GB and .* hardware.memory_mib=24564"),
        (Gpu(total_mib=143_771, used_mib=140_000), "GPU 0 has 4.0 GB free, other processes hold 146.8 GB of it, and"),
    ],
)
def test_smaller_and_fuller_gpus_are_refused(gpu: Gpu, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "usable_gpus", lambda: [gpu])
    config = compose(["model=qwen3_4b", "hardware=h200x1", "engine.max_total_tokens=65536"])
    config.model.source = composed("model=tiny_moe").model.source
    if words is None:
        assert preflight(config, command="train") is not None
        return
    with pytest.raises(ConfigError, match=words) as caught:
        preflight(config, command="train")
    assert "\n" not in str(caught.value)


def test_what_is_not_built_yet_is_refused_by_a_run(gpus) -> None:
    gpus(EIGHT)
    config = compose(["model=tiny_moe", "hardware=h200x1", "memory.shared_base=true"])
    with pytest.raises(ConfigError, match="yet: it needs one base .*memory.shared_base"):
        preflight(config, command="train")


def test_a_folder_of_another_model_is_told_by_its_first_difference(tmp_path: Path) -> None:
    given = folder(tmp_path, model_type="qwen3", hidden_size=4096)
    with pytest.raises(CheckpointError, match="model_type='qwen3' where deepseek_v4_flash has 'deepseek_v4'"):
        preflight(compose(["model=deepseek_v4_flash", given]), command="train")
    given = folder(tmp_path, model_type="deepseek_v4", hidden_size=7168)
    with pytest.raises(CheckpointError, match="hidden_size=7168 where deepseek_v4_flash has 4096"):
        preflight(compose(["model=deepseek_v4_flash", given]), command="train")
    nested = {"model_type": "kimi_k2", "num_hidden_layers": 27}
    given = folder(tmp_path, model_type="kimi_k25", text_config=nested)
    with pytest.raises(CheckpointError, match="text_config.num_hidden_layers=27 where kimi_k26 has 61"):
        preflight(compose(["model=kimi_k26", given]), command="train")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "is no folder"),
        (lambda path: path.mkdir(), "has no config.json"),
        (lambda path: (path.mkdir(), (path / "config.json").write_text("{")), "not valid JSON"),
        (lambda path: (path.mkdir(), (path / "config.json").write_text("[]")), "no mapping"),
    ],
)
def test_a_folder_that_is_no_checkpoint(make, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    make(path)
    with pytest.raises(CheckpointError, match=words):
        preflight(compose(["model=qwen3_4b", f"model.path={path}"]), command="train")


def index(path: Path) -> None:
    """An index of two shards, of which the second is not there."""
    (path / "model.safetensors").rename(path / "one.safetensors")
    shards = {"model.norm.weight": "one.safetensors", "lm_head.weight": "two.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: weights(path / "model.safetensors", cut=3), "is truncated: .* its header says"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "is truncated: 0 bytes do not hold its header"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}"), "holds no tensor in model"),
        (lambda path: ((path / "model.safetensors").unlink(), (path / "model.safetensors").mkdir()), "cannot be read"),
        (index, "two.safetensors is missing; the checkpoint is incomplete"),
        (lambda path: (path / "tokenizer.json").unlink(), "model.path=.* has no tokenizer file"),
    ],
)
def test_a_damaged_folder_is_refused_by_plan_and_run_alike(
    damage, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["model=checkpoint", folder(tmp_path, **composed("model=qwen3_4b").model.architecture)]
    arguments = [*given, "hardware=h200x1", "hardware.memory_mib=143771"]
    monkeypatch.setattr(sys, "argv", ["orbit", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, capsys.readouterr()
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=words) as caught:
        preflight(compose(given), command="rollout")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and capsys.readouterr().err == f"orbit: {caught.value}\n"


def test_a_model_is_planned_from_its_config_before_its_weights_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(composed("model=qwen3_4b").model.architecture))
    given = ["model=checkpoint", f"model.path={tmp_path}"]
    arguments = [*given, "hardware=h200x1", "hardware.memory_mib=143771"]
    monkeypatch.setattr(sys, "argv", ["orbit", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = " ".join(capsys.readouterr().out.split())
    assert not ended.value.code and "alone: a run needs its weights there" in said
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor"):
        preflight(compose(given), command="rollout")


def test_a_tokenizer_folder_is_looked_at_before_anything_is_built(tmp_path: Path) -> None:
    for given, words in ((tmp_path / "none", "is no folder"), (tmp_path, "has no tokenizer file")):
        with pytest.raises(CheckpointError, match=f"model.tokenizer=.* {words}"):
            preflight(compose(["recipe=smoke_dense_oft", f"model.tokenizer={given}"]), command="train")


def test_the_checkpoints_own_facts_are_planned_with(tmp_path: Path) -> None:
    """Extra and re-spelt keys are no difference; what the folder says decides."""
    published = composed("model=qwen3_4b").model.architecture
    own = {key: value for key, value in published.items() if key != "rope_theta"}
    given = folder(tmp_path, **own, rope_parameters={"rope_theta": 1e6}, architectures=["Qwen3ForCausalLM"])
    plan = preflight(compose(["model=qwen3_4b", given]), command="train")
    assert plan is not None and plan.model.shape.parameters == 4_022_468_096
    given = folder(tmp_path, **(own | {"num_hidden_layers": 2}))
    plan = preflight(compose(["model=checkpoint", given]), command="train")
    assert plan is not None and plan.model.shape.layers == 2


def test_a_family_that_is_not_known_is_left_to_the_run(tmp_path: Path) -> None:
    given = folder(tmp_path, model_type="mystery")
    config = compose(["model=checkpoint", given])
    assert preflight(config, command="train") is None
    assert planned_peaks(config) is None


def test_planned_peaks_have_the_columns_of_the_memory_record() -> None:
    cpu = planned_peaks(composed("recipe=smoke_moe_lora"))
    assert set(cpu["phases"]) == {"train", "rollout", "eval", "sync"}
    assert set(cpu["phases"]["train"]) == {"process_gib", "children_gib"}
    assert "engine's processes" in cpu["about"]
    # What TrainerModel.memory() counts for this recipe; only the small rotary tables are not planned.
    assert cpu["parts"] == {
        "base_packed": 138_240,
        "base_plain": pytest.approx(25_171_840, abs=1024),
        "adapter": 356_352,
        "adapter_grads": 475_136,
    }
    gpu = planned_peaks(composed("model=kimi_k26", "hardware=b200x8"))
    kinds = ("", "_reserved", "_used")
    engine = {"cuda0_engine_gib", "cuda0_engine_reserved_gib"}
    assert set(gpu["phases"]["train"]) == {f"cuda{index}{kind}_gib" for index in range(8) for kind in kinds} | engine
    assert "cuda0_engine_gib" in gpu["about"]
    allocated, reserved, used = (gpu["phases"]["rollout"][f"cuda0{kind}_gib"] for kind in kinds)
    assert reserved == pytest.approx(gpu["phases"]["train"]["cuda0_gib"])  # the training peak is kept while sampling
    assert allocated < reserved < used
    contexts = 2 * composed("model=kimi_k26").memory.context_gib
    assert used == pytest.approx(reserved + gpu["phases"]["rollout"]["cuda0_engine_reserved_gib"] + contexts)
    built = 1 << 28  # four copies of the rotations' chunk of 2^24 numbers
    assert gpu["phases"]["sync"]["cuda0_gib"] - allocated == pytest.approx(built / (1 << 30))
    sampled = planned_peaks(composed("recipe=smoke_moe_lora"), trains=False)
    assert set(sampled["phases"]) == {"rollout", "eval", "sync"} and sampled["parts"] == {}


def test_a_process_that_may_not_map_its_libraries_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's loader would end in a traceback."""
    config = composed()
    for limit, refused in ((2 * 10**9, True), (None, False), (64 * 10**9, False)):
        monkeypatch.setattr(room, "address_space", lambda limit=limit: limit)
        if not refused:
            assert preflight(config, command="train") is not None
            continue
        with pytest.raises(ConfigError, match=r"may map 2.0 GB .* more than 3.0 GB; .*`ulimit -v unlimited`"):
            preflight(config, command="train")


@pytest.mark.parametrize("command", [("train",), ("sync-test",), ("quantize", "smollm2", "nowhere"), ("eval",)])
def test_every_command_that_loads_torch_says_so(command: tuple[str, ...]) -> None:
    shell = f"ulimit -v 2000000 && exec {sys.executable} -m orbit_cli {shlex.join(command)}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("orbit: this process may map 2.0 GB"), done.stderr[-500:]
    assert done.stderr.count("\n") == 1


def test_the_limit_of_this_process_is_read() -> None:
    code = "from orbit_cli.planner.machine import address_space; print(address_space())"
    shell = f"ulimit -v 4000000 && exec {sys.executable} -c {shlex.quote(code)}"
    assert subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60).stdout == "4096000000\n"


@pytest.mark.parametrize(
    ("groups", "files", "gib"),
    [
        ("0::/", {"memory.max": 3}, 3),
        ("0::/user/job", {"memory.max": "max", "user/memory.max": 2, "user/job/memory.max": "max"}, 2),
        ("0::/user/job", {"user/job/memory.max": 1, "user/memory.max": 2}, 1),
        ("4:memory:/job\n0::/", {"memory/memory.limit_in_bytes": 8, "memory/job/memory.limit_in_bytes": 2}, 2),
        ("0::/../outside", {}, 16),
        ("", {}, 16),
    ],
)
def test_memory_of_control_groups(groups: str, files: dict[str, object], gib: int, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:       {16 << 20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    for name, value in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value << 30 if isinstance(value, int) else value}\n")
    assert host_memory(tmp_path) == gib << 30
