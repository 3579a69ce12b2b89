"""The bank: what is multiplied by is what is shipped, gradients do not depend on micro-batches, state is exact."""

import pytest
import torch

from orbit_cli.adapters import oft
from orbit_cli.adapters.bank import AdapterBank
from orbit_cli.adapters.bundle import checksum
from orbit_cli.adapters.lora import low_rank
from orbit_cli.adapters.oft import rotate
from orbit_cli.adapters.sites import adapted_tensor
from orbit_cli.adapters.spec import spec_from_config
from orbit_cli.config.schema.base import AdapterConfig, AdapterKind
from orbit_cli.errors import CheckpointError
from orbit_cli.types import AdapterSpec
from orbit_kernels.leaves import operand

OFT = AdapterSpec(kind="oft", targets=("q_proj",), expert_targets=("up_proj",), block_size=8, neumann_terms=6)
LORA = AdapterSpec(kind="lora", targets=("q_proj",), expert_targets=("up_proj",), rank=3, scaling=2.0)


def make_bank(spec: AdapterSpec, *, scale: float = 0.0, seed: int = 0, experts: int = 3) -> AdapterBank:
    sites = [
        adapted_tensor(spec, module="l.0.q_proj", projection="q_proj", experts=0, in_features=16, out_features=24),
        adapted_tensor(spec, module="l.1.q_proj", projection="q_proj", experts=0, in_features=32, out_features=8),
        adapted_tensor(
            spec, module="l.1.experts", projection="up_proj", experts=experts, in_features=24, out_features=16
        ),
    ]
    bank = AdapterBank(spec, sites, device=torch.device("cpu"), seed=seed)
    if scale:
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for master in bank.parameters():
                master.copy_(torch.randn(master.shape, generator=generator) * scale)
        bank.materialize()
    return bank


@pytest.mark.parametrize("spec", [OFT, LORA], ids=["oft", "lora"])
def test_layout_counts_and_names(spec):
    bank = make_bank(spec, scale=0.1)
    assert sum(p.numel() for p in bank.parameters()) == sum(site.parameters for site in bank.sites)
    names = set(bank.version(3).tensors)
    suffixes = ["oft_R"] if spec.kind == "oft" else ["lora_A", "lora_B"]
    paths = ["l.0.q_proj", "l.1.q_proj", *(f"l.1.experts.{e}.up_proj" for e in range(3))]
    assert names == {f"{path}.{suffix}" for path in paths for suffix in suffixes}
    assert bank.sites[2].name == "l.1.experts.*.up_proj"


def test_oft_ships_rotations_built_in_float32_and_rounded_once():
    bank = make_bank(OFT, scale=0.1)
    version = bank.version(5)
    for name, vectors in bank.named_state().items():
        expected = oft.cayley_neumann(vectors, 8, 6).bfloat16()
        assert torch.equal(version.tensors[name.replace("oft_skew", "oft_R")], expected)
    assert version.checksum == checksum(version.tensors)
    shapes = {n: tuple(t.shape) for n, t in version.tensors.items()}
    assert shapes["l.1.q_proj.oft_R"] == (4, 8, 8)
    assert shapes["l.1.experts.2.up_proj.oft_R"] == (3, 8, 8)


@pytest.mark.parametrize("spec", [OFT, LORA], ids=["oft", "lora"])
def test_what_is_multiplied_by_is_what_is_shipped(spec):
    bank = make_bank(spec, scale=0.1)
    tensors = bank.version(0).tensors
    for part in bank.parts.values():
        for site, leaf in zip(bank.sites, part.leaves, strict=True):
            assert leaf.dtype is torch.bfloat16 and leaf.grad.dtype is torch.float32
            stacked = torch.stack([tensors[f"{path}.{part.name}"] for path in site.paths])
            assert torch.equal(leaf.detach(), stacked if site.experts else stacked[0])


def test_a_version_does_not_change_when_training_goes_on():
    bank = make_bank(OFT, scale=0.1)
    version = bank.version(0)
    with torch.no_grad():
        bank.parameters()[0].add_(0.05)
    bank.materialize()
    assert checksum(version.tensors) == version.checksum
    assert bank.version(1).checksum != version.checksum


def loss_of(bank: AdapterBank, x: list[torch.Tensor]) -> torch.Tensor:
    """A scalar in all leaves; the sum over rows of x, so that micro-batches add up to the batch."""
    total = torch.zeros(())
    for site in range(3):
        if bank.spec.kind == "oft":
            leaf = operand(bank.leaf("oft_R", site), torch.float32)  # before it is taken apart, as experts do
            y = [rotate(x[site], r) for r in (leaf if site == 2 else [leaf])]
        else:
            a, b = (operand(bank.leaf(name, site), torch.float32) for name in ("lora_A", "lora_B"))
            y = [low_rank(x[site], *ab, 2.0) for ab in (zip(a, b, strict=True) if site == 2 else [(a, b)])]
        total = total + sum(part.sin().sum() for part in y)
    return total


@pytest.mark.parametrize("spec", [OFT, LORA], ids=["oft", "lora"])
def test_gradients_do_not_depend_on_micro_batches(spec):
    generator = torch.Generator().manual_seed(9)
    x = [torch.randn(12, width, generator=generator) for width in (16, 32, 24)]
    gradients = []
    for splits in (1, 2, 4, 12):
        bank = make_bank(spec, scale=0.1)
        bank.zero_grad()
        for part in range(splits):
            loss_of(bank, [t.chunk(splits)[part] for t in x]).backward()
        bank.pull_back()
        gradients.append([p.grad.clone() for p in bank.parameters()])
    for other in gradients[1:]:
        for first, second in zip(gradients[0], other, strict=True):
            assert first.norm() > 0.1
            assert (first - second).norm() <= 1e-5 * first.norm()


def test_pull_back_is_the_gradient_through_the_series():
    """Straight through the rounding: the same as float64 autograd whose R is replaced by the rounded values."""
    bank = make_bank(OFT, scale=0.1)
    x = [torch.randn(5, width, generator=torch.Generator().manual_seed(2)) for width in (16, 32, 24)]
    loss_of(bank, x).backward()
    bank.pull_back()
    master = bank.parameters()[0].detach().double().requires_grad_()
    exact = oft.cayley_neumann(master, 8, 6)
    rounded = exact + (exact.detach().float().bfloat16().double() - exact.detach())
    spans = [(0, 2), (2, 6), (6, 9), (9, 12), (12, 15)]
    total = sum(rotate(x[min(i, 2)].double(), rounded[start:stop]).sin().sum() for i, (start, stop) in enumerate(spans))
    total.backward()
    difference = (bank.parameters()[0].grad.double() - master.grad).norm() / master.grad.norm()
    assert difference < 1e-5


def test_chunked_building_changes_nothing(monkeypatch):
    whole = make_bank(OFT, scale=0.1)
    monkeypatch.setattr("orbit_cli.adapters.parts.CHUNK_ELEMENTS", {"cpu": 3 * 64})
    pieces = make_bank(OFT, scale=0.1)
    assert torch.equal(whole.parts["oft_R"].compute, pieces.parts["oft_R"].compute)
    x = [torch.randn(4, width, generator=torch.Generator().manual_seed(2)) for width in (16, 32, 24)]
    for bank in (whole, pieces):
        loss_of(bank, x).backward()
        bank.pull_back()
    assert torch.allclose(whole.parameters()[0].grad, pieces.parameters()[0].grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spec", [OFT, LORA], ids=["oft", "lora"])
def test_zero_grad_keeps_the_buffers(spec):
    bank = make_bank(spec, scale=0.1)
    x = [torch.randn(4, width) for width in (16, 32, 24)]
    loss_of(bank, x).backward()
    bank.pull_back()
    first = [p.grad.clone() for p in bank.parameters()]
    torch.optim.SGD(bank.parameters(), lr=0.0).zero_grad(set_to_none=True)
    bank.zero_grad()
    assert all(not p.grad.any() for p in bank.parameters())
    loss_of(bank, x).backward()
    bank.pull_back()
    assert all(torch.equal(p.grad, f) for p, f in zip(bank.parameters(), first, strict=True))


def test_lora_first_step_moves_b_only():
    bank = make_bank(LORA)
    a, b = bank.parameters()
    assert a.abs().max() > 0 and not b.any()
    loss_of(bank, [torch.randn(4, width) for width in (16, 32, 24)]).backward()
    bank.pull_back()
    assert not a.grad.any() and b.grad.abs().max() > 0


def test_lora_start_is_seeded_and_bounded_as_in_peft():
    first, again, other = make_bank(LORA, seed=1), make_bank(LORA, seed=1), make_bank(LORA, seed=2)
    assert torch.equal(first.parameters()[0], again.parameters()[0])
    assert not torch.equal(first.parameters()[0], other.parameters()[0])
    a = first.named_state()["l.1.q_proj.lora_A"]
    assert a.abs().max() <= 1 / 32**0.5 and a.abs().max() > 0.5 / 32**0.5


@pytest.mark.parametrize("spec", [OFT, LORA], ids=["oft", "lora"])
def test_state_round_trip_is_bit_exact(spec):
    bank, fresh = make_bank(spec, scale=0.1), make_bank(spec)
    state = {name: tensor.clone() for name, tensor in bank.named_state().items()}
    fresh.load_state(state)
    assert all(torch.equal(p, q) for p, q in zip(bank.parameters(), fresh.parameters(), strict=True))
    assert fresh.version(0).checksum == bank.version(0).checksum


def test_state_of_another_adapter_is_refused():
    state = {name: tensor.clone() for name, tensor in make_bank(OFT).named_state().items()}
    with pytest.raises(CheckpointError, match=r"unknown l\.1\.experts\.2\.up_proj\.oft_skew"):
        make_bank(OFT, experts=2).load_state(state)
    with pytest.raises(CheckpointError, match=r"lacks l\.0\.q_proj\.oft_skew"):
        make_bank(OFT).load_state({n: t for n, t in state.items() if not n.startswith("l.0")})
    with pytest.raises(CheckpointError, match="shape"):
        make_bank(OFT).load_state({n: t[:, :3] for n, t in state.items()})


def test_health():
    bank = make_bank(OFT, scale=0.05)
    metrics = bank.health()
    master = bank.parameters()[0].detach().double()
    rotations = oft.cayley_neumann(master, 8, 6)
    assert metrics["adapter_norm"] == pytest.approx(float(master.norm()), rel=1e-6)
    assert metrics["adapter_lambda_max"] == pytest.approx(
        float(torch.linalg.matrix_norm(oft.skew(master, 8), 2).max()), rel=1e-5
    )
    expected = float(oft.orthogonality_error(rotations).max())
    assert metrics["adapter_orthogonality_error"] == pytest.approx(expected, rel=0.02, abs=5e-7)
    by_tensor = bank.orthogonality_by_tensor()
    assert max(by_tensor.values()) == pytest.approx(metrics["adapter_orthogonality_error"], rel=1e-3, abs=5e-7)
    assert set(make_bank(LORA).health()) == {"adapter_norm"}


def test_memory_counts_every_buffer():
    bank = make_bank(OFT)
    blocks = 15
    assert bank.memory() == {"adapter": blocks * (4 * 28 + 2 * 64), "adapter_grads": 4 * blocks * (28 + 64)}


def test_rslora_is_resolved_in_the_spec():
    plain = AdapterConfig(kind=AdapterKind.lora, rank=4, alpha=16.0)
    assert spec_from_config(plain).scaling == 4.0
    stabilised = AdapterConfig(kind=AdapterKind.lora, rank=4, alpha=16.0, use_rslora=True)
    assert spec_from_config(stabilised).scaling == 8.0
    oft_spec = spec_from_config(AdapterConfig(kind=AdapterKind.oft, targets=["q_proj"]))
    assert (oft_spec.kind, oft_spec.block_size, oft_spec.neumann_terms, oft_spec.rank) == ("oft", 32, 6, 0)


def test_lora_golden_example():
    weight = torch.arange(12.0).reshape(3, 4) / 10
    a = torch.tensor([[1.0, 0, -1, 2], [0.5, 0.5, 0, 0]])
    b = torch.tensor([[1.0, 0], [0, 2], [-1, 1]])
    x = torch.tensor([1.0, 2, 3, 4])
    assert torch.allclose(x @ weight.t() + low_rank(x, a, b, 4 / 2), torch.tensor([14.0, 12, 1]))


@pytest.mark.parametrize("spec", [OFT, LORA], ids=["oft", "lora"])
def test_gradients_of_bf16_leaves_are_summed_in_float32(spec):
    """As the modules call them: each addend as float32 leaves would get it, and their sum, to the bit."""
    x = [torch.randn(12, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    bank = make_bank(spec, scale=0.1)
    names = list(bank.parts)
    wide = {name: bank.leaf(name, 0).detach().float().requires_grad_() for name in names}
    for leaves in (wide, {name: bank.leaf(name, 0) for name in names}):
        for rows in x:
            y = rotate(rows, leaves["oft_R"]) if spec.kind == "oft" else low_rank(rows, *leaves.values(), 2.0)
            y.sin().sum().backward()
    for name in names:
        assert wide[name].grad.norm() > 0.1 and torch.equal(wide[name].grad, bank.leaf(name, 0).grad)
