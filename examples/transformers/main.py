# SPDX-License-Identifier: Apache-2.0
"""KVHaven with Hugging Face transformers: one prompt cold, warm, and from disk after a restart.

    .venv/bin/python examples/transformers/main.py [--model FOLDER] [--tokens 8192]

Without `--model` it creates a small Llama. Prints the time to the first token of each run, and
whether the outputs are equal.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.demo.model import make_model
from kvhaven.integrations.transformers import KVHaven


def main() -> int:
    """Run the demonstration, or one of its processes (`--phase`); return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="folder written by save_pretrained")
    parser.add_argument("--tokens", type=int, default=8192, help="length of the prompt in tokens")
    parser.add_argument("--disk", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--phase", choices=("first", "restarted"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phase:
        print(json.dumps(run(arguments.model, arguments.disk, arguments.tokens, arguments.phase)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make_model(Path(folder) / "model")
        common = ["--model", str(model), "--disk", f"{folder}/disk", "--tokens"]
        found: dict[str, dict[str, object]] = {}
        for phase in ("first", "restarted"):
            command = [sys.executable, __file__, *common, str(arguments.tokens), "--phase", phase]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found |= json.loads(done.stdout.splitlines()[-1])
    cold = found["cold"]
    print(f"{'':12} {'first token':>12} {'sooner':>8} {'cached':>8}  output")
    for name, one in found.items():
        sooner = float(str(cold["seconds"])) / float(str(one["seconds"]))
        same = "identical" if one["output"] == cold["output"] else "DIFFERENT"
        print(f"{name:12} {one['seconds']:10.3f} s {sooner:7.1f}x {one['cached']:>8}  {same}")
    return 0 if all(one["output"] == cold["output"] for one in found.values()) else 1


def run(folder: Path, disk: Path, tokens: int, phase: str) -> dict[str, dict[str, object]]:
    """Measure one process: without KVHaven, then cold and warm; or after a restart."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    dice = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, model.config.vocab_size, (1, tokens), generator=dice)
    found: dict[str, dict[str, object]] = {}
    if phase == "first":
        found["cold"] = measure(model, prompt)
    with KVHaven(model, local_disk=str(disk), max_local_cpu_size="2GB") as haven:
        if phase == "first":
            found["first call"] = measure(haven, prompt)
            found["memory"] = measure(haven, prompt)
        else:
            found["restart"] = measure(haven, prompt)
    return found


def measure(generator: object, prompt: torch.Tensor) -> dict[str, object]:
    """Return the seconds to the first token, the number of cached tokens, and 16 output tokens."""
    generate = generator.generate  # type: ignore[attr-defined]
    mask = torch.ones_like(prompt)
    began = time.perf_counter()
    generate(prompt, attention_mask=mask, max_new_tokens=1, do_sample=False)
    seconds = time.perf_counter() - began
    cached = getattr(generator, "cached_tokens", 0)
    output = generate(prompt, attention_mask=mask, max_new_tokens=16, do_sample=False)
    return {"seconds": seconds, "cached": cached, "output": output[0, prompt.shape[1] :].tolist()}


if __name__ == "__main__":
    sys.exit(main())
