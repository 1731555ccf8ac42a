"""The kernels for GPUs that are embedded compute what the processor's compute, bit for bit.

What makes a difference shows in the instructions: sums and products that are fused or flushed, a
rounding that is left to the assembler, 16-bit types that the GPU converts.
"""

import re
from pathlib import Path

import pytest

HEADERS = Path(__file__).parents[2] / "csrc" / "flatweights"
KERNELS = {
    "device_copy_ptx.hpp": "flatweights_copy",
    "device_average_ptx.hpp": "flatweights_average",
}

FORBIDDEN = {
    "fused": r"\b(fma|mad)(\.\w+)*\.f(32|64)\b",
    "flushed": r"\.ftz\b",
    "approximate": r"\.(approx|full)\b",
    "without a rounding": r"\b(add|sub|mul|div|rcp|sqrt)\.f(32|64)\b",
    "in 16 bits": r"\b\w+(\.\w+)*\.(bf16|f16)(x2)?\b",
}


def instructions(name: str) -> list[str]:
    (code,) = re.findall(r'R"\((.*)\)"', (HEADERS / name).read_text(), re.DOTALL)
    return [line.strip() for line in code.splitlines() if line.strip()]


@pytest.mark.parametrize("name", KERNELS)
def test_its_arithmetic_is_that_of_the_processor(name: str) -> None:
    lines = instructions(name)
    assert any(f".entry {KERNELS[name]}(" in line for line in lines)
    for why, pattern in FORBIDDEN.items():
        assert not [line for line in lines if re.search(pattern, line)], why


def test_sums_and_quotients_are_there() -> None:
    """Else the patterns above would find nothing in anything."""
    code = "\n".join(instructions("device_average_ptx.hpp"))
    for operation in ("add.rn.f64", "mul.rn.f64", "div.rn.f64", "cvt.rn.f32.f64"):
        assert operation in code
