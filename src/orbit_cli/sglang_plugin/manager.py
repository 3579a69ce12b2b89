"""The adapter manager inside SGLang: takes the place of its LoRAManager.

SGLang keeps its own control plane (registry, draining, per-request adapter, a prefix-cache key for each load); this
class answers the members that the plane touches. Every version owns one slot of static buffers from its load to its
unload, so a load never disturbs a running batch and nothing is evicted. A version is checked completely before a
byte of it is applied, and what lies in the slot afterwards is hashed again.
Left out: the multiplications (linear.py, experts.py, shared_experts.py, latent.py) and the answer to the engine's
owner (report.py).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orbit_cli.adapters.bundle import checksum
from orbit_cli.sglang_plugin.bucket import BUCKET, unpack
from orbit_cli.sglang_plugin.experts import AdaptedExpertsMethod
from orbit_cli.sglang_plugin.latent import rotate_latent_attention
from orbit_cli.sglang_plugin.linear import FUSED, AdaptedLinearMethod
from orbit_cli.sglang_plugin.room import read_room
from orbit_cli.sglang_plugin.shared_experts import SharedExpertsMethod
from orbit_cli.sglang_plugin.slots import BatchSlots

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HeldVersion:
    """One live adapter version on this rank."""

    name: str
    slot: int
    kind: str
    names: list[str]
    checksum: str  # recomputed from the slot
    nbytes: int


class AdapterManager:
    """SGLang's constructor signature; extra arguments describe LoRA kernels that are not used here."""

    supports_prefill_cuda_graph = False
    prefill_cuda_graph_max_bs = None
    memory_pool = None  # SGLang's metrics skip a manager without one

    def __init__(self, base_model: nn.Module, base_hf_config, max_loras_per_batch: int, dtype: torch.dtype, **_unused):
        self.base_model = base_model
        self.device = next(base_model.parameters()).device
        self.room = read_room()
        if max_loras_per_batch != self.room.versions + 1:
            raise ValueError(
                f"max_loras_per_batch={max_loras_per_batch} but room for {self.room.versions} versions + base"
            )
        self.tp_size = _unused.get("tp_size", 1)
        self.slots = BatchSlots(self.device)
        self.free = list(range(self.room.versions, 0, -1))  # slot 0 is the base
        self.held: dict[str, HeldVersion] = {}  # by SGLang's adapter id
        self.methods = self._wrap_linears() + self._wrap_experts()
        self._rotate_latents()
        self._check_targets()
        logger.info("adapters on %d layers, %d slots", len(self.methods), self.room.versions + 1)

    # Wrapping -----------------------------------------------------------------------------------------------------

    def _wrap_linears(self) -> list[AdaptedLinearMethod]:
        from sglang.srt.layers.linear import LinearBase

        methods = []
        for path, module in self.base_model.named_modules():
            projections = FUSED.get(path.rsplit(".", 1)[-1], (path.rsplit(".", 1)[-1],))
            in_decoder = ".layers." in path
            if isinstance(module, LinearBase) and in_decoder and set(projections) & set(self.room.targets):
                sizes = self._output_sizes(module, path)
                method = AdaptedLinearMethod(module, path, self.room, self.slots, sizes)
                methods.append(_replace_method(module, method))
        return methods

    def _output_sizes(self, module: nn.Module, path: str) -> list[int]:
        """Output rows of each projection in a linear, on this rank."""
        parent, leaf = path.rsplit(".", 1)
        if leaf == "fused_qkv_a_proj_with_mqa":  # one plain linear to SGLang; its attention knows where it splits
            first = self.base_model.get_submodule(parent).q_lora_rank
            return [first, module.output_size - first]
        return list(getattr(module, "output_partition_sizes", [module.output_size]))

    def _wrap_experts(self) -> list[AdaptedExpertsMethod | SharedExpertsMethod]:
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

        method = SharedExpertsMethod if self.room.expert_width == "shared" else AdaptedExpertsMethod
        methods = []
        for path, module in self.base_model.named_modules():
            if self.room.expert_targets and isinstance(module, FusedMoE) and ".layers." in path:
                methods.append(_replace_method(module, method(module, path, self.room, self.slots)))
        return methods

    def _rotate_latents(self) -> None:
        """MLA: bypasses of the wrapped methods are switched off, and kv_b_proj also acts in its absorbed form."""
        for module in self.base_model.modules():
            if not hasattr(module, "attn_mqa"):
                continue
            # These shortcuts multiply by the weights without asking the quant method (models/deepseek_v2.py).
            module._use_min_latency_fused_a_gemm = False
            module._use_min_latency_q_b_gemm = False
            method = getattr(module.kv_b_proj, "quant_method", None)
            if isinstance(method, AdaptedLinearMethod):
                method.serves_lora = False  # absorbed attention never forms what it would be added to
                if method.rotations is not None:
                    rotate_latent_attention(module, method)

    def _check_targets(self) -> None:
        found = {
            name.rsplit(".", 1)[-1] for m in self.methods if isinstance(m, AdaptedLinearMethod) for name in m.names
        }
        missing = sorted(set(self.room.targets) - found)
        if missing:
            raise ValueError(
                f"adapter.targets has {missing[0]}, which this model has nowhere in SGLang's decoder layers"
            )
        experts = (AdaptedExpertsMethod, SharedExpertsMethod)
        if self.room.expert_targets and not any(isinstance(m, experts) for m in self.methods):
            raise ValueError("adapter.expert_targets is set but this model has no routed experts; leave it empty")

    # Versions -----------------------------------------------------------------------------------------------------

    def load_lora_adapter_from_tensors(self, lora_ref, tensors, config_dict, added_tokens_config=None):
        """Check and apply one version; a refusal leaves everything as it was."""
        try:
            self._load(lora_ref.lora_id, lora_ref.lora_name, tensors, config_dict)
        except Exception as error:  # whatever is wrong with a push, it must not end the scheduler's process
            logger.exception("adapter %s was refused", lora_ref.lora_name)
            return self._result(
                False, f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
        return self._result(True)

    def load_lora_adapter(self, lora_ref):
        return self._result(False, f"{lora_ref.lora_name}: adapters are pushed as tensors, not read from paths")

    def unload_lora_adapter(self, lora_ref):
        version = self.held.pop(lora_ref.lora_id, None)
        if version is None:
            return self._result(False, f"no adapter with id {lora_ref.lora_id} is held")
        for method in self.methods:
            method.clear(version.slot)
        self.free.append(version.slot)
        return self._result(True)

    def _load(self, uid: str, name: str, pushed: dict[str, Tensor], config: dict) -> None:
        about = config.get("orbit")
        if about is None or list(pushed) != [BUCKET]:
            raise ValueError(
                f"{name} is no Orbit bucket: expected one tensor {BUCKET!r} and an index, got {list(pushed)[:3]}"
            )
        if any(version.name == name for version in self.held.values()):
            raise ValueError(f"{name} is already held; publish under a new version number")
        flat = pushed[BUCKET].to(self.device)  # one copy for all
        kind, tensors = about["kind"], unpack(flat, about["index"])
        self._check_tensors(name, kind, tensors)
        if not math.isfinite(float(about["scaling"])):
            raise ValueError(f"{name}: its scaling is {about['scaling']}; publish it with a number")
        if not torch.isfinite(flat).all():
            wrong = next(key for key, tensor in tensors.items() if not torch.isfinite(tensor).all())
            raise ValueError(f"{name}: {wrong} has NaN or infinite values")
        if not self.free:
            raise ValueError(
                f"all {self.room.versions} slots hold live versions; retire one or raise engine.live_versions"
            )
        slot = self.free[-1]
        for method in self.methods:
            method.write(slot, kind, tensors, float(about["scaling"]))
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the next forward pass may run on another stream
        version = HeldVersion(name, slot, kind, sorted(tensors), "", 2 * sum(t.numel() for t in tensors.values()))
        version.checksum = self.measure(version, tensors)
        if version.checksum != about["checksum"]:
            for method in self.methods:
                method.clear(slot)
            raise ValueError(
                f"{name} arrived with sha256 {version.checksum[:12]} where {about['checksum'][:12]} was announced; "
                "publish it again"
            )
        self.free.pop()
        self.held[uid] = version

    def _check_tensors(self, name: str, kind: str, tensors: dict[str, Tensor]) -> None:
        size = {"oft": self.room.block_size, "lora": self.room.rank}.get(kind)
        if not size:
            raise ValueError(f"{name} is a {kind} adapter, for which this engine was started without room")
        expected: dict[str, tuple[int, ...]] = {}
        for method in self.methods:
            expected |= method.expected(kind, self.room)
        for key, tensor in tensors.items():
            if key not in expected:
                raise ValueError(f"{name} has a tensor {key}, which names no adapted linear of this engine")
            if tuple(tensor.shape) != expected[key]:
                raise ValueError(f"{name}: {key} has shape {list(tensor.shape)}, expected {list(expected[key])}")
            if tensor.dtype is not torch.bfloat16:
                raise ValueError(f"{name}: {key} is {tensor.dtype}, expected bfloat16")
        for key in tensors:
            twin = key.replace("lora_A", "lora_B") if key.endswith("lora_A") else key.replace("lora_B", "lora_A")
            if kind == "lora" and twin not in tensors:
                raise ValueError(f"{name} has {key} without {twin}")
        if not tensors:
            raise ValueError(f"{name} is empty; an adapter version must have at least one tensor")

    def measure(self, version: HeldVersion, sent: dict[str, Tensor] | None = None) -> str:
        """Checksum of what lies in the version's slot now.

        With tensor parallelism a rank holds parts: it compares them with its parts of what was sent, bit for bit, and
        `sent` stands for them; without `sent` the last result is repeated.
        """
        names = set(version.names)
        found: dict[str, Tensor] = {}
        for method in self.methods:
            held = method.held(version.slot, names)
            if sent is not None and self.tp_size > 1:
                wrong = [
                    name for name, tensor in held.items() if not torch.equal(tensor, method.part(name, sent[name]))
                ]
                if wrong:
                    raise ValueError(f"{version.name}: {wrong[0]} does not lie in its slot as it was sent")
            found |= held
        if self.tp_size == 1:
            return checksum(found)
        return version.checksum if sent is None else checksum(sent)

    def _result(self, success: bool, message: str = ""):
        from sglang.srt.managers.io_struct import LoRAUpdateOutput

        loaded = {version.name: version.name for version in self.held.values()}
        return LoRAUpdateOutput(success=success, error_message=message, loaded_adapters=loaded)

    # The running batch --------------------------------------------------------------------------------------------

    def prepare_lora_batch(self, forward_batch) -> None:
        """Before every forward pass: which slot each token uses."""
        slots = [0 if uid is None else self.held[uid].slot for uid in forward_batch.lora_ids]
        extend = forward_batch.forward_mode.is_extend()
        self.slots.set(slots, forward_batch.extend_seq_lens_cpu if extend else None)

    def reset_lora_batch(self) -> None:
        self.slots.reset()

    def version_names(self, lora_ids: list[str | None]) -> list[str | None]:
        """Names of the versions that requests run on; None for the base."""
        return [None if uid is None else self.held[uid].name for uid in lora_ids]

    # Every loaded version has its slot already, and there are no kernels with metadata of their own.
    def validate_lora_batch(self, lora_ids) -> bool:
        return True

    def fetch_new_loras(self, new_loras, running_loras=frozenset()) -> None:
        return None

    def can_use_prefill_cuda_graph(self, forward_batch) -> bool:
        return False

    def init_cuda_graph_batch_info(self, max_bs_in_cuda_graph: int, num_tokens_per_req: int) -> None:
        return None

    def init_prefill_cuda_graph_batch_info(self, max_num_tokens: int) -> None:
        return None

    def init_cuda_graph_moe_buffers(self, max_bs: int, max_loras: int, compute_dtype, moe_layer) -> None:
        return None


def _replace_method(layer: nn.Module, method):
    """Put a wrapped method into its layer; SGLang's own may be registered as a child module, which ours is not."""
    layer._modules.pop("quant_method", None)
    layer.quant_method = method
    return method
