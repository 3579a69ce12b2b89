"""The five invariances of a policy-gradient step (micro-batch split, ranks, padding, order, zero-gradient rows), the
divisors, and a probe that a step moves the policy the right way."""

import socket
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp

from orbit_cli.config.compose import compose
from orbit_cli.telemetry.names import unknown
from orbit_cli.trainer.step import optimise, prepare
from orbit_cli.types import FinishReason, Trajectory

LENGTHS = [1, 3, 8, 20, 5, 2, 13, 4]  # response tokens: unequal on purpose (verl 5625)


def trajectories(seed: int = 0, groups: int = 2) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(seed)
    out = []
    for index, length in enumerate(LENGTHS):
        prompt = 4 + index % 3
        tokens = torch.randint(0, 49152, (prompt + length,), generator=generator).tolist()
        group = index * groups // len(LENGTHS)
        out.append(
            Trajectory(
                prompt_id=f"p{group}",
                group=group,
                sample=index,
                token_ids=tokens,
                policy_mask=[False] * prompt + [True] * length,
                logprobs=[0.0] * prompt + [-10.8] * length,
                versions=[0] * (prompt + length),
                reward=float(index % 3 == 0),
                reward_parts={},
                finish_reason=FinishReason.stop,
                text="",
                correct=index % 3 == 0,
            )
        )
    return out


def config_for(**changes):
    overrides = [
        "model=tiny_dense",
        "algorithm.correction=none",
        "trainer.max_grad_norm=0",
        "rollout.prompts_per_step=2",
        "rollout.group_size=4",
    ]
    return compose([*overrides, *(f"{k}={v}" for k, v in changes.items())])


def delta(model, samples, config) -> torch.Tensor:
    """Change of the master weights by one plain-SGD step (any rescaling of the loss shows, unlike under Adam)."""
    before = torch.cat([p.detach().flatten().clone() for p in model.bank.parameters()])
    optimizer = torch.optim.SGD(model.bank.parameters(), lr=1.0)
    optimise(model, optimizer, prepare(samples, config), config, 0)
    return torch.cat([p.detach().flatten() for p in model.bank.parameters()]) - before


def close(a: torch.Tensor, b: torch.Tensor, relative: float = 1e-5) -> bool:
    difference = float((a - b).norm()) / float(a.norm())
    print(f"relative difference {difference:.2e}")
    return difference <= relative


AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batch_split_does_not_matter(make_model, aggregation):
    fields = {"algorithm.aggregation": aggregation}
    whole = delta(make_model(), trajectories(), config_for(**fields, **{"trainer.micro_batch_tokens": 4096}))
    assert float(whole.norm()) > 0
    for budget in (1, 30, 60):
        split = delta(make_model(), trajectories(), config_for(**fields, **{"trainer.micro_batch_tokens": budget}))
        assert close(whole, split), f"{aggregation}: budget {budget} changes the step"


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "reinforce"])
def test_order_of_samples_does_not_matter(make_model, loss):
    config = config_for(**{"algorithm.loss": loss})
    samples = trajectories()
    assert close(delta(make_model(), samples, config), delta(make_model(), samples[::-1], config))


def test_samples_that_were_not_graded_change_nothing(make_model):
    config, samples = config_for(), trajectories()
    failed = replace(samples[0], reward=None, correct=None, error="the grader hung")
    without = [t for t in samples if t is not samples[0]]
    with_failure = [failed, *without]
    assert close(delta(make_model(), without, config), delta(make_model(), with_failure, config))


def test_log_prob_chunk_does_not_matter(make_model):
    big = delta(make_model(), trajectories(), config_for(**{"trainer.logprob_chunk_tokens": 512}))
    small = delta(make_model(), trajectories(), config_for(**{"trainer.logprob_chunk_tokens": 3}))
    assert close(big, small)


def test_equal_rewards_train_nothing(make_model):
    samples = [replace(t, reward=0.1) for t in trajectories()]
    assert float(delta(make_model(), samples, config_for()).abs().max()) == 0.0


def test_the_penalty_on_length_is_on_record(make_model):
    """In the zone of 5 of 20 tokens lies one response, of 20; the grader's reward stays as it was."""
    config = config_for(**{"algorithm.overlong": "penalty", "rollout.max_new_tokens": 20})
    samples = trajectories()
    given = [sample.reward for sample in samples]
    metrics = optimise(make_model(), torch.optim.SGD([torch.zeros(1)]), prepare(samples, config), config, 0)
    wanted = [-1.0 if length == 20 else 0.0 for length in LENGTHS]
    assert [sample.reward_parts["overlong"] for sample in samples] == wanted
    assert metrics["overlong_penalty_mean"] == sum(wanted) / len(wanted) and not unknown([metrics])
    assert [sample.reward for sample in samples] == given


def test_a_step_raises_the_advantaged(make_model):
    """After a small step the log-prob of samples with positive advantage rises against those with negative."""
    config = config_for(**{"algorithm.correction": "none"})
    model, samples = make_model(), trajectories()
    prepared = prepare(samples, config)

    def weighted() -> float:
        logprobs, _ = model.logprobs(
            prepared.batch.token_ids,
            prepared.batch.lengths,
            prepared.batch.mask,
            temperature=1.0,
            chunk=512,
            with_entropy=False,
        )
        per_sample = logprobs.sum(1) / prepared.batch.mask.sum(1)
        return float((per_sample * prepared.batch.advantages).sum())

    before = weighted()
    optimise(model, torch.optim.SGD(model.bank.parameters(), lr=1e-3), prepared, config, 0)
    model.bank.materialize()
    assert weighted() > before


def test_rejected_tokens_leave_the_divisor_unless_told_otherwise(make_model):
    """Half the tokens are far from what was sampled; with exclusion the divisor is what was kept (slime PR 657)."""
    samples = trajectories()
    for t in samples[:4]:
        t.logprobs = [-30.0] * len(t.logprobs)  # weight exp(19): rejected
    kept = sum(LENGTHS[4:])
    for keep, expected in ((False, kept), (True, sum(LENGTHS))):
        config = config_for(
            **{
                "algorithm.correction": "mis",
                "algorithm.correction_high": 50.0,
                "algorithm.keep_rejected_in_divisor": keep,
            }
        )
        model = make_model()
        optimizer = torch.optim.SGD(model.bank.parameters(), lr=0.0)
        metrics = optimise(model, optimizer, prepare(samples, config), config, 0)
        assert metrics["loss_divisor_tokens"] == expected


def test_kl_against_the_free_reference_is_zero_at_the_identity(make_model):
    config = config_for(**{"algorithm.kl": "loss", "algorithm.kl_coef": 0.1})
    model = make_model(scale=0.0)
    optimizer = torch.optim.SGD(model.bank.parameters(), lr=0.0)
    metrics = optimise(model, optimizer, prepare(trajectories(), config), config, 0)
    assert abs(metrics["kl_ref"]) <= 1e-6
    away = make_model(scale=0.05)
    optimizer = torch.optim.SGD(away.bank.parameters(), lr=0.0)
    assert abs(optimise(away, optimizer, prepare(trajectories(), config), config, 0)["kl_ref"]) > 1e-5


def test_several_updates_per_rollout_keep_their_own_divisors(make_model):
    config = config_for(**{"trainer.minibatches": 2, "trainer.epochs": 2})
    model = make_model()
    metrics = optimise(
        model, torch.optim.SGD(model.bank.parameters(), lr=1e-3), prepare(trajectories(), config), config, 0
    )
    assert metrics["loss_divisor_tokens"] == 2 * sum(LENGTHS)
    assert metrics["ratio_max"] != 1.0


def _rank(rank: int, ranks: int, port: int, folder: str, out: str) -> None:
    import os

    from orbit_cli.adapters.spec import spec_from_config
    from orbit_cli.models.build import build_model

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    config = config_for(**{"trainer.micro_batch_tokens": 40})
    spec = spec_from_config(replace(config.adapter, block_size=16))
    from pathlib import Path

    model = build_model(Path(folder), spec, layers=[], device="cpu", dtype=torch.float64, seed=0)
    model.bank.randomize(seed=3, scale=0.02)
    moved = delta(model, trajectories(), config)
    if rank == 0:
        torch.save(moved, out)
    torch.distributed.destroy_process_group()


def test_ranks_do_not_matter(make_model, tiny_base, tmp_path):
    """Two gloo ranks with unequal token counts take the step of one (prime-rl PR 2359)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = tmp_path / "delta.pt"
    mp.spawn(_rank, args=(2, port, str(tiny_base[1]), str(out)), nprocs=2)
    alone = delta(make_model(), trajectories(), config_for(**{"trainer.micro_batch_tokens": 40}))
    assert close(alone, torch.load(out))


def test_tokens_are_counted_where_they_are_computed(make_model):
    """A group whose rewards are all equal has no gradient: its samples are never forwarded, and are not counted."""
    samples = trajectories()
    for sample in samples[:4]:
        sample.reward = 1.0
    config = config_for()
    model = make_model()
    metrics = optimise(model, torch.optim.SGD(model.bank.parameters()), prepare(samples, config), config, 0)
    assert metrics["computed_tokens"] == sum(len(sample.token_ids) for sample in samples[4:])
