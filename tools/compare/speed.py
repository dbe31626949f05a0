"""Tokens per second of kvern and llama.cpp, alternating, on the same threads in one run.

usage: speed.py MODEL.gguf DIRECTORY [--threads 2] [--rounds 3] [--kvern target/release/kvern]

Each round measures every file with both programs, one after the other, and the best of the rounds counts for both: machines are shared,
and what disturbs a measurement only ever slows it. llama.cpp runs with and without flash attention; its better number counts.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path

import llama_cpp

CASES = [("prefill 512", 512, 0, 0), ("decode 1 row", 0, 1, 0), ("decode 32 rows at 128", 0, 32, 128), ("decode 1 row at 4096", 0, 1, 4096)]
GENERATE = 64


class Peer:
    """llama.cpp, driven batch by batch."""

    def __init__(self, path: str, threads: int, flash: bool):
        model = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max = 8192, 512, 512, 32
        context.n_threads = context.n_threads_batch = threads
        context.kv_unified = True
        context.flash_attn_type = 1 if flash else 0
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def close(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def clear(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def step(self, entries):
        """Runs (token, position, row, wants logits) entries."""
        self.batch.n_tokens = len(entries)
        for i, (token, position, row, logits) in enumerate(entries):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0], self.batch.logits[i] = 1, row, logits
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")

    def prompt(self, count: int, row: int):
        for start in range(0, count, 512):
            end = min(count, start + 512)
            self.step([((7919 * (i + 1)) % 49152, i, row, i + 1 == count) for i in range(start, end)])

    def prefill(self, count: int) -> float:
        self.clear()
        start = time.perf_counter()
        self.prompt(count, 0)
        return count / (time.perf_counter() - start)

    def decode(self, rows: int, depth: int) -> float:
        self.clear()
        depth = max(depth, 1)
        for row in range(rows):
            self.prompt(depth, row)
        start = time.perf_counter()
        for i in range(GENERATE):
            self.step([((7919 * (i + row + 3)) % 49152, depth + i, row, True) for row in range(rows)])
        return rows * GENERATE / (time.perf_counter() - start)


def peer(path: str, threads: int, case) -> float:
    _, prompt, rows, depth = case
    best = 0.0
    for flash in [False, True]:
        peer = Peer(path, threads, flash)
        best = max(best, peer.prefill(prompt) if prompt else peer.decode(rows, depth))
        peer.close()
    return best


def own(kvern: str, path: str, threads: int, case) -> float:
    _, prompt, rows, depth = case
    shape = ["--prompt", str(prompt), "--depth", "0", "--batch", "1", "--generate", "1"]
    if not prompt:
        shape = ["--prompt", "1", "--depth", str(depth), "--batch", str(rows), "--generate", str(GENERATE)]
    command = [kvern, "bench", "-m", path, "--threads", str(threads), "--repeat", "1", "--json", *shape]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return report["prefill"][0]["tok_s"] if prompt else report["decode"][0]["tok_s"]


@llama_cpp.llama_log_callback
def quiet(level, text, data):
    pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kvern", default="target/release/kvern")
    args = parser.parse_args()
    llama_cpp.llama_log_set(quiet, None)
    files = {"q4_1": args.model} | {name: str(args.directory / f"{name}.gguf") for name in ["q4_0", "q8_0", "bf16"]}
    best = {}
    for _ in range(args.rounds):
        for case in CASES:
            for name, path in files.items():
                for program, rate in [("kvern", lambda: own(args.kvern, path, args.threads, case)),
                                      ("llama.cpp", lambda: peer(path, args.threads, case))]:
                    key = (case[0], name, program)
                    best[key] = max(best.get(key, 0.0), rate())
    print("| | file | kvern tok/s | llama.cpp tok/s | ratio | over its fastest file |\n|---|---|---|---|---|---|")
    for case in CASES:
        fastest = max(best[case[0], name, "llama.cpp"] for name in files)
        for name in files:
            a, b = best[case[0], name, "kvern"], best[case[0], name, "llama.cpp"]
            print(f"| {case[0]} | {name} | {a:.0f} | {b:.0f} | {a / b:.2f} | {a / fastest:.2f} |")


if __name__ == "__main__":
    main()
