"""The figures of a run, from its folder alone: for scripts (`orbit report --json`), the summary and the page.

`figures` is the contract: its keys are documented below and do not change. The page is made in report_page.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean
from typing import Any

from orbit_cli.telemetry.files import intact, read_json, write_atomic, write_json
from orbit_cli.telemetry.memory import column_words
from orbit_cli.telemetry.metrics import read_rows
from orbit_cli.telemetry.run_folder import RunFolder, RunState

PHASES = ("rollout", "train", "sync")  # of a step


def figures(run: Path) -> dict[str, Any]:
    """Figures of a run folder; null where a run has not come that far.

    - run, status, steps: folder, how it stands (a process that died without a word is "killed"), finished steps
    - error: what a failed run failed with
    - reward_first_fifth, reward_last_fifth: mean of reward_mean over the first and last fifth of the steps
    - reward_mean: mean of reward_mean over all steps
    - groups_informative_share: of all groups that were sampled, discarded ones included, the share whose samples do not
      all have the same reward: only these teach something; trained_samples: samples with a gradient, over the run
    - groups_discarded: groups that dynamic sampling dropped, over the run; sampling_rounds: its rounds per step, mean
    - eval_before, eval_after: {step, accuracy, low, high, pass@k...} of the first and the last evaluation
    - logprob_gap_mean: mean over steps of the mean |log-prob gap|; logprob_gap_max_step: the largest step's mean
    - tokens_per_second: sampled tokens per second of rollout, over the run; train_tokens_per_second likewise
    - swap_bytes, swap_milliseconds: median over the steps
    - truncated_first_fifth, truncated_last_fifth: share of responses that ended at max_new_tokens, over these steps
    - step_seconds: mean; phase_seconds: {rollout, train, sync} of it; seconds: {rollout, train, sync, eval} in total
    - memory_gib, memory_planned_gib: {column: largest peak of all phases} of memory.json, measured and planned
    - grading_failures: samples left out because their grader failed
    - adapter, checkpoint, report: paths, if they are there; the newest of each

    Raises UserError if `run` is no run folder.
    """
    folder = RunFolder.open(run)
    rows = read_rows(folder.metrics)
    train = [row for row in rows if row["kind"] == "train"]
    evals = [row for row in rows if row["kind"] == "eval"]
    steps = train[-1]["step"] if train else 0
    fifth = max(1, len(train) // 5)
    status, state = folder.status(), _state(folder, steps)
    adapter, checkpoint = folder.latest_adapter(), folder.latest_checkpoint()
    gaps = values(train, "logprob_gap_mean")
    return {
        "run": str(folder.path),
        "status": state,
        "error": status.error if state == RunState.failed and status is not None else None,
        "steps": steps,
        "checkpoint": str(checkpoint) if checkpoint is not None else None,
        "reward_first_fifth": _mean(values(train[:fifth], "reward_mean")),
        "reward_last_fifth": _mean(values(train[-fifth:], "reward_mean")),
        "reward_mean": _mean(values(train, "reward_mean")),
        "groups_informative_share": _informative_share(train),
        "trained_samples": int(sum(values(train, "trained_samples"))),
        "groups_discarded": int(sum(values(train, "groups_discarded"))),
        "sampling_rounds": _mean(values(train, "sampling_rounds")),
        "eval_before": _evaluation(evals[0]) if evals else None,
        "eval_after": _evaluation(evals[-1]) if len(evals) > 1 else None,
        "logprob_gap_mean": _mean(gaps),
        "logprob_gap_max_step": max(gaps, default=None),
        "tokens_per_second": _pace(train, "rollout_tokens_per_second", "rollout_seconds"),
        "train_tokens_per_second": _pace(train, "train_tokens_per_second", "train_seconds"),
        "swap_bytes": _median(values(train, "swap_bytes")),
        "swap_milliseconds": _median(values(train, "swap_milliseconds")),
        "truncated_first_fifth": _mean(values(train[:fifth], "truncated_share")),
        "truncated_last_fifth": _mean(values(train[-fifth:], "truncated_share")),
        "step_seconds": _mean(values(train, "step_seconds")),
        "phase_seconds": {phase: _mean(values(train, f"{phase}_seconds")) for phase in PHASES},
        "seconds": {phase: sum(values(rows, f"{phase}_seconds")) for phase in (*PHASES, "eval")},
        **_memory(folder),
        "grading_failures": int(sum(values(train, "grading_failures"))),
        "adapter": str(adapter) if adapter is not None else None,
        "report": str(folder.report) if folder.report.is_file() else None,
    }


def write_report(run: Path) -> Path:
    """Write report.html and summary.json of a run folder; the page's path. Raises UserError if `run` is none."""
    from orbit_cli.telemetry.report_page import page

    folder = RunFolder.open(run)
    write_atomic(folder.report, page(folder, figures(run)))
    write_json(folder.summary, figures(run))  # after the page, which it names
    return folder.report


def summary_text(found: dict[str, Any]) -> str:
    """A few lines for people: what came out, where it is, and what to try next."""
    lines = [
        (
            "reward",
            _change(found["reward_first_fifth"], found["reward_last_fifth"], "first and last fifth of the steps"),
        ),
        ("groups", _groups(found)),
        ("held out", _held_out(found["eval_before"], found["eval_after"])),
        *_passes(found["eval_before"], found["eval_after"]),
        ("log-prob gap", _gap(found)),
        ("swap", _swap(found)),
        ("truncated", _truncated(found["truncated_first_fifth"], found["truncated_last_fifth"])),
        ("speed", _speed(found)),
        ("memory", _memory_text(found)),
        ("run", f"{found['run']}  ({found['status']}, {found['steps']} steps)"),
        ("failed with", found["error"]),
        ("adapter", found["adapter"]),
        ("report", found["report"]),
    ]
    lines += zip(("next", "or"), _next(found), strict=False)
    lines.append(("learned", _nothing_learned(found)))
    return "\n".join(f"{label:<13} {text}" for label, text in lines if text)


def _next(found: dict[str, Any]) -> list[str]:
    """Commands to go on with. A run that stands still before its end is resumed; what it has can be evaluated."""
    stands = found["status"] in ("killed", RunState.interrupted, RunState.failed) and (
        found["steps"] or found["checkpoint"]
    )
    resume = [f"orbit train run.resume={found['run']}"] if stands else []
    return resume + ([f"orbit eval run.adapter={found['run']}"] if found["adapter"] or found["checkpoint"] else [])


def values(rows: list[dict[str, Any]], name: str) -> list[float]:
    """The metric where it is there and finite."""
    return [row[name] for row in rows if row.get(name) is not None]


def _state(folder: RunFolder, steps: int) -> str:
    status = folder.status()
    if status is None:
        return "unknown"
    if status.state != "running":
        return status.state.value
    if status.pid == os.getpid():  # the run reports on itself, at its end
        return "finished" if steps >= folder.load_config().trainer.steps else "interrupted"
    return "running" if status.alive else "killed"


def _evaluation(row: dict[str, Any]) -> dict[str, Any]:
    named = {"step": row["step"], "accuracy": row.get("accuracy")}
    named |= {"low": row.get("accuracy_low"), "high": row.get("accuracy_high")}
    return named | {name: value for name, value in row.items() if name.startswith(("pass@", "avg_k", "maj_k"))}


def _memory(folder: RunFolder) -> dict[str, dict[str, float]]:
    record = read_json(folder.memory) or {}
    measured: dict[str, float] = {}
    planned: dict[str, float] = {}
    with intact(folder.memory):
        for phase in record.get("phases", {}).values():
            for column, gib in phase.items():
                measured[column] = max(gib, measured.get(column, 0.0))
        for columns in record.get("planned", {}).values():
            for column, pair in columns.items():
                planned[column] = max(pair["planned_gib"], planned.get(column, 0.0))
    return {"memory_gib": measured, "memory_planned_gib": planned}


def _mean(numbers: list[float]) -> float | None:
    return fmean(numbers) if numbers else None


def _median(numbers: list[float]) -> float | None:
    return sorted(numbers)[len(numbers) // 2] if numbers else None


def _pace(rows: list[dict[str, Any]], rate: str, seconds: str) -> float | None:
    """Overall rate: each step's rate weighted by its time."""
    pairs = [(row[rate], row[seconds]) for row in rows if row.get(rate) is not None and row.get(seconds)]
    total = sum(time for _, time in pairs)
    return sum(pace * time for pace, time in pairs) / total if total else None


def _change(before: float | None, after: float | None, what: str) -> str | None:
    if before is None or after is None:
        return None
    return f"{before:.3f} -> {after:.3f}  ({after - before:+.3f}; {what})"


def _informative_share(train: list[dict[str, Any]]) -> float | None:
    groups = sum(values(train, "groups")) + sum(values(train, "groups_discarded"))
    return sum(values(train, "groups_informative")) / groups if groups else None


def _groups(found: dict[str, Any]) -> str | None:
    if found["groups_informative_share"] is None:
        return None
    text = f"{100 * found['groups_informative_share']:.0f}% of the groups had samples of unequal reward to learn from"
    if not found["groups_discarded"]:
        return text
    return f"{text}; {found['groups_discarded']} discarded, {found['sampling_rounds']:.1f} rounds of sampling per step"


def _nothing_learned(found: dict[str, Any]) -> str | None:
    """One sentence where rewards gave no direction to a whole run (a penalty on length may have: trained_samples)."""
    if found["groups_informative_share"] != 0 or found["trained_samples"] or found["reward_mean"] is None:
        return None
    return (
        "nothing from the rewards: in each group of samples all had the same one (mean reward "
        f"{found['reward_mean']:.3f}); look at environment (can this model be right at times, and wrong at times?) and "
        "at rollout.max_new_tokens (does an answer fit?)"
    )


def _held_out(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str | None:
    shown = [
        f"{row['accuracy']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        for row in (before, after)
        if row is not None and row["accuracy"] is not None and row["low"] is not None
    ]
    return "accuracy " + " -> ".join(shown) + "  (95% interval over prompts)" if shown else None


def _passes(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[tuple[str, str]]:
    if before is None:
        return []
    names = [name for name in before if name.startswith("pass@") and not name.endswith(("_low", "_high"))]
    found = []
    for name in names:
        shown = [f"{row[name]:.3f}" for row in (before, after) if row is not None and row.get(name) is not None]
        found.append((name, " -> ".join(shown)))
    return found


def _gap(found: dict[str, Any]) -> str | None:
    if found["logprob_gap_mean"] is None:
        return None
    mean, largest = found["logprob_gap_mean"], found["logprob_gap_max_step"]
    return f"mean |trainer - engine| {mean:.2e}, largest step {largest:.2e} nats"


def _swap(found: dict[str, Any]) -> str | None:
    if found["swap_bytes"] is None or found["swap_milliseconds"] is None:
        return None
    return f"{found['swap_bytes'] / 2**20:.2f} MiB in {found['swap_milliseconds']:.0f} ms per adapter version"


def _speed(found: dict[str, Any]) -> str | None:
    if found["tokens_per_second"] is None or found["step_seconds"] is None:
        return None
    parts = [f"{phase} {seconds:.1f}" for phase, seconds in found["phase_seconds"].items() if seconds is not None]
    pace = f"{found['tokens_per_second']:.0f} tokens/s sampled, {found['step_seconds']:.1f} s per step"
    return f"{pace} ({', '.join(parts)})"


def _truncated(before: float | None, after: float | None) -> str | None:
    if before is None or after is None:
        return None
    return f"{100 * before:.0f}% -> {100 * after:.0f}% of the responses ended at rollout.max_new_tokens"


def _memory_text(found: dict[str, Any]) -> str | None:
    planned = found["memory_planned_gib"]
    parts = []
    for column, gib in found["memory_gib"].items():
        beside = f" (planned {planned[column]:.2f})" if column in planned else ""
        parts.append(f"{column_words(column)} {gib:.2f}{beside}")
    return "GiB at the peak: " + "; ".join(parts) if parts else None
