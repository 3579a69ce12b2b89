"""run.adapter of a run: the newest version it has, exported or in a checkpoint, as the bytes it was trained with."""

import shutil

import pytest
from tiny_checkpoints import build, random_model, spec_for, write_checkpoint

from orbit_cli.adapters.peft_io import export_peft
from orbit_cli.config.compose import compose
from orbit_cli.errors import CheckpointError
from orbit_cli.runs.adapters import resolve_adapter
from orbit_cli.runs.train import shipped_text
from orbit_cli.telemetry.run_folder import RunFolder
from orbit_cli.trainer.checkpoint import TrainState, save_checkpoint


@pytest.mark.parametrize("kind", ["oft", "lora"])
def test_the_newest_version_is_served(kind, tmp_path):
    write_checkpoint(tmp_path / "base", random_model("llama"))
    spec = spec_for("llama", kind)
    shape = [f"adapter.block_size={spec.block_size}"]
    if kind == "lora":
        shape = [f"adapter.rank={spec.rank}", f"adapter.alpha={spec.scaling * spec.rank}"]
    folder = RunFolder.create(compose([f"run.root={tmp_path}", f"adapter={kind}", *shape]))
    config = compose([f"run.adapter={folder.path}"])
    with pytest.raises(CheckpointError, match="nor a run folder with an adapter or a checkpoint"):
        resolve_adapter(config)

    model = build(tmp_path / "base", spec, scale=0.0)
    export_peft(model.bank, folder.adapter(0), base_model="base")
    untrained = resolve_adapter(config)
    assert untrained.version.number == 0 and str(folder.adapter(0)) in untrained.origin

    model = build(tmp_path / "base", spec, scale=0.05)
    trained = model.bank.version(4).checksum
    state = TrainState(step=4, version=4)
    checkpoint = save_checkpoint(folder.checkpoints, state, model.bank.named_state(), {}, keep=1)
    found = resolve_adapter(config)
    assert found.version.number == 4 and str(checkpoint) in found.origin
    assert found.version.checksum == trained != untrained.version.checksum

    export_peft(model.bank, folder.adapter(4), base_model="base")
    found = resolve_adapter(config)
    assert str(folder.adapter(4)) in found.origin and found.version.checksum == trained
    older = resolve_adapter(compose([f"run.adapter={folder.adapter(0)}"]))
    assert (older.name, older.version.number) == (f"{folder.path.name}/000000", 0)
    assert older.version.checksum == untrained.version.checksum
    shutil.rmtree(folder.checkpoints)
    assert resolve_adapter(config).version.checksum == trained


@pytest.mark.parametrize("kind", ["oft", "shared", "lora"])
def test_what_is_shipped_adds_up_to_the_bytes_of_a_swap(kind, tmp_path):
    """OFT trains b(b-1)/2 numbers of a block and ships all b x b of it."""
    write_checkpoint(tmp_path / "base", random_model("qwen3_moe"))
    model = build(tmp_path / "base", spec_for("qwen3_moe", kind))
    shipped = model.bank.version(0).nbytes // 2
    trained = sum(parameter.numel() for parameter in model.bank.parameters())
    said = shipped_text(model)
    assert said.startswith(f"{trained:,} float32 parameters, shipped as {shipped:,} bfloat16 numbers ")
    assert (shipped == trained) is (kind == "lora")
    assert said.endswith("MiB): whole rotations of 16 x 16" if kind != "lora" else "MiB)")
