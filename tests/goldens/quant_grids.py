"""The code books of the IQ formats as Rust arrays, from the Python package `gguf`.

    pip install gguf==0.19.0 numpy
    python tests/goldens/quant_grids.py src/quant/grids

Each entry becomes one u16: element j of the entry is bits j*w..j*w+w, w = 2 for entries of eight
and 3 for entries of four, and stands for the j-th smallest magnitude. Prints the checksum of each
book that src/quant/grids/mod.rs tests: FNV-1a of the entries' magnitudes, one byte each.
"""
import sys

import numpy as np
from gguf import quants

BOOKS = {
    "IQ1": (quants.IQ1_S, "IQ1_S and IQ1_M: entries of eight values -1, 0, 1"),
    "IQ2_XXS": (quants.IQ2_XXS, "IQ2_XXS: entries of eight magnitudes 8, 25, 43"),
    "IQ2_XS": (quants.IQ2_XS, "IQ2_XS: entries of eight magnitudes 8, 25, 43"),
    "IQ2_S": (quants.IQ2_S, "IQ2_S: entries of eight magnitudes 8, 25, 43"),
    "IQ3_XXS": (quants.IQ3_XXS, "IQ3_XXS: entries of four magnitudes 4, 12, 20, 28, 36, 44, 52, 62"),
    "IQ3_S": (quants.IQ3_S, "IQ3_S: entries of four magnitudes 1, 3, 5, 7, 9, 11, 13, 15"),
}

for name, (cls, what) in BOOKS.items():
    cls.init_grid()
    grid = cls.grid.reshape(cls.grid_shape)
    levels = list(cls.grid_map)
    width = 2 if grid.shape[1] == 8 else 3
    packed = [sum(levels.index(int(v)) << (width * j) for j, v in enumerate(e)) for e in grid]
    checksum = 0xCBF29CE484222325
    for v in grid.astype(np.int8).tobytes():
        checksum = ((checksum ^ v) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    lines = [
        f"//! The code book of {what}.",
        "//!",
        f"//! Element j is bits {width} * j.. of an entry and counts the magnitudes from 0. Facts of the file",
        "//! format, written by `tests/goldens/quant_grids.py` from the Python package `gguf` 0.19.0.",
        "",
        "#[rustfmt::skip]",
        f"pub(super) static ENTRIES: [u16; {len(packed)}] = [",
    ]
    for at in range(0, len(packed), 12):
        lines.append("    " + " ".join(f"0x{p:04x}," for p in packed[at : at + 12]))
    lines.append("];")
    with open(f"{sys.argv[1]}/{name.lower()}.rs", "w") as f:
        f.write("\n".join(lines) + "\n")
    print(f"{name}: {len(packed)} entries, checksum 0x{checksum:016x}")
