"""Prefill and decode of a small model against Hugging Face transformers on the CPU, in one run, with the same number of threads.

    .venv/bin/python tools/compare/transformers_speed.py target/release/kvern MODEL_DIRECTORY [MODEL_DIRECTORY ...] --threads 2

transformers runs in the weights' own type and in float32, and its better number counts; kvern as it comes.
"""

import argparse
import json
import pathlib
import subprocess
import time

import torch
import transformers

PROMPT, GENERATE = 512, 64


def load(path: pathlib.Path, dtype):
    config = json.loads((path / "config.json").read_text())
    if "text_config" not in config:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    # The text part of a multimodal layout.
    from safetensors.torch import load_file

    text = dict(config["text_config"])
    made = transformers.AutoConfig.for_model(text.pop("model_type"), **text)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype).eval()
    weights = load_file(path / "model.safetensors")
    names = {name: name.replace("language_model.", "") for name in weights if not name.startswith("mtp.")}
    missing, unexpected = model.load_state_dict({new: weights[old].to(dtype) for old, new in names.items()}, strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"]), (missing, unexpected)
    model.tie_weights()
    return model


def peer(path: pathlib.Path, dtype, repeat: int) -> tuple[float, float]:
    model = load(path, dtype)
    vocab = model.get_input_embeddings().weight.shape[0]
    prompt = torch.tensor([[(i + 1) * 7919 % vocab for i in range(PROMPT)]])
    prefill, decode = 0.0, 0.0
    with torch.no_grad():
        for _ in range(repeat):
            start = time.perf_counter()
            out = model(prompt, use_cache=True, logits_to_keep=1)
            prefill = max(prefill, PROMPT / (time.perf_counter() - start))
            out = model(prompt[:, :1], use_cache=True)
            start = time.perf_counter()
            for _ in range(GENERATE):
                token = out.logits[:, -1:].argmax(-1)
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
            decode = max(decode, GENERATE / (time.perf_counter() - start))
    return prefill, decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kvern")
    parser.add_argument("models", nargs="+", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| model | | kvern tok/s | transformers tok/s | ratio |\n|---|---|---|---|---|")
    for path in args.models:
        bench = [args.kvern, "bench", "-m", path, "--prompt", PROMPT, "--generate", GENERATE, "--batch", 1, "--depth", 0,
                 "--repeat", args.repeat, "--threads", args.threads, "--json"]
        own = json.loads(subprocess.run([str(x) for x in bench], check=True, capture_output=True).stdout)
        both = [peer(path, dtype, args.repeat) for dtype in (torch.bfloat16, torch.float32)]
        prefill, decode = (max(values) for values in zip(*both))
        for what, mine, theirs in [("prefill 512", own["prefill"][0]["tok_s"], prefill), ("decode 1 row", own["decode"][0]["tok_s"], decode)]:
            print(f"| {path.name} | {what} | {mine:.0f} | {theirs:.0f} | {mine / theirs:.2f} |")


if __name__ == "__main__":
    main()
