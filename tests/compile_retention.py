"""The Triton kernels of retention compiled as a GPU's launches would compile them, without a GPU: a
program, since it replaces Triton's driver.

    python tests/compile_retention.py

The last line is a JSON object: case -> kernel -> registers a thread, bytes of them that are
spilled, KB of shared memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from bitimely_core.ops import triton_retention
from bitimely_core.ops.rotary import make_rotation

SHARED = {
    75: 64,
    80: 163,
    86: 99,
    90: 227,
    120: 99,
}  # KB a block may have, by architecture: CUDA C++ Programming Guide, compute capabilities
# widths of a head: of the preset `18m`, and the widest keys that the kernels take
NARROW, WIDE = (40, 80), (128, 256)
CASES = [
    (75, "fp32", *NARROW),  # which has no bfloat16
    *((arch, core, *NARROW) for arch in (80, 90) for core in ("bf16", "fp32")),
    (86, "bf16", *NARROW),
    (86, "fp32", *WIDE),
    (120, "bf16", *NARROW),
]
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
BATCH, LENGTH, HEADS = 2, 752, 8


class PretendDriver:
    """What the launcher of Triton asks of a GPU before it compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


class CompiledKernel:
    """A kernel that is compiled where it would be launched, and refused as the driver refuses it
    where shared memory is too small.
    """

    def __init__(self, kernel: Any, arch: int, found: dict[str, list[float]]) -> None:
        self.kernel, self.fn, self.arch, self.found = kernel, kernel.fn, arch, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert len(grid) == 1, "the other dimensions of a grid end at 65535"

        def launch(*given: Any, **options: Any) -> None:
            built = self.kernel.warmup(*given, grid=grid, **options)
            shared = built.metadata.shared
            if shared > SHARED[self.arch] * 1024:
                raise triton.OutOfResources(shared, SHARED[self.arch] * 1024, "shared memory")
            used = [*measure_registers(built.asm["cubin"]), shared / 1024]
            name = self.fn.__name__
            self.found[name] = [
                max(pair) for pair in zip(used, self.found.get(name, used), strict=True)
            ]

        return launch


def measure_registers(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of its stack, where registers are spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def compile_case(arch: int, core: str, key: int, value: int) -> dict[str, list[float]]:
    """Kernels of the forward and the backward pass in both directions, with rotation and a mask, of
    parts of one product.
    """
    found: dict[str, list[float]] = {}
    dtype = torch.bfloat16 if core == "bf16" else torch.float32
    widths = [HEADS * width for width in (key, key, value)]
    q, k, v = (
        x.unflatten(-1, (HEADS, -1))
        for x in torch.zeros(BATCH, LENGTH, sum(widths), dtype=dtype).split(widths, -1)
    )
    given = (
        -torch.ones(HEADS),
        None,
        torch.ones(BATCH, LENGTH, dtype=torch.bool),
        make_rotation(torch.arange(LENGTH), key),
        "both",
        64,
        core,
    )
    triton.runtime.driver.set_active(PretendDriver(arch))
    kernels = {
        name: CompiledKernel(getattr(triton_retention, name), arch, found)
        for name in ("_turn_rows", *triton_retention.BLOCKS[core][1])
    }
    with mock.patch.multiple(
        triton_retention, find_generation=lambda device: arch // 10, **kernels
    ):
        triton_retention.forward(q, k, v, *given)
        triton_retention.backward(torch.zeros_like(v), q, k, v, *given)
    return found


if __name__ == "__main__":
    print(json.dumps({" ".join(map(str, case)): compile_case(*case) for case in CASES}))
