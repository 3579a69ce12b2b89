"""adapter.expert_width=shared through the whole tool: proof, training, resume, evaluation."""

import json
import signal

import pytest
from safetensors.torch import load_file

SHARED = ["adapter=oft", "adapter.expert_width=shared", "adapter.expert_targets=[gate_proj,up_proj]"]
MOE = ["recipe=smoke_moe_lora", *SHARED]  # qwen3_moe
GAP = 1e-5


@pytest.mark.parametrize("recipe", [MOE, ["recipe=smoke_mla_moe", *SHARED]], ids=["qwen3_moe", "deepseek_v3"])
def test_sync_test_passes(orbit, recipe):
    """deepseek_v3 has a shared expert beside the routed ones, which the rotation never reaches."""
    orbit.run("sync-test", *recipe, "sync.swaps=2")
    found = json.loads(next(orbit.root.glob("*/sync_test.json")).read_text())
    assert found["passed"]
    gaps = {check["name"]: check["gap_mean"] for check in found["checks"] if check["gap_mean"] is not None}
    assert len(gaps) >= 5
    assert max(gaps.values()) < max(GAP, 1.2 * gaps["base, adapter off"])  # of deepseek_v3 itself 1.1e-5
    assert next(check["moved"] for check in found["checks"] if check["name"] == "random adapter") > 1e-3


def test_sync_test_names_a_withheld_version(orbit):
    text = orbit.run("sync-test", *MOE, "sync.swaps=1", "sync.inject=withhold", code=1)
    assert "is not in the engine" in text


def test_a_killed_run_goes_on_and_is_evaluated(orbit, kill_group):
    """Three steps, and one or two + kill -9 + resume: the same rotations bit for bit, which training has moved."""
    three = [*MOE, "trainer.steps=3", "evaluation.prompts=4"]
    text = orbit.run("train", *three, "run.name=whole")
    assert "experts.gate_up_proj" in text
    process = orbit.start("train", *three, "run.name=parts")
    orbit.wait_for_rows("parts", 1, process)
    kill_group(process, signal.SIGKILL)
    orbit.run("train", f"run.resume={orbit.root / 'parts'}")
    found = [
        load_file(orbit.root / name / "adapters" / "000003" / "adapter_model.safetensors")
        for name in ("whole", "parts")
    ]
    assert found[0].keys() == found[1].keys()
    assert all((found[0][name] == found[1][name]).all() for name in found[0])
    rotations = [tensor for name, tensor in found[0].items() if name.endswith(".mlp.experts.gate_up_proj.oft_R.weight")]
    assert len(rotations) == 2 and all(tensor.abs().max() > 0 for tensor in rotations)
    assert all(row["logprob_gap_mean"] < GAP for row in orbit.rows("whole") if row["trained_tokens"])
    text = orbit.run("eval", f"run.adapter={orbit.root / 'parts' / 'adapters' / '000003'}")
    assert "adapter version 3" in text
