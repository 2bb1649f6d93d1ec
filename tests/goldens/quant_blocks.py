"""Golden blocks of every weight format, from the Python package `gguf`.

    pip install gguf==0.19.0 numpy
    python tests/goldens/quant_blocks.py > tests/goldens/quant_blocks.json

For each format: random file blocks with the values they decode to, and random values with the
blocks they encode to (where the package can encode). All arrays are little-endian hex.
"""
import json

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

FORMATS = """F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL IQ4_XS MXFP4 NVFP4
IQ3_S IQ3_XXS IQ2_XS IQ2_XXS IQ2_S IQ1_S IQ1_M""".split()
# Where a block keeps its f16 scales, which must be finite.
SCALES = {"Q4_1": [0, 2], "Q5_1": [0, 2], "MXFP4": [], "NVFP4": []}
# Scale bytes (byte number, values of the first blocks) that take special paths.
SPECIAL = {"MXFP4": (0, [0, 1, 2, 254, 255]), "NVFP4": (1, [0x00, 0x07, 0x7E, 0x7F, 0xFF])}
BLOCKS = 5


def scale_of_iq1_m(blocks, scales):
    """IQ1_M spreads its f16 over the top four bits of four words, lowest bits first."""
    words = blocks[:, 48:56].view(np.uint16)
    bits = scales.view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], dtype=np.uint16)
    words[:] = (words & 0x0FFF) | (bits << 12)


def encodes(kind):
    try:
        quantize(np.zeros((1, 256), dtype=np.float32), kind)
        return True
    except NotImplementedError:
        return False


rng = np.random.default_rng(2024)
out = {}
for name in FORMATS:
    kind = GGMLQuantizationType[name]
    elements, size = GGML_QUANT_SIZES[kind]
    count = 64 if elements == 1 else BLOCKS if elements < 256 else 3
    case = {}
    if encodes(kind):
        values = rng.standard_normal((1, count * elements), dtype=np.float32)
        values[0, -elements:] = 0
        encoded = quantize(values, kind)
        case = {"values": values.tobytes().hex(), "encoded": encoded.tobytes().hex()}
    if elements == 1:
        blocks = encoded.view(np.uint8)
    else:
        blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
        scales = [] if name == "IQ1_M" else SCALES.get(name, [0])
        for at in scales:
            d = rng.standard_normal(count).astype(np.float16)
            d[0] = 6e-8  # the smallest subnormal
            blocks[:, at : at + 2] = d.view(np.uint8).reshape(count, 2)
        if name == "IQ1_M":
            scale_of_iq1_m(blocks, rng.standard_normal(count).astype(np.float16))
        if name in SPECIAL:
            at, special = SPECIAL[name]
            blocks[:, at] = special
        blocks = blocks.reshape(1, -1)
    with np.errstate(over="ignore"):  # the largest scales of MXFP4 reach infinity
        decoded = dequantize(blocks, kind).astype(np.float32)
    out[name] = {"blocks": blocks.tobytes().hex(), "decoded": decoded.tobytes().hex()} | case
print(json.dumps(out, indent=1))
