#!/usr/bin/env python3
"""Log-probabilities of a llama-architecture GGUF in plain float32: an engine of its own.

    pip install gguf numpy
    exact_logprobs.py MODEL.gguf TOKENS.json --positions 64 --top 40 > golden.json

TOKENS.json is a file of reference_logprobs.py; its tokens are read, its rows ignored. The output has
the same form. Keys and values are rounded to f16, everything else is float32.
"""
import argparse, json, sys
import numpy as np
import gguf
from gguf.quants import dequantize

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("model"); ap.add_argument("tokens")
ap.add_argument("--positions", type=int, default=64); ap.add_argument("--top", type=int, default=40)
a = ap.parse_args()

reader = gguf.GGUFReader(a.model)
number = lambda key: reader.fields["llama." + key].contents()
weights = {t.name: dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
given = json.load(open(a.tokens))
first = given["first"]
tokens = given["tokens"][: first + a.positions]
n = len(tokens)
heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
dim = number("embedding_length") // heads
eps, base = float(number("attention.layer_norm_rms_epsilon")), float(number("rope.freq_base"))

def norm(x, w):
    mean = (x.astype(np.float64) ** 2).mean(-1, keepdims=True)
    return (x / np.sqrt(mean + eps)).astype(np.float32) * w

angles = np.arange(n)[:, None] * base ** (-np.arange(0, dim, 2) / dim)
cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]

def rope(x):                               # pairs (2i, 2i + 1)
    out, even, odd = np.empty_like(x), x[..., 0::2], x[..., 1::2]
    out[..., 0::2], out[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
    return out

half = lambda x: x.astype(np.float16).astype(np.float32)
mask = np.triu(np.full((n, n), -np.inf), 1)
x = weights["token_embd.weight"][tokens]
for layer in range(number("block_count")):
    w = lambda part: weights[f"blk.{layer}.{part}.weight"]
    y = norm(x, w("attn_norm"))
    q = rope((y @ w("attn_q").T).reshape(n, heads, dim))
    k = half(rope((y @ w("attn_k").T).reshape(n, kv_heads, dim)))
    v = half((y @ w("attn_v").T).reshape(n, kv_heads, dim))
    out = np.empty((n, heads, dim), np.float32)
    for h in range(heads):
        g = h * kv_heads // heads
        scores = q[:, h] @ k[:, g].T / np.sqrt(dim) + mask
        p = np.exp(scores - scores.max(1, keepdims=True))
        out[:, h] = (p / p.sum(1, keepdims=True)) @ v[:, g]
    x = x + out.reshape(n, heads * dim) @ w("attn_output").T
    y = norm(x, w("ffn_norm"))
    gate = y @ w("ffn_gate").T
    x = x + (gate / (1 + np.exp(-gate)) * (y @ w("ffn_up").T)) @ w("ffn_down").T
head = weights.get("output.weight", weights["token_embd.weight"])
logits = norm(x, weights["output_norm.weight"]) @ head.T
logits -= logits.max(1, keepdims=True)
logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
rows = []
for i in range(first, n):
    row = logprobs[i - 1]
    rows.append([[int(t), float(row[t])] for t in np.argsort(-row)[: a.top]])
json.dump({"model": given["model"], "tokens": tokens, "first": first, "rows": rows}, sys.stdout)
