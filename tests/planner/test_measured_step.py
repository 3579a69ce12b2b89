"""The largest step that a config allows, run for once: its measured peak is near the plan, micro-batches and all."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_full_micro_batches_take_what_is_planned(tmp_path):
    script = [sys.executable, str(ROOT / "scripts" / "measure_step_memory.py"), "--out", str(tmp_path / "memory.json")]
    overrides = [
        "model=tiny_dense",
        "experiment=quick_look",
        "rollout.prompts_per_step=8",
        "rollout.max_new_tokens=64",
        "trainer.micro_batch_tokens=2048",
        f"quantization.cache_dir={tmp_path}",
        "hardware.threads=1",
    ]
    done = subprocess.run([*script, *overrides], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "memory.json").read_text())
    assert abs(record["planned"]["train"]["process_gib"]["off_percent"]) < 15, done.stdout
    assert all(abs(part["off_percent"]) < 1 for part in record["parts"].values()), done.stdout
