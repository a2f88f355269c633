"""How fast kernels of target hopper go, by family of forms: fitted by `python benchmarks/model.py --fit`."""

from __future__ import annotations

from ....compiler.planning.paces import PACES, Pace

NARROW = 64  # columns up to which products of a forward are too short for all exponentials to hide behind

# Constants of row_reads and levels, and the family of narrow forwards, are those of two rows each (D64 and D128), found
# with all others held; so were gathers of flash_ddiagonals, of one kernel that was timed alone. The family of FP8 has
# those of the eight rows in docs/experiments/2026-11-27-fp8-products.md, which it meets within 10 %, and that of parts
# those of the four rows of Dv 256 in 2026-11-28-fp8-wide-and-packed.md, within 4 %. A tile of a latent cache in FP8
# takes what 2026-11-29-fp8-latent-tiles.md has beside its products.
# fmt: off
PACES.update(
    {
        "hopper flash_backward": Pace(
            matrix=0.876, exp=0, other=1.56, pair_reads=5.66, gathers=5.47, row_reads=5, levels=3, tile=0.39,
            program=3.82,
        ),
        "hopper flash_backward next": Pace(matrix=1.06, exp=0.986, other=0.295, mask=0.216, tile=0.0786, program=2.37),
        "hopper flash_dkey_dvalue": Pace(
            matrix=0.82, exp=0, row_reads=16.5, levels=15, mask=3.29, tile=0.0428, piece=0.0865,
        ),
        "hopper flash_dquery": Pace(matrix=0.82, exp=0, row_reads=3.5, tile=0.851, program=5.87),
        "hopper flash_forward": Pace(
            matrix=0.821, exp=0, other=1.11, pair_reads=29.9,
            gathers=0.155, row_reads=6.5, mask=2.95, program=2.29,
        ),
        "hopper flash_forward narrow": Pace(
            matrix=0.821, exp=0.5, other=1.11, pair_reads=29.9,
            gathers=2, row_reads=6, mask=2.95, program=2.29,
        ),
        "hopper flash_forward of eighths": Pace(matrix=0.82, exp=0, other=1.64, mask=9.48, program=2.6, fitted="H100"),
        "hopper flash_forward of eighths, parted": Pace(
            matrix=0.82, exp=0, other=3, mask=9.48, program=2.6, fitted="H200"
        ),
        "hopper split_forward of eighths": Pace(matrix=1, exp=1, tile=1, fitted="H200"),
        "hopper flash_forward of three": Pace(matrix=0.885, exp=0.325, other=0.0776, tile=0.135, program=2.14),
    }
)
# fmt: on
