#!/usr/bin/env bash
# The same kind of sweep in plain shell: one run after the other, a run folder each, reports to compare.
# Hardware: 2 CPU cores, 4 GiB. Cost: about 10 minutes per learning rate (the main job each).
# Expected curve: 5e-4 learns slowly, 2e-3 well, 8e-3 fast and less steadily.
# Date: 2026-11
set -euo pipefail
root="${1:-runs/sweep_learning_rate}"
for rate in 5e-4 2e-3 8e-3; do
    orbit train trainer.learning_rate="$rate" run.root="$root" run.name="rate_$rate"
done
for run in "$root"/*/; do
    echo "== $run"
    orbit report "$run" --json
done
