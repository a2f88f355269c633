"""How fast kernels of target triton go, by family of forms: fitted by `python benchmarks/model.py --fit`."""

from __future__ import annotations

from ....compiler.planning.paces import PACES, Pace

WIDE_COLUMNS = 128  # columns above which a Triton kernel's sums leave registers
# us: where rows are packed, a program of a Triton kernel reads its place, and then the ends of its sequence, before it
# reads a tile; of 16 sequences of 1024 tokens alone, whose programs are short
PACKED_PROGRAM = 2.7

# Constants of row_reads and levels, and the family of narrow forwards, are those of two rows each (D64 and D128), found
# with all others held; so were gathers of flash_ddiagonals, of one kernel that was timed alone.
# fmt: off
PACES.update(
    {
        "triton flash_ddiagonals": Pace(matrix=1.2, exp=0, other=1, gathers=100),
        "triton flash_dkey_dvalue": Pace(
            matrix=1.29, exp=0, other=1.58, pair_reads=188, gathers=49, row_reads=35,
            mask=16.9, tile=0.00334, piece=0.0435, program=2.19,
        ),
        "triton flash_dkey_dvalue wide": Pace(matrix=2.89, exp=0, tile=0.417),
        "triton flash_dquery": Pace(matrix=1.23, exp=0, pair_reads=54.6, gathers=9.34, row_reads=5, program=2.59),
        "triton flash_dquery wide": Pace(matrix=1.44, exp=0, tile=0.304),
        "triton flash_forward": Pace(
            matrix=1.51, exp=0, other=0.65, pair_reads=181,
            gathers=6.06, row_reads=7.7, mask=9.99, piece=0.0478, program=1.45,
        ),
        "triton flash_forward wide": Pace(matrix=1.21, exp=0.447, other=0.183, tile=0.282, piece=0.222, program=0.667),
    }
)
# fmt: on
