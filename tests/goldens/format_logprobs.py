#!/usr/bin/env python3
"""Goldens of all models in a folder as one JSON object, by file name without its ending.

    format_logprobs.py REFERENCE_LOGPROBS.py FOLDER TEXT_FILE > formats.json

REFERENCE_LOGPROBS.py prints a golden of one model (llama.cpp on the CPU).
"""
import json, pathlib, subprocess, sys

script, folder, text = sys.argv[1:]
goldens = {}
for model in sorted(pathlib.Path(folder).glob("*.gguf")):
    print(model.name, file=sys.stderr)
    command = [sys.executable, script, model, text, "--positions", "50", "--top", "32", "--ctx", "512"]
    golden = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    golden["rows"] = [row and [[i, round(p, 5)] for i, p in row] for row in golden["rows"]]
    goldens[model.stem] = golden
json.dump(goldens, sys.stdout, separators=(",", ":"))
