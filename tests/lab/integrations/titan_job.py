"""torchtitan's own training on two gloo ranks: `titan_job.py` takes torchtitan's arguments.

torchtitan is made for accelerators. What keeps it from a CPU is put right here, outside of what is
tested: it asks its device for names and memory, its attention has no backward on a CPU, and gloo
knows neither its reduction nor its barrier.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def make_cpu_a_device() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda *_: "cpu"
    cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34)
    cpu.memory_stats = lambda *_: {}
    cpu.set_device = cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    given = FSDPModule.set_gradient_divide_factor

    def divide(self: Any, factor: float) -> None:
        given(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide


make_cpu_a_device()

import torchtitan.distributed.utils  # noqa: E402  # it looks for its device when it is imported
from torchtitan import train  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None


class CausalAttention(FlexAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, enable_gqa=False, **_):
        parts = [each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH)]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*parts, scale=scale, is_causal=True, enable_gqa=enable_gqa).transpose(1, 2)


@override(target=FlexAttention.Config, exact=True, description="attention for a CPU")
def causal(config: Any) -> Any:
    return derive(config, CausalAttention.Config)


def tiny() -> Any:
    return llama3_debugmodel()


if __name__ == "__main__":
    train.main()
