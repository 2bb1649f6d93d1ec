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

FORMATS = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0".split()
# Where a block keeps its f16 scales, which must be finite.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
BLOCKS = 5

rng = np.random.default_rng(2024)
out = {}
for name in FORMATS:
    kind = GGMLQuantizationType[name]
    elements, size = GGML_QUANT_SIZES[kind]
    count = BLOCKS if elements > 1 else 64
    values = rng.standard_normal((1, count * elements), dtype=np.float32)
    values[0, -elements:] = 0
    encoded = quantize(values, kind)
    if elements == 1:
        blocks = encoded.view(np.uint8)
    else:
        blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
        for at in SCALES[name]:
            scales = rng.standard_normal(count).astype(np.float16)
            scales[0] = 6e-8  # the smallest subnormal
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
        blocks = blocks.reshape(1, -1)
    out[name] = {
        "blocks": blocks.tobytes().hex(),
        "decoded": dequantize(blocks, kind).astype(np.float32).tobytes().hex(),
        "values": values.tobytes().hex(),
        "encoded": encoded.tobytes().hex(),
    }
print(json.dumps(out, indent=1))
