"""`orbit rollout` and a multirun, on real runs."""

import json


def test_rollout_resumes_where_it_was(orbit, tmp_path):
    target = tmp_path / "samples.jsonl"
    arguments = ["recipe=smoke_dense_oft", "rollout.collect_prompts=4", "rollout.group_size=2", f"run.output={target}"]
    orbit.run("rollout", *arguments)
    lines = target.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 8
    for row in rows:
        sampled = sum(row["policy_mask"])
        assert len(row["token_ids"]) == len(row["logprobs"]) == len(row["versions"]) == len(row["policy_mask"])
        assert 0 < sampled <= 16
        assert row["reward"] is not None
    target.write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])  # killed in the middle of prompt 3
    orbit.run("rollout", *arguments)
    again = {(r["prompt_id"], r["sample"]): r["token_ids"] for r in map(json.loads, target.read_text().splitlines())}
    assert again == {(r["prompt_id"], r["sample"]): r["token_ids"] for r in rows}
    refused = orbit.run("rollout", *arguments, "seed=7", code=2)
    assert f"run.output={target} holds samples of another run (seed was 0 and is now 7)" in refused


def test_multirun_gives_a_folder_each_and_a_table(orbit):
    text = orbit.run(
        "train",
        "-m",
        "recipe=sweep_adapters",
        "adapter=oft,lora",
        "trainer.steps=1",
        "evaluation.prompts=0",
    )
    runs = [path for path in orbit.root.glob("sweep-*/*/*/metrics.jsonl")]
    assert len(runs) == 2
    assert all(f"adapter={kind}" in text for kind in ("oft", "lora"))


def test_a_conversation_that_is_cut_off_is_an_unsolved_task(orbit, tmp_path):
    """The first guess of this random model never ends by itself: no reward of the environment, and no failure."""
    target = tmp_path / "games.jsonl"
    sizes = ["rollout.collect_prompts=2", "rollout.group_size=2", "rollout.max_new_tokens=4", f"run.output={target}"]
    orbit.run("rollout", "recipe=smoke_dense_oft", "environment=guess_number", *sizes)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(r["reward"], r["finish_reason"], r["error"]) for r in rows] == [(0.0, "length", None)] * 4
