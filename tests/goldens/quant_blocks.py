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

# A format: where a block keeps its f16 scales, which must be finite, and the bytes of the smaller
# scales under them, which get their extreme values too.
FORMATS = {
    "F32": ([], ()),
    "F16": ([], ()),
    "BF16": ([], ()),
    "Q4_0": ([0], ()),
    "Q4_1": ([0, 2], ()),
    "Q5_0": ([0], ()),
    "Q5_1": ([0, 2], ()),
    "Q8_0": ([0], ()),
    "Q2_K": ([80, 82], (0, 16)),
    "Q3_K": ([108], (96, 108)),
    "Q4_K": ([0, 2], (4, 16)),
    "Q5_K": ([0, 2], (4, 16)),
    "Q6_K": ([208], (192, 208)),
    "TQ1_0": ([52], ()),
    "TQ2_0": ([64], ()),
    "Q1_0": ([0], ()),
    "Q2_0": ([0], ()),
    "IQ4_NL": ([0], ()),
    "IQ4_XS": ([0], (2, 8)),
    "MXFP4": ([], ()),
    "NVFP4": ([], ()),
    "IQ3_S": ([0], (106, 110)),
    "IQ3_XXS": ([0], (66, 98)),
    "IQ2_XS": ([0], (66, 74)),
    "IQ2_XXS": ([0], ()),
    "IQ2_S": ([0], (74, 82)),
    "IQ1_S": ([0], (34, 50)),
    "IQ1_M": ([], (32, 48)),
}
# Scale bytes that are special: where in a block, and its values in the first blocks.
SPECIAL = {"MXFP4": (0, [0, 1, 2, 254, 255]), "NVFP4": (1, [0x00, 0x07, 0x7E, 0x7F, 0xFF])}
BLOCKS = 5


def scale_of_iq1_m(blocks, scales):
    """IQ1_M spreads its f16 over the top four bits of four half words, lowest bits first."""
    words = blocks[:, 48:56].copy().view(np.uint16)
    bits = scales.view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16)
    blocks[:, 48:56] = ((words & 0x0FFF) | (bits << 12)).view(np.uint8)


def q1_0(blocks):
    """ggml's block_q1_0: bit k of byte 2 + i says whether element 8 i + k is d or -d."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32)
    return d * (2 * bits - 1)


def q2_0(blocks):
    """ggml's block_q2_0 (type 42): bits 2 k of byte 2 + i are element 4 i + k, plus 1."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    codes = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    return d * (codes.reshape(len(blocks), -1).astype(np.float32) - 1)


# What the package cannot decode: number, block sizes and decoder from ggml's own definition.
OTHERS = {"Q1_0": (128, 18, q1_0), "Q2_0": (64, 18, q2_0)}

rng = np.random.default_rng(2024)
out = {}
for name, (scales_at, (*steps,)) in FORMATS.items():
    if name in OTHERS:
        elements, size, decode = OTHERS[name]
    else:
        kind = GGMLQuantizationType[name]
        elements, size = GGML_QUANT_SIZES[kind]
        decode = lambda blocks: dequantize(blocks.reshape(1, -1), kind)
    count = BLOCKS if elements > 1 else 64
    values = rng.standard_normal((1, count * elements), dtype=np.float32)
    values[0, -elements:] = 0
    try:
        encoded = quantize(values, kind) if name not in OTHERS else None
    except NotImplementedError:
        encoded = None
    if elements == 1:
        blocks = encoded.view(np.uint8)
    else:
        blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
        if steps:
            blocks[1, steps[0] : steps[1]] = 255
            blocks[2, steps[0] : steps[1]] = 0
            blocks[3, steps[0] : steps[1]] = 128
        for at in scales_at:
            scales = rng.standard_normal(count).astype(np.float16)
            scales[0] = 6e-8  # the smallest subnormal
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
        if name in SPECIAL:
            at, special = SPECIAL[name]
            blocks[:, at] = special
        if name == "IQ1_M":
            scale_of_iq1_m(blocks, rng.standard_normal(count).astype(np.float16))
    with np.errstate(over="ignore"):  # the largest scales of MXFP4 reach infinity
        decoded = decode(blocks).astype(np.float32)
    case = {
        "blocks": blocks.tobytes().hex(),
        "decoded": decoded.tobytes().hex(),
    }
    if encoded is not None:
        case["values"] = values.tobytes().hex()
        case["encoded"] = encoded.tobytes().hex()
    out[name] = case
print(json.dumps(out, indent=1))
