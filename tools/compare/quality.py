"""Divergence of kvern and llama.cpp from exact arithmetic on the same files and tokens, in nats.

usage: quality.py MODEL.gguf DIRECTORY --text FILE [--tokens 512] [--kvern target/release/kvern]

The reference is float64 numpy over the weights that the `gguf` package decodes, so both differ from it by arithmetic alone. With --mlx
the table also shows mlx-lm in float32 (slow): how far an independent float32 implementation is from the same reference.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracle"))
from llama_reference import float32_logits, float64_logits  # noqa: E402


def own(kvern: str, path: str, tokens: list, flags=()) -> np.ndarray:
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "tokens.json"), Path(directory, "logits.safetensors")
        source.write_text(json.dumps(tokens))
        subprocess.run([kvern, "logits", "-m", path, "--tokens", source, "-o", target, *flags], check=True)
        return load_file(target)["logits"]


def peer(path: str, tokens: list) -> np.ndarray:
    model = llama_cpp.Llama(path, n_ctx=len(tokens), n_batch=len(tokens), n_ubatch=len(tokens), logits_all=True, n_threads=2,
                            n_threads_batch=2, verbose=False)
    model.eval(tokens)
    return np.array(model.scores[:len(tokens)], dtype=np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    p, q = log_softmax(reference), log_softmax(logits)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--kvern", default="target/release/kvern")
    parser.add_argument("--mlx", action="store_true")
    args = parser.parse_args()
    files = {"q4_1": args.model} | {name: str(args.directory / f"{name}.gguf") for name in ["q4_0", "q8_0", "bf16", "q4_k"]}
    vocabulary = llama_cpp.Llama(args.model, vocab_only=True, verbose=False)
    tokens = vocabulary.tokenize(Path(args.text).read_bytes()[:20 * args.tokens], add_bos=False)[:args.tokens]
    print("| file | kvern KL | llama.cpp KL | largest logit error: kvern | kvern --exact |", "mlx-lm f32 |" if args.mlx else "")
    print("|---|---|---|---|---|", "---|" if args.mlx else "")
    for name, path in files.items():
        reference = float64_logits(path, tokens)
        largest = lambda logits: f"{np.abs(logits - reference).max():.1e}"
        mine, theirs = own(args.kvern, path, tokens), peer(path, tokens)
        exact = own(args.kvern, path, tokens, ["--exact"])
        row = [name, f"{divergence(reference, mine):.1e}", f"{divergence(reference, theirs):.1e}", largest(mine), largest(exact)]
        if args.mlx:
            row.append(largest(float32_logits(path, tokens)))
        print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
