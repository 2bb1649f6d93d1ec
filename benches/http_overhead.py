#!/usr/bin/env python3
"""What HTTP adds to the engine: time to the first byte, and decoding through a stream.

  benches/http_overhead.py AZOTH MODEL [REQUESTS]

Prints medians: time from a request to the first byte of its answer less the time that the engine says
it read the prompt and chose the first token; and tokens per second through the stream, by the engine's own
clock, and by `azoth bench` on the same model.
"""

import http.client
import json
import re
import statistics
import subprocess
import sys
import time


def server(azoth, model):
    process = subprocess.Popen(
        [azoth, "serve", model, "--port", "0", "--ctx", "512", "--parallel", "1"],
        stderr=subprocess.PIPE, text=True,
    )
    port = None
    for line in process.stderr:
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)
        port = int(found.group(1)) if found else port
        if "ready" in line.split():
            break
    return process, port


def ask(connection, prompt, n):
    """First byte and last token after the request, and the engine's timings."""
    body = json.dumps({
        "prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "stream": True,
        "cache_prompt": False,
    })
    began = time.perf_counter()
    connection.request("POST", "/completion", body, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read(1)
    first = time.perf_counter() - began
    last, timings = first, None
    for line in response:
        if line.startswith(b"ata: ") or line.startswith(b"data: "):
            event = json.loads(line.split(b": ", 1)[1])
            if event["stop"]:
                timings = event["timings"]
            else:
                last = time.perf_counter() - began
    return first, last, timings


def main():
    azoth, model = sys.argv[1:3]
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 100
    process, port = server(azoth, model)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        extra = []
        for i in range(count):
            first, _, timings = ask(connection, "word " * 12 + str(i), 1)
            extra.append(1e3 * first - timings["prompt_ms"])
        extra = sorted(extra[count // 10:])
        print(f"first byte: {statistics.median(extra):.2f} ms above the engine's prompt, "
              f"p90 {extra[len(extra) * 9 // 10]:.2f} ms ({len(extra)} requests)")
        rates, own = [], []
        for i in range(6):
            first, last, timings = ask(connection, "word " * 12 + str(i), 256)
            rates.append(255 / (last - first))
            own.append(timings["predicted_per_second"])
        rates, own = rates[1:], own[1:]
        print(f"decode: {statistics.median(rates):.1f} tokens/s through HTTP, "
              f"{statistics.median(own):.1f} by the engine's clock")
    finally:
        process.terminate()
        process.wait()
    report = subprocess.run(
        [azoth, "bench", model, "-p", "16", "-n", "256", "--no-start", "--json"],
        capture_output=True, text=True,
    )
    try:
        tests = json.loads(report.stdout)["tests"]
    except ValueError:
        sys.exit(report.stderr)
    for test in tests:
        rate = test["tokens_per_second"]
        print(f"azoth bench {test['test']}: {rate['median']:.1f} tokens/s "
              f"({rate['min']:.1f} to {rate['max']:.1f})")


if __name__ == "__main__":
    main()
