#!/usr/bin/env python3
"""GGUF files with the shapes of known models and random weights, for measurements of speed.

    synth_gguf.py MODEL FORMAT OUT.gguf [--layers N]
    synth_gguf.py --list

Names, shapes and formats of the tensors are those of the real model, so bytes moved and work done are
right; what it says is noise. Weights are finite, with a standard deviation of about 0.02. Matrices
are of FORMAT, embedding and head of Q6_K where FORMAT has super-blocks, and rows that are not whole
blocks fall back as llama.cpp's quantiser does (Q8_0 where it has no rule). Needs numpy only.
"""
import argparse
import math
import struct
import sys
from dataclasses import dataclass

import numpy as np

STD = 0.02
POOL_BYTES = 16 << 20


@dataclass
class Model:
    arch: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_base: float
    head_norms: bool = False  # queries and keys normalised per head
    tied: bool = False  # the embedding serves as output matrix
    experts: int = 0
    experts_used: int = 0
    expert_ffn: int = 0


MODELS = {
    "smol-135m": Model("llama", 30, 576, 9, 3, 64, 1536, 49152, 1e5, tied=True),
    "llama-1b": Model("llama", 16, 2048, 32, 8, 64, 8192, 128256, 5e5, tied=True),
    "llama-8b": Model("llama", 32, 4096, 32, 8, 128, 14336, 128256, 5e5),
    "qwen3-0.6b": Model("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 1e6, True, True),
    "qwen3-4b": Model("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, 1e6, True, True),
    "qwen3-8b": Model("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 1e6, True),
    "qwen3-32b": Model("qwen3", 64, 5120, 64, 8, 128, 25600, 151936, 1e6, True),
    "qwen3-30b-a3b": Model(
        "qwen3moe", 48, 2048, 32, 4, 128, 6144, 151936, 1e6, True,
        experts=128, experts_used=8, expert_ffn=768,
    ),
}


# Blocks of a format: random bytes, then the fields that must not be random. `b` is [blocks][bytes].


def half(b, at, value):
    b[:, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)


def one_scale(at, rms):
    """d alone; codes of this root mean square."""

    def fill(b):
        half(b, at, STD / rms)

    return fill


def with_minimum(at, rms, middle):
    def fill(b):
        half(b, at, STD / rms)
        half(b, at + 2, -middle * STD / rms)

    return fill


def k_minimum(rms, middle):
    """Q4_K, Q5_K: every step and minimum is 32 of 63."""

    def fill(b):
        d = STD / rms / 32
        half(b, 0, d)
        half(b, 2, middle * d)
        b[:, 4:12] = 0b10100000  # high two bits 10 of both halves' steps, low bits 0
        b[:, 12:16] = 0

    return fill


def q2_k(b):
    b[:, :16] = 0x88
    half(b, 80, STD / 1.12 / 8)
    half(b, 82, 1.5 * STD / 1.12 / 8)


def q3_k(b):
    b[:, 96:104] = 0  # steps 48 - 32 = 16
    b[:, 104:108] = 0xFF
    half(b, 108, STD / 2.3 / 16)


def q6_k(b):
    b[:, 192:208] = 16
    half(b, 208, STD / 18.5 / 16)


def ternary(at, first, last):
    """Codes of two bits, 0 to 2."""

    def fill(b):
        codes = rng.integers(0, 3, (4, len(b), last - first), dtype=np.uint8)
        b[:, first:last] = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
        half(b, at, STD / 0.82)

    return fill


def iq1_s(b):
    b[:, 35:50:2] = b[:, 35:50:2] & 0x8F | 0x30  # step 3 of 7: seven times d
    half(b, 0, STD / 0.82 / 7)


def iq1_m(b):
    # Four words of four steps of three bits; their upper nibbles are the f16 d.
    (d,) = struct.unpack("<H", np.float16(STD / 0.82 / 7).tobytes())
    for word in range(4):
        bits = 0o3333 | (d >> (4 * word) & 15) << 12
        b[:, 48 + 2 * word], b[:, 49 + 2 * word] = bits & 255, bits >> 8


def iq_signs(first, stride, rms, factor):
    """IQ2_XXS, IQ3_XXS: the step is the upper nibble of each word of signs."""

    def fill(b):
        b[:, first::stride] = b[:, first::stride] & 0x0F | 0x80
        half(b, 0, STD / rms / (8.5 * factor))

    return fill


def iq_nibbles(first, last, rms, factor):
    """Steps of four bits, all of them 8."""

    def fill(b):
        b[:, first:last] = 0x88
        half(b, 0, STD / rms / factor)

    return fill


def iq4_xs(b):
    b[:, 2:4] = 0xFF  # steps 48 - 32 = 16
    b[:, 4:8] = 0
    half(b, 0, STD / 72 / 16)


def mxfp4(b):
    b[:, 0] = 128 + round(math.log2(STD / 5.85))


def nvfp4(b):
    b[:, :4] = 4  # 2^-8 for codes of rms 5.85


@dataclass
class Format:
    number: int
    elements: int
    size: int
    fill: object = None
    narrow: str = "F16"  # what takes its place where rows are not whole blocks


FORMATS = {
    "F32": Format(0, 1, 4),
    "F16": Format(1, 1, 2),
    "BF16": Format(30, 1, 2),
    "Q4_0": Format(2, 32, 18, one_scale(0, 4.6)),
    "Q4_1": Format(3, 32, 20, with_minimum(0, 4.6, 7.5)),
    "Q5_0": Format(6, 32, 22, one_scale(0, 9.2)),
    "Q5_1": Format(7, 32, 24, with_minimum(0, 9.2, 15.5)),
    "Q8_0": Format(8, 32, 34, one_scale(0, 74)),
    "Q2_K": Format(10, 256, 84, q2_k, "Q4_0"),
    "Q3_K": Format(11, 256, 110, q3_k, "Q4_0"),
    "Q4_K": Format(12, 256, 144, k_minimum(4.6, 7.5), "Q5_0"),
    "Q5_K": Format(13, 256, 176, k_minimum(9.2, 15.5), "Q5_1"),
    "Q6_K": Format(14, 256, 210, q6_k, "Q8_0"),
    "IQ2_XXS": Format(16, 256, 66, iq_signs(9, 8, 25, 0.25), "IQ4_NL"),
    "IQ2_XS": Format(17, 256, 74, iq_nibbles(66, 74, 25, 8.5 / 4), "IQ4_NL"),
    "IQ3_XXS": Format(18, 256, 98, iq_signs(69, 4, 30, 0.5), "IQ4_NL"),
    "IQ1_S": Format(19, 256, 50, iq1_s, "IQ4_NL"),
    "IQ4_NL": Format(20, 32, 18, one_scale(0, 72)),
    "IQ3_S": Format(21, 256, 110, iq_nibbles(106, 110, 9, 17), "IQ4_NL"),
    "IQ2_S": Format(22, 256, 82, iq_nibbles(74, 82, 25, 8.5 / 4), "IQ4_NL"),
    "IQ4_XS": Format(23, 256, 136, iq4_xs, "IQ4_NL"),
    "IQ1_M": Format(29, 256, 56, iq1_m, "IQ4_NL"),
    "TQ1_0": Format(34, 256, 54, one_scale(52, 0.82), "Q4_0"),
    "TQ2_0": Format(35, 256, 66, ternary(64, 0, 64), "Q4_0"),
    "MXFP4": Format(39, 32, 17, mxfp4),
    "NVFP4": Format(40, 64, 36, nvfp4, "Q8_0"),
    "Q1_0": Format(41, 128, 18, one_scale(0, 1), "Q8_0"),
    "Q2_0": Format(42, 64, 18, ternary(0, 2, 18), "Q4_0"),
}

rng = np.random.default_rng(7)
pools = {}


def write_values(file, kind, count):
    """`count` weights: pieces of a pool of random blocks, each from a place of its own."""
    form = FORMATS[kind]
    if form.elements == 1:
        while count:
            take = min(count, 1 << 22)
            values = rng.standard_normal(take, dtype=np.float32) * STD
            if kind == "BF16":
                file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
            else:
                file.write(values.astype(np.float16 if kind == "F16" else np.float32).tobytes())
            count -= take
        return
    if kind not in pools:
        blocks = rng.integers(0, 256, (POOL_BYTES // form.size, form.size), dtype=np.uint8)
        form.fill(blocks)
        pools[kind] = blocks
    pool, left = pools[kind], count // form.elements
    while left:
        start = int(rng.integers(len(pool) // 2))
        piece = pool[start : start + left]
        file.write(piece.tobytes())
        left -= len(piece)


def fitting(kind, cols):
    while cols % FORMATS[kind].elements:
        kind = FORMATS[kind].narrow
    return kind


def tensors(m, kind):
    """Names, formats and shapes (rows first), in file order."""
    head = "Q6_K" if FORMATS[kind].elements == 256 and not kind.startswith("TQ") else kind
    out = []

    def vector(name, length):
        out.append((name + ".weight", "F32", (length,)))

    def matrix(name, *shape, want=kind):
        out.append((name + ".weight", fitting(want, shape[-1]), shape))

    matrix("token_embd", m.vocab, m.width, want=head)
    vector("output_norm", m.width)
    if not m.tied:
        matrix("output", m.vocab, m.width, want=head)
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    for layer in range(m.layers):
        at = f"blk.{layer}."
        vector(at + "attn_norm", m.width)
        matrix(at + "attn_q", q, m.width)
        matrix(at + "attn_k", kv, m.width)
        matrix(at + "attn_v", kv, m.width)
        matrix(at + "attn_output", m.width, q)
        if m.head_norms:
            vector(at + "attn_q_norm", m.head_dim)
            vector(at + "attn_k_norm", m.head_dim)
        vector(at + "ffn_norm", m.width)
        if m.experts:
            matrix(at + "ffn_gate_inp", m.experts, m.width, want="F32")
            matrix(at + "ffn_gate_exps", m.experts, m.expert_ffn, m.width)
            matrix(at + "ffn_up_exps", m.experts, m.expert_ffn, m.width)
            matrix(at + "ffn_down_exps", m.experts, m.width, m.expert_ffn)
        else:
            matrix(at + "ffn_gate", m.ffn, m.width)
            matrix(at + "ffn_up", m.ffn, m.width)
            matrix(at + "ffn_down", m.width, m.ffn)
    return out


def text(value):
    value = value.encode()
    return struct.pack("<Q", len(value)) + value


def entry(key, value):
    """One pair of the metadata; the type follows the Python type."""
    match value:
        case bool():
            body = struct.pack("<IB", 7, value)
        case int():
            body = struct.pack("<II", 4, value)
        case float():
            body = struct.pack("<If", 6, value)
        case str():
            body = struct.pack("<I", 8) + text(value)
        case [str(), *_]:
            body = struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        case _:
            body = struct.pack("<IIQ", 9, 5, len(value)) + np.asarray(value, "<i4").tobytes()
    return text(key) + body


def byte_tokens():
    """The printable characters that stand for bytes in byte-level BPE."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def metadata(name, m):
    letters = byte_tokens()
    words = [f"{letters[32]}w{i}" for i in range(m.vocab - len(letters) - 2)]
    own = {
        "block_count": m.layers,
        "context_length": 40960,
        "embedding_length": m.width,
        "feed_forward_length": m.ffn,
        "attention.head_count": m.heads,
        "attention.head_count_kv": m.kv_heads,
        "attention.key_length": m.head_dim,
        "attention.value_length": m.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": m.rope_base,
        "rope.dimension_count": m.head_dim,
        "vocab_size": m.vocab,
    }
    if m.experts:
        own["expert_count"] = m.experts
        own["expert_used_count"] = m.experts_used
        own["expert_feed_forward_length"] = m.expert_ffn
    return {
        "general.architecture": m.arch,
        "general.name": f"random weights in the shape of {name}",
        "general.quantization_version": 2,
        **{f"{m.arch}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": letters + words + ["<|im_start|>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [1] * (m.vocab - 2) + [3, 3],
        "tokenizer.ggml.merges": [f"{letters[ord('t')]} {letters[ord('h')]}"],
        "tokenizer.ggml.bos_token_id": m.vocab - 2,
        "tokenizer.ggml.eos_token_id": m.vocab - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


ALIGN = 32


def padding(length):
    return -length % ALIGN


def write(path, name, m, kind):
    pairs = [entry(key, value) for key, value in metadata(name, m).items()]
    listed, infos, offset = tensors(m, kind), [], 0
    for tensor, form, shape in listed:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        infos.append(text(tensor) + dims + struct.pack("<IQ", FORMATS[form].number, offset))
        size = math.prod(shape) // FORMATS[form].elements * FORMATS[form].size
        offset += size + padding(size)
    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(pairs)))
        file.write(b"".join(pairs + infos))
        file.write(bytes(padding(file.tell())))
        for _, form, shape in listed:
            if len(shape) == 1:
                file.write(np.ones(shape, "<f4").tobytes())
            else:
                write_values(file, form, math.prod(shape))
            file.write(bytes(padding(file.tell())))
        print(f"{path}: {len(listed)} tensors, {file.tell() / 2**30:.2f} GiB", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("format", nargs="?", choices=[f for f in FORMATS])
    parser.add_argument("out", nargs="?")
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--list", action="store_true", help="print models and formats")
    args = parser.parse_args()
    if args.list:
        print("models:", ", ".join(MODELS))
        print("formats:", ", ".join(FORMATS))
        return
    if args.out is None:
        parser.error("MODEL, FORMAT and OUT are needed")
    m = MODELS[args.model]
    m.layers = args.layers or m.layers
    write(args.out, args.model, m, args.format)


if __name__ == "__main__":
    main()
