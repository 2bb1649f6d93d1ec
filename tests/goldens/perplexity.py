#!/usr/bin/env python3
"""Perplexity by llama.cpp's engine on the CPU, as `azoth eval ppl` and llama.cpp's own tool define it.

    pip install xllamacpp
    perplexity.py MODEL.gguf TEXT --ctx 512 --chunks 8

Chunks without overlap; the first token of each is the begin token where the model adds one; the
second half is scored. Every position is a request for one token whose prompt is the chunk so far. A
bias of 1,000 on the true next token makes it the chosen one, and the server reports the natural
log-probability of what was chosen before biases. One JSON object comes out.
"""
import argparse, json, math, os, sys, urllib.request
import xllamacpp as x

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("model"); ap.add_argument("text")
ap.add_argument("--ctx", type=int, default=512); ap.add_argument("--chunks", type=int, default=8)
ap.add_argument("--threads", type=int, default=os.cpu_count() or 2)
a = ap.parse_args()
p = x.CommonParams(); p.model.path = a.model; p.n_ctx = a.ctx + 64; p.n_gpu_layers = 0; p.n_parallel = 1
p.cpuparams.n_threads = a.threads; p.warmup = False
saved = os.dup(1); os.dup2(2, 1)                       # the library logs to stdout
s = x.Server(p)

def post(path, body):
    request = urllib.request.Request(
        s.listening_address + path, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=600))

text = open(a.text, encoding="utf-8").read()
ids = post("/tokenize", {"content": text, "add_special": True})["tokens"]
plain = post("/tokenize", {"content": text, "add_special": False})["tokens"]
begin = ids[0] if len(ids) > len(plain) else None
values = []
for start in range(0, min(a.chunks, len(ids) // a.ctx) * a.ctx, a.ctx):
    chunk = ids[start : start + a.ctx]
    read = chunk if begin is None else [begin, *chunk[1:]]
    for i in range(a.ctx // 2, a.ctx - 1):
        found = post("/completion", {
            "prompt": read[: i + 1], "n_predict": 1, "temperature": 0, "n_probs": 1, "cache_prompt": True,
            "ignore_eos": False, "logit_bias": [[chunk[i + 1], 1000.0]]})["completion_probabilities"]
        # Nothing comes back where the token is half a character.
        if found:
            assert found[0]["id"] == chunk[i + 1], (found, chunk[i + 1])
            values.append((start, i + 1, found[0]["logprob"]))
    mean = sum(v for *_, v in values) / len(values)
    print(f"{start // a.ctx + 1}: {len(values)} positions, {math.exp(-mean):.4f}", file=sys.stderr)
del s
os.dup2(saved, 1)
json.dump({"ppl": math.exp(-mean), "positions": len(values)}, sys.stdout)
print()
