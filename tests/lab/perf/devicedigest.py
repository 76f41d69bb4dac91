"""What the fused digest of accelerator values costs, as far as that can be known without a GPU.

    python tests/lab/perf/devicedigest.py compiled    registers, spills, instructions: needs Triton
    python tests/lab/perf/devicedigest.py host        microseconds a value before the driver's door
    python tests/lab/perf/devicedigest.py device  needs a GPU: time of a value beside one read of it
    python tests/lab/perf/devicedigest.py model  computed, not measured: a training step on an H100

A benchmark, not a test: it asserts nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rankscope.capture.device.devicedigester import DeviceDigester
from rankscope.capture.device.fusedcache import (
    CombineVariant,
    CompiledImage,
    ReadVariant,
    find_image,
)
from rankscope.capture.device.fusedcompile import compile_for
from rankscope.capture.device.fusedforms import (
    FusedReader,
    GpuDriver,
    architecture_of,
    driver_of,
)
from rankscope.record.value import SKETCH_SIZE
from tests.lab.perf.digest import microseconds

ARCHITECTURES = ["cuda-80", "cuda-90", "cuda-100", "hip-gfx942"]
KERNELS: list[ReadVariant | CombineVariant] = [
    *(ReadVariant(kind, True, True) for kind in ("bfloat16", "float16", "float32", "table")),
    ReadVariant("bfloat16", True, False),
    ReadVariant("bfloat16", False, False),
    *(ReadVariant(kind, True, True) for kind in ("uint8", "int64", "float64")),
    CombineVariant(False),
]
FIGURES = ("registers", "stack bytes", "spills", "shared bytes", "float64", "value loads",
           "instructions")  # fmt: skip
"""`spills` are loads and stores of the stack in the loop over rows (on AMD's GPUs, registers that
are spilled anywhere); `instructions`, those an element costs there, without careful readings."""
SHAPES = [(512,), (4, 512, 512), (8, 2048, 4096), (4096, 4096)]
ELEMENTS_OF_A_THREAD = 512 // 128
"""Of one turn of the loop over rows: columns of a block by its threads."""
HBM_BYTES_A_SECOND = 3.35e12
SLOTS_A_SECOND = 132 * 4 * 32 * 1.755e9
"""Lanes of an H100 SXM that can begin an instruction, a second (132 SMs, 4 schedulers, boost)."""
FLOPS_A_SECOND = 400e12
"""What a large training step reaches in bfloat16: the assumption, as are the next two."""
SECONDS_A_LAUNCH = 4e-6
LAUNCHES_OF_A_LAYER = 300
"""Of an eager training step, forward, backward and optimizer."""
SLOTS_USED = 1.0, 0.5
"""Part of the slots that a kernel begins an instruction in, at best and at worst: nothing here says
how long its warps wait for loads and for each other."""
SECONDS_OF_HOST = 25e-6, 56e-6
"""What hooks, description, launch and record of a value took of a host's core, hot and cold."""


def compiled() -> None:
    print("| kernel | for | " + " | ".join(FIGURES) + " |")
    print("|---" * (2 + len(FIGURES)) + "|")
    for variant in KERNELS:
        for architecture in ARCHITECTURES:
            numbers = figures(architecture, variant)
            print(f"| {variant.name} | {architecture} | " + " | ".join(map(str, numbers)) + " |")


def figures(architecture: str, variant: ReadVariant | CombineVariant) -> tuple[Any, ...]:
    """Return FIGURES of a kernel; loads are counted in Triton's own form."""
    kernel = compile_for(architecture, variant)
    loads = value_loads(kernel.asm["ttir"]) if isinstance(variant, ReadVariant) else "-"
    if architecture.startswith("hip"):
        text = kernel.asm["amdgcn"]

        def found(name: str) -> int:
            return int(re.findall(rf"\.{name}:\s+(\d+)", text)[0])

        spills = found("vgpr_spill_count") + found("sgpr_spill_count")
        doubles = len(re.findall(r"v_\w+_f64", text))
        stack = found("private_segment_fixed_size")
        return found("vgpr_count"), stack, spills, kernel.metadata.shared, doubles, loads, "-"
    registers, stack = resources(kernel.kernel)
    doubles = len(re.findall(r"\.f64", kernel.asm["ptx"]))
    each, spills = "-", "-"
    if isinstance(variant, ReadVariant):
        count, spills = instructions_of_loop(kernel.kernel)
        each = f"{count / ELEMENTS_OF_A_THREAD:.1f}"
    return registers, stack, spills, kernel.metadata.shared, doubles, loads, each


def value_loads(ttir: str) -> int:
    """Loads through pointers that come from the first argument, the value."""
    held = {re.findall(r"tt\.func public @read_value\((%\w+)", ttir)[0]}
    count = 0
    for line in ttir.splitlines():
        result, _, operation = line.strip().partition(" = ")
        if not operation:
            continue
        used = set(re.findall(r"%[\w#]+", operation))
        if operation.startswith("tt.load"):
            count += bool(held & {re.findall(r"%[\w#]+", operation)[0]})
        elif used & held:
            held.add(result.partition(":")[0])
    return count


def instructions_of_loop(cubin: bytes) -> tuple[int, int]:
    """Machine instructions of one turn of the loop over rows, without those of careful readings,
    and loads and stores of the stack anywhere in it.

    The first is the shortest way through the innermost loop that multiplies: the careful part
    lies aside.
    """
    text = cuobjdump("--dump-sass", cubin)
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
    lines = [(int(address, 16), instruction) for address, instruction in found]
    place = {address: number for number, (address, _) in enumerate(lines)}

    def target(number: int) -> int | None:
        branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", lines[number][1])
        return place.get(int(branch[1], 16)) if branch else None

    loops = [(end, begin) for end in range(len(lines)) if (begin := target(end)) is not None]
    loops = [
        (end, begin)
        for end, begin in loops
        if begin < end and sum("LDG" in text for _, text in lines[begin:end]) > SKETCH_SIZE
    ]
    end, begin = min(loops, key=lambda loop: loop[0] - loop[1])
    far = {begin: 1}
    for number in range(begin, end):
        if number not in far:
            continue
        to = target(number)
        after = [] if to is None else [to]
        if to is None or lines[number][1].startswith("@"):
            after.append(number + 1)
        for other in after:
            if number < other <= end:
                far[other] = min(far.get(other, len(lines)), far[number] + 1)
    return far[end], sum("LDL" in text or "STL" in text for _, text in lines[begin:end])


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, where numbers wait that no register holds."""
    text = cuobjdump("--dump-resource-usage", cubin)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", text)[0]
    return int(registers), int(stack)


def cuobjdump(option: str, cubin: bytes) -> str:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def nothing_driver() -> GpuDriver:
    """A driver whose launch is a C function that returns 0 at once: all of the way to its door."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 3)
    libc: Any = ctypes.CDLL(None)
    library = SimpleNamespace(load=kind(lambda *_: 0), find=kind(lambda *_: 0), launch=libc.ffs)
    return GpuDriver(library, "load", "find", "launch")


def host() -> None:
    cpu = torch.device("cpu")

    def find(variant: ReadVariant | CombineVariant) -> CompiledImage:
        return CompiledImage(variant.name, b"", 128, 0)

    for shape in [(8,), (512,), (4, 8, 16)]:  # so small that the work itself is nothing
        x = torch.randn(shape, dtype=torch.bfloat16)
        rows = {}
        fused = FusedReader(cpu, nothing_driver(), find)
        for name, digester in (
            ("fused", DeviceDigester(cpu, 0, fused)),
            ("torch operations", DeviceDigester(cpu, 0)),
        ):
            digester.read(x, None, samples=True)
            rows[name] = microseconds(lambda: digester.read(x, None, samples=True), 400)  # noqa: B023
        print(f"{shape!s:18s} " + "  ".join(f"{k} {v:7.1f} us" for k, v in rows.items()))


def device() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here that torch can use")
    gpu = torch.device("cuda", torch.cuda.current_device())
    driver = driver_of(gpu)
    architecture = architecture_of(gpu)
    if driver is None or find_image(architecture, CombineVariant(False)) is None:
        raise SystemExit(f"first: python -m rankscope.capture.device.fusedcompile {architecture}")
    print(torch.cuda.get_device_name(gpu))
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            x = torch.randn(shape, device=gpu).to(dtype)

            def find(variant: ReadVariant | CombineVariant) -> CompiledImage | None:
                return find_image(architecture, variant)

            fused = DeviceDigester(gpu, 0, FusedReader(gpu, driver, find), print)
            plain = DeviceDigester(gpu, 0)
            times = [
                on_device(lambda: d.read(x, None, samples=True), d)  # noqa: B023
                for d in (fused, plain)
            ]
            read = on_device(lambda: x.sum(), None)  # noqa: B023
            ideal = x.nbytes / HBM_BYTES_A_SECOND * 1e6
            print(
                f"{dtype!s:15s} {shape!s:18s} fused {times[0]:8.1f} us  torch operations "
                f"{times[1]:8.1f} us  x.sum() {read:8.1f} us  bytes {ideal:6.1f} us"
            )


def on_device(call: Callable[[], object], digester: DeviceDigester | None) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        call()
    end.record()
    torch.cuda.synchronize()
    if digester is not None:
        digester.collect(wait=True)
    return begin.elapsed_time(end) / 20 * 1e3


def model() -> None:
    """A traced step beside a plain one, from instructions, bytes and launches."""
    kernel = compile_for("cuda-90", ReadVariant("bfloat16", True, True))
    each = instructions_of_loop(kernel.kernel)[0] / ELEMENTS_OF_A_THREAD
    print(f"computed, not measured; {each:.1f} instructions an element, two launches a value")
    print("| model | what is read | G elements | memory ms | instructions ms | host ms "
          "| plain step ms | traced / plain |")  # fmt: skip
    print("|---" * 8 + "|")
    for name, layers, width, inner, vocabulary, tokens in (
        ("Llama 7B, 4 x 4096 tokens", 32, 4096, 11008, 32000, 16384),
        ("Llama 512 x 8 layers, 2 x 128 tokens", 8, 512, 1536, 1000, 256),
    ):
        parameters = layers * (4 * width * width + 3 * width * inner + 2 * width)
        parameters += 2 * width * vocabulary + width
        # of a layer, inputs and outputs: 4 projections, gate, up, activation, down, 2 norms,
        # attention, MLP, the layer itself
        per_token = 8 * width + 3 * (width + inner) + 2 * inner + 4 * width + 6 * width
        activations = tokens * (layers * per_token + 3 * width + vocabulary)
        values = layers * 26 + 8
        tensors = layers * 9 + 3
        device = 6 * parameters * tokens / FLOPS_A_SECOND
        host = layers * LAUNCHES_OF_A_LAYER * SECONDS_A_LAUNCH
        plain = max(device, host)
        for what, elements, count in (
            ("forward", activations, values),
            ("forward, backward", 2 * activations, 2 * values),
            ("all, gradients and updates too", 2 * activations + 3 * parameters,
             2 * values + 3 * tensors),
        ):  # fmt: skip
            memory = elements * 2 / HBM_BYTES_A_SECOND
            slots = [elements * each / SLOTS_A_SECOND / used for used in SLOTS_USED]
            hosts = [count * seconds for seconds in SECONDS_OF_HOST]
            launches = count * 2 * SECONDS_A_LAUNCH
            # the host runs ahead of a busy device: the slower of both is the step
            ratios = [
                max(device + max(memory, slot) + launches, host + beside) / plain
                for slot, beside in zip(slots, hosts)
            ]
            low, high = (
                "{} to {}".format(*(f"{s * 1e3:.1f}" for s in two)) for two in (slots, hosts)
            )
            print(f"| {name} | {what} | {elements / 1e9:.2f} | {memory * 1e3:.1f} | {low} | {high} "
                  f"| {plain * 1e3:.1f} | {ratios[0]:.2f} to {ratios[1]:.2f} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["compiled", "host", "device", "model"])
    {"compiled": compiled, "host": host, "device": device, "model": model}[
        parser.parse_args().what
    ]()


if __name__ == "__main__":
    main()
