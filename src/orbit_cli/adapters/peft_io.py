"""Adapters as PEFT folders: adapter_config.json and adapter_model.safetensors (PEFT 0.18 and later).

Written are the float32 masters: OFT's skew vectors (`<path>.oft_R.weight`, [n, b(b-1)/2]) and LoRA's A and B
(`<path>.lora_A.weight`); routed experts one by one (`...mlp.experts.5.gate_proj.lora_A.weight`), the layout that SGLang
reads and that PEFT folds into its fused experts on load (LoRA; PEFT has no OFT for experts). A rotation that a layer's
experts share is `...mlp.experts.gate_up_proj.oft_R.weight`, with expert_width=shared in the config: Orbit reads it.
rsLoRA leaves resolved: alpha / r is the scaling.
Read are such folders and PEFT's own `target_parameters` layout of LoRA experts. What would change the maths and is not
ours (DoRA, COFT, the exact Cayley branch, rank patterns ...) is refused.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from orbit_cli.adapters.bank import AdapterBank
from orbit_cli.adapters.bundle import replace_folder, sync_files
from orbit_cli.adapters.inject import LAYER
from orbit_cli.adapters.peft_experts import is_fused, split_fused_experts
from orbit_cli.adapters.sites import EXPERT_PROJECTIONS, SHARED_PROJECTION
from orbit_cli.errors import CheckpointError, writing
from orbit_cli.types import AdapterSpec

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
KINDS = {"oft": "OFT", "lora": "LoRA"}  # for people
PEFT_VERSION = "0.21.2"  # whose conventions are written: Cayley-Neumann as of 0.18
SUFFIXES = {"oft_R.weight": "oft_skew", "lora_A.weight": "lora_A", "lora_B.weight": "lora_B"}
REFUSED = {
    "OFT": {"coft": False, "block_share": False, "bias": "none", "fan_in_fan_out": False, "modules_to_save": None},
    "LORA": {
        "use_dora": False,
        "bias": "none",
        "lora_bias": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    },
}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


# What the fields that are read must be, in words and as a check.
COMMON: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "target_modules": ("a name or a list of names", lambda v: v is None or _names(v)),
    "target_parameters": ("a list of names", lambda v: v is None or (isinstance(v, list) and _names(v))),
    "base_model_name_or_path": ("text", lambda v: v is None or isinstance(v, str)),
    "peft_version": ("text", lambda v: v is None or isinstance(v, str)),
    "expert_width": ("per_expert or shared", lambda v: v in (None, "per_expert", "shared")),  # ours; PEFT ignores it
}
WANTED: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "OFT": {
        "oft_block_size": ("a whole number of at least 0", lambda v: v is None or _whole(v) or v == 0),
        "num_cayley_neumann_terms": ("a whole number of at least 1", lambda v: v is None or _whole(v)),
    },
    "LORA": {
        "r": ("a whole number of at least 1", _whole),
        "lora_alpha": ("a number", lambda v: isinstance(v, int | float) and not isinstance(v, bool)),
        "use_rslora": ("true or false", lambda v: v is None or isinstance(v, bool)),
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftFolder:
    """A PEFT adapter as read: what it is, the layers it touches, its tensors by PEFT's names without the prefix."""

    path: Path
    spec: AdapterSpec
    layers: list[int]
    config: dict
    tensors: dict[str, Tensor]


def export_peft(
    bank: AdapterBank, folder: Path, *, base_model: str, packed: Collection[str] = (), origin: str = ""
) -> Path:
    """Write the bank's masters as a PEFT folder, complete or not at all; an older folder of that name is replaced.

    base_model: what PEFT should load under it (a path or hub name); packed: what of it is stored packed, of
    "linears" and "experts"; origin: a line for people on where that base comes from. Returns the folder.
    """
    folder = Path(folder)
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    with writing(folder):
        partial.mkdir(parents=True)
    peft_suffix = {ours: theirs for theirs, ours in SUFFIXES.items()}
    tensors = {}
    for name, tensor in bank.named_state().items():
        path, _, suffix = name.rpartition(".")
        tensors[f"{PREFIX}{path}.{peft_suffix[suffix]}"] = tensor.cpu().contiguous()
    try:
        with writing(folder):
            save_file(tensors, partial / TENSORS_FILE, metadata={"format": "pt"})
            (partial / CONFIG_FILE).write_text(json.dumps(_peft_config(bank, base_model), indent=2) + "\n")
            (partial / "README.md").write_text(_readme(bank.spec, os.fspath(base_model), packed, origin))
            sync_files(partial)
            replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _peft_config(bank: AdapterBank, base_model: str) -> dict:
    spec = bank.spec
    layers = sorted({int(found[1]) for site in bank.sites if (found := LAYER.search(site.module))})
    # PEFT would put adapters of gate_proj and up_proj on shared experts, which a shared rotation never reaches.
    experts = (SHARED_PROJECTION,) if spec.expert_width == "shared" else spec.expert_targets
    config = {
        "base_model_name_or_path": os.fspath(base_model),
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "target_modules": sorted({*spec.targets, *experts}),
        "layers_to_transform": layers,
        "layers_pattern": "layers",
        "bias": "none",
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "peft_version": PEFT_VERSION,
    }
    if spec.expert_width == "shared":  # without the field it is per_expert; PEFT warns of fields that it does not know
        config["expert_width"] = spec.expert_width
    if spec.kind == "oft":
        config |= {
            "peft_type": "OFT",
            "r": 0,
            "oft_block_size": spec.block_size,
            "use_cayley_neumann": True,
            "num_cayley_neumann_terms": spec.neumann_terms,
            "coft": False,
            "block_share": False,
            "module_dropout": 0.0,
        }
    else:
        config |= {
            "peft_type": "LORA",
            "r": spec.rank,
            "lora_alpha": spec.scaling * spec.rank,
            "use_rslora": False,
            "use_dora": False,
            "lora_dropout": 0.0,
            "rank_pattern": {},
            "alpha_pattern": {},
        }
    return config


def _readme(spec: AdapterSpec, base_model: str, packed: Collection[str], origin: str) -> str:
    """What a person who finds the folder needs to know: how to load it, and where PEFT cannot."""
    lines = [f"# {KINDS[spec.kind]} adapter in PEFT's format\n"]
    if "experts" in packed:
        lines.append(
            f"For {base_model}, whose routed experts are stored packed. transformers 5 does not unpack them: it starts "
            "them at random (and warns MISSING), so PEFT on top of it computes nothing of use. Serve this adapter with "
            "Orbit (`orbit rollout run.adapter=FOLDER`).\n"
        )
    else:
        lines += _loading(base_model, bool(packed))
    lines.append("Weights are the float32 masters; training and serving multiply by them rounded to BF16.\n")
    if origin:
        lines.append(f"{origin}\n")
    if spec.expert_width == "shared":
        lines.append(
            "`...mlp.experts.gate_up_proj.oft_R.weight` is one rotation of the hidden states that all routed experts "
            "of a layer get; the router and shared experts get them unturned. Plain PEFT cannot load it: it leaves "
            "these tensors out with a warning, and computes another function. Serve such an adapter with Orbit.\n"
        )
    elif spec.expert_targets:
        lines.append(
            "Routed experts are stored one by one, `...mlp.experts.5.gate_proj...`. SGLang reads it. PEFT 0.21 "
            "folds LoRA of all three projections into its fused experts, and has no OFT for experts. On MoE models it "
            "also moves LoRA on gate_proj, up_proj and down_proj of dense layers and shared experts there, which is "
            "another function: serve such an adapter with Orbit or SGLang.\n"
        )
    return "\n".join(lines)


def _loading(base_model: str, packed: bool) -> list[str]:
    """Lines of Python that load base and adapter, to be run in the adapter's folder."""
    classes, arguments = "AutoModelForCausalLM", [repr(base_model)]
    if packed:  # a packed linear has no `weight`, and PEFT multiplies by it
        classes += ", CompressedTensorsConfig"
        arguments.append("quantization_config=CompressedTensorsConfig(run_compressed=False)")
    lines = [
        "```python",
        "from peft import PeftModel",
        f"from transformers import {classes}",
        "",
        "base = AutoModelForCausalLM.from_pretrained(",
        *(f"    {argument}," for argument in arguments),
        ")",
        'model = PeftModel.from_pretrained(base, ".")  # this folder',
        "```\n",
    ]
    if packed:
        lines.append(
            "The base is stored quantised (transformers reads it with the package compressed-tensors). PEFT needs its "
            "linears unpacked, which run_compressed=False does: the values are the same, at BF16's memory.\n"
        )
    return lines


def read_peft(folder: Path) -> PeftFolder:
    """Read a PEFT folder. Raises CheckpointError if it is missing, unreadable or of another kind of adapter."""
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        stored = load_file(folder / TENSORS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} is no PEFT adapter: {error}; it needs {CONFIG_FILE} and {TENSORS_FILE}"
        ) from error
    _refuse(folder, config)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    _check_tensors(folder, config["peft_type"], tensors)
    paths = {name.rsplit(".", 2)[0] for name in tensors}
    layers = sorted({int(found[1]) for path in paths if (found := LAYER.search(path))})
    spec = _spec(folder, config, tensors, paths)
    return PeftFolder(path=folder, spec=spec, layers=layers, config=config, tensors=tensors)


def _refuse(folder: Path, config: Any) -> None:
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{folder / CONFIG_FILE} holds {json.dumps(config)[:40]} and no mapping; use the file that was saved"
        )
    kind = config.get("peft_type")
    if kind not in REFUSED:
        raise CheckpointError(f"{folder} holds a {kind} adapter; supported are {', '.join(REFUSED)}")
    for key, (rule, fits) in {**COMMON, **WANTED[kind]}.items():
        if not fits(config.get(key)):
            found = f"{key}={json.dumps(config[key])[:40]}" if key in config else f"no {key}"
            raise CheckpointError(
                f"{folder / CONFIG_FILE} has {found}, and it must be {rule}; set what the adapter was trained with"
            )
    for key, only in REFUSED[kind].items():
        if config.get(key, only) not in (only, None, {}, []):
            raise CheckpointError(
                f"{folder / CONFIG_FILE} has {key}={config[key]!r}, which would compute another function; "
                f"only {key}={only!r} is supported"
            )
    if kind != "OFT":
        return
    if not config.get("use_cayley_neumann", False):
        raise CheckpointError(
            f"{folder / CONFIG_FILE} has use_cayley_neumann=false, which rotates the other way round; negate its oft_R "
            "tensors and set use_cayley_neumann=true"
        )
    version = config.get("peft_version") or "0"
    if tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2]) < (0, 18):
        raise CheckpointError(
            f"{folder / CONFIG_FILE} was written by PEFT {version}, whose Cayley-Neumann series is another one; "
            "use an adapter of PEFT 0.18 or later"
        )


def _check_tensors(folder: Path, kind: str, tensors: dict[str, Tensor]) -> None:
    """Each tensor is one of this kind's, on a linear with a path, and a matrix."""
    suffixes = [suffix for suffix in SUFFIXES if suffix.startswith("oft") is (kind == "OFT")]
    for name, tensor in tensors.items():
        if not any(name.endswith(f".{suffix}") for suffix in suffixes) or tensor.dim() != 2:
            raise CheckpointError(
                f"{folder / TENSORS_FILE} has a tensor {name} of shape {list(tensor.shape)}, and {kind} here has "
                f"matrices that end with {' or '.join(suffixes)}; export the adapter without it"
            )
    if not tensors:
        raise CheckpointError(f"{folder / TENSORS_FILE} has no tensors; use the file that was saved")


def _spec(folder: Path, config: dict, tensors: dict[str, Tensor], paths: set[str]) -> AdapterSpec:
    """The spec, read from the tensors where both say it: a saved block size can differ from what was used."""
    linears = {path for path in paths if ".mlp.experts" not in path}
    targets = tuple(sorted({path.rsplit(".", 1)[-1] for path in linears}))
    routed = {path.rsplit(".", 1)[-1] for path in paths if ".experts." in path}
    experts = tuple(p for p in EXPERT_PROJECTIONS if p in routed)
    width = "per_expert"
    if SHARED_PROJECTION in routed:
        experts, width = ("gate_proj", "up_proj"), "shared"
    said = config.get("expert_width") or width
    if said != width or routed > {SHARED_PROJECTION}:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} has expert_width={said}, but {TENSORS_FILE} has adapters on "
            f"{', '.join(sorted(routed)) or 'no'} of routed experts; use the two files that were saved together"
        )
    if config["peft_type"] == "OFT":
        columns = {tensor.shape[1] for tensor in tensors.values()}
        if len(columns) != 1:
            raise CheckpointError(f"{folder / TENSORS_FILE} mixes OFT block sizes; one block size is supported")
        count = columns.pop()  # b(b-1)/2
        return AdapterSpec(
            kind="oft",
            targets=targets,
            expert_targets=experts,
            expert_width=width,
            block_size=round((1 + (1 + 8 * count) ** 0.5) / 2),
            neumann_terms=config.get("num_cayley_neumann_terms") or 5,
        )
    if any(is_fused(path) for path in paths):
        fused = config.get("target_parameters") or []
        experts = tuple(
            p for p in EXPERT_PROJECTIONS if any(t.endswith("down_proj") == (p == "down_proj") for t in fused)
        )
    rank = config["r"]
    scaling = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    return AdapterSpec(kind="lora", targets=targets, expert_targets=experts, rank=rank, scaling=scaling)


def load_peft(bank: AdapterBank, folder: Path) -> None:
    """Start the bank from a PEFT folder, bit for bit. Raises CheckpointError if it is another kind of adapter."""
    read = read_peft(folder)
    _compare(read, bank.spec)
    tensors = split_fused_experts(read.tensors, bank.sites, read.path) if read.spec.kind == "lora" else read.tensors
    state = {}
    for name, tensor in tensors.items():
        path, suffix, _ = name.rsplit(".", 2)
        state[f"{path}.{SUFFIXES[suffix + '.weight']}"] = tensor.to(torch.float32)
    bank.load_state(state)


def _compare(read: PeftFolder, spec: AdapterSpec) -> None:
    for field in ("kind", "expert_width", "block_size", "neumann_terms", "rank", "scaling"):
        stored, own = getattr(read.spec, field), getattr(spec, field)
        if abs(stored - own) > 1e-9 * abs(own) if field == "scaling" else stored != own:
            key = "alpha" if field == "scaling" else field
            value = stored * spec.rank if field == "scaling" else stored
            raise CheckpointError(
                f"{read.path} has {field}={stored} but this run has {own}, which is another function of the same "
                f"tensors; set adapter.{key}={value}"
            )
