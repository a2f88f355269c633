"""Places of operand reads beyond 2**31 elements: as machine code for a GPU, and read by Triton's interpreter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import weft
from weft import head, kv_pos, q_pos

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weft.codegen.dialects import TRITON, Printer
from weft.codegen.loader import load

from ..support import poisoned

pytestmark = pytest.mark.compiles

KERNEL = """import triton
import triton.language as tl


@triton.jit
def read(out, arg_bias, s0_bias, s1_bias, s2_bias, head):
    q_pos = tl.program_id(0)
    kv_pos = tl.arange(0, 128)
    tl.store(out + kv_pos, {read})
"""
bias, flags = weft.tensor("bias", 3), weft.tensor("flags", 2, bool)


def test_no_product_of_a_place_has_32_bits(tmp_path: Path) -> None:
    path = tmp_path / "read.py"
    path.write_text(KERNEL.format(read=Printer(TRITON)(bias[head, q_pos, kv_pos])))
    strides = {f"s{d}_bias": "i32" for d in range(3)}
    source = ASTSource(load(path).read, {"out": "*fp32", "arg_bias": "*fp32", **strides, "head": "i32"}, {}, {})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert len(re.findall(r"mul\.(?:wide\.s32|lo\.s64)", text)) == 3
    assert not re.findall(r"(?:mul|mad)\.lo\.[su]32", text)


def test_reads_beyond_2_to_the_31_elements() -> None:
    """The memory between the rows is never touched, so that it costs nothing."""
    row = 2**30
    far = torch.empty(2 * row + 64, dtype=torch.bool).as_strided((3, 40), (row, 1))
    far.copy_(torch.arange(120).view(3, 40) % 3 != 0)
    variant = weft.Attention(mask=flags[q_pos // 14, kv_pos] & (kv_pos <= q_pos), name="far_flags")
    query, key, value = (poisoned((1, 1, 40, 16), torch.float32, seed=n) for n in range(3))
    out = variant(query, key, value, flags=far, target="interpret")
    torch.testing.assert_close(out, variant.reference(query, key, value, flags=far), rtol=1e-5, atol=1e-5)
