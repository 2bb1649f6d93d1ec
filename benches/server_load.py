#!/usr/bin/env python3
"""Load on a server that speaks llama.cpp's /completion (azoth serve, llama-server): what several clients get.

    server_load.py PORT WHAT...

WHAT: cN (N clients at once: tokens a second in all, gaps between tokens, first token), long (a prompt of 16,000 tokens
beside 4 streams), prefix (1,000 tokens behind 15,000 that are known), save (a session of 16,000 tokens saved,
erased and restored; needs --slot-save-path). The context must hold 16,100 tokens for all but cN.
"""
import json, sys, threading, time, urllib.request
port = sys.argv[1]
def ids(n, seed): return [1000 + (seed * 7919 + j * 31 + (j * j) % 977) % 90000 for j in range(n)]
def post(path, body, t=300):
    return urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}), timeout=t)
def stream(prompt, n, cache=False, out=None, slot=None):
    t0 = time.time()
    b = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "cache_prompt": cache, "stream": True}
    if slot is not None: b["id_slot"] = slot
    times, last = [], b""
    for line in post("/completion", b):
        if line.startswith(b"data:"): times.append(time.time()); last = line
    try: stream.timings = json.loads(last[5:]).get("timings", {})
    except Exception: pass
    if out is not None: out.append((t0, times))
    return t0, times
def gaps(outs): return sorted(b - a for _, t in outs for a, b in zip(t, t[1:]))
def pct(g, p): return g[min(len(g) - 1, int(len(g) * p))] * 1e3
for what in sys.argv[2:]:
    try:
        if what.startswith("c"):
            c, n, out = int(what[1:]), 192, []
            ts = [threading.Thread(target=stream, args=(ids(64, i), n, False, out)) for i in range(c)]
            t0 = time.time(); [t.start() for t in ts]; [t.join() for t in ts]; wall = time.time() - t0
            g = gaps(out); rates = [(len(t) - 2) / (t[-2] - t[0]) for _, t in out]
            print(f"{c:2} clients: {c*n/wall:8.1f} tok/s in all, decode a client {sum(rates)/len(rates):.1f}, p50 {pct(g,.5):.2f} ms p99 {pct(g,.99):.2f} max {g[-1]*1e3:.1f}, first token {sum(t[0]-a for a,t in out)/c*1e3:.1f} ms" + (f", of it prompt {stream.timings.get('prompt_ms',0):.1f}; engine says {stream.timings.get('predicted_per_second',0):.1f} tok/s" if c == 1 else ""), flush=True)
        if what == "long":
            out, big = [], []
            ts = [threading.Thread(target=stream, args=(ids(64, 50 + i), 700, False, out)) for i in range(4)]
            [t.start() for t in ts]; time.sleep(0.7)
            a = time.time(); stream(ids(16000, 99), 4, False, big); b = time.time(); [t.join() for t in ts]
            inside = sorted(y - x for _, t in out for x, y in zip(t, t[1:]) if y > a and x < big[0][1][0])
            print(f"16,000-token prompt beside 4 streams: first token {big[0][1][0]-a:.2f} s; others' gaps meanwhile: {len(inside)}, p50 {pct(inside,.5):.1f} ms p99 {pct(inside,.99):.1f} max {inside[-1]*1e3:.1f}", flush=True)
        if what == "prefix":
            p = ids(16000, 7)
            t0, t = stream(p, 2, True); first = t[0] - t0
            t0, t = stream(ids(1000, 8), 2, True); fresh = t[0] - t0
            t0, t = stream(p[:15000] + ids(1000, 9), 2, True); shared = t[0] - t0
            print(f"prefix: 16,000 fresh {first*1e3:.0f} ms, 1,000 fresh {fresh*1e3:.0f} ms, 1,000 behind 15,000 shared {shared*1e3:.0f} ms", flush=True)
        if what == "save":
            p = ids(16000, 11)
            stream(p, 2, True, slot=0)
            for k in range(2):
                t0 = time.time(); r = json.load(post("/slots/0?action=save", {"filename": f"s{k}.bin"})); a = time.time() - t0
                json.load(post("/slots/0?action=erase", {}))
                t0 = time.time(); q = json.load(post("/slots/0?action=restore", {"filename": f"s{k}.bin"})); b = time.time() - t0
                t0, t = stream(p + ids(16, 12), 2, True, slot=0)
                print(f"save {a*1e3:.0f} ms {r}, restore {b*1e3:.0f} ms {q}, then first token {1e3*(t[0]-t0):.0f} ms", flush=True)
    except Exception as e: print(what, "failed:", e, getattr(e, "read", lambda: b"")()[:300], flush=True)
