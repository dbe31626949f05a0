"""What encoded state costs a model: divergence from raw f32 state on the same weights, for presets and for pairs of codecs.

    cargo build --release
    python3 tools/kv/quality.py TEXT OUT.json NAME=MODEL [NAME=MODEL ...] [--limit 4096] [--chunk 512]
    python3 tools/kv/quality.py --report OUT.json docs/kv-quality.svg

The first runs `kvern perplexity --kv PRESET` for every preset and writes the reports; the second prints them as tables and draws the frontier of the first model.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRESETS = "f16 bf16 k8v8 q8 k8v4 k8v3 q4 k5v4 k4v4 k4v3 k4v2".split()
# Beside the presets: what they were chosen from.
PAIRS = [
    f"{keys}/{values}"
    for keys, values in [
        ("q8", "q8"), ("turbo8", "turbo8"), ("q8-rotated", "q4"), ("q8-rotated", "q4-rotated"), ("q8-rotated", "turbo4-unrotated"), ("turbo6", "turbo4"),
        ("q4-rotated", "turbo4"), ("q4", "q4"), ("turbo4-unrotated", "turbo4"),
    ]
]  # fmt: skip


def bits(codec, dim):
    """Bits of a value, scales included."""
    base = codec.split("-")[0]
    if base in ("f32", "f16", "bf16"):
        return 32 if base == "f32" else 16
    if base.startswith("q"):
        return int(base[1:]) + 32 / 32
    return int(base[5:]) + 16 / dim


def measure(args):
    reports = {}
    for name, model in (pair.split("=", 1) for pair in args.models):
        inspected = json.loads(subprocess.run([args.kvern, "inspect", model, "--json"], capture_output=True, check=True).stdout)
        plane = next(group["planes"][0] for group in inspected["groups"] if group["kind"] == "attention")
        reports[name] = {"dim": plane["dim"], "kv": {}}
        for kv in PRESETS + PAIRS:
            command = [args.kvern, "perplexity", "-m", model, "-f", args.text, "--kv", kv, "--json"]
            command += ["--limit", str(args.limit), "--chunk", str(args.chunk)]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                reports[name]["kv"][kv] = {"refused": run.stderr.strip().splitlines()[-1]}
            else:
                reports[name]["kv"][kv] = json.loads(run.stdout)
            print(name, kv, reports[name]["kv"][kv], file=sys.stderr)
    Path(args.out).write_text(json.dumps(reports, indent=1) + "\n")


def presets():
    """The codecs of each preset, as the source has them."""
    found = {name: (name, name) for name in ("f16", "bf16", "f32")}
    for line in (ROOT / "crates/kvern-state/src/codec/preset.rs").read_text().splitlines():
        parts = line.strip().removeprefix("of(").split(", Coding::")
        if line.strip().startswith('of("') and len(parts) == 3:
            codecs = []
            for part in parts[1:]:
                method, number = part.split("(")[0], part.split("(")[1].split(")")[0]
                usual = method == "turbo"
                rotated = usual if "rotated(" not in part else "rotated(true" in part
                codecs.append(f"{'turbo' if usual else 'q'}{number}" + ("" if rotated == usual else "-rotated" if rotated else "-unrotated"))
            found[parts[0].strip('"')] = tuple(codecs)
    return found


def report(path, svg):
    reports, known = json.loads(Path(path).read_text()), presets()
    for name, model in reports.items():
        print(f"\n### {name}, heads of {model['dim']}\n\n| --kv | keys / values | bits per value | KL mean | KL p99 | same best token | perplexity |\n|---|---|---|---|---|---|---|")
        for kv, found in model["kv"].items():
            codecs = known.get(kv) or kv.split("/")
            size = (bits(codecs[0], model["dim"]), bits(codecs[1], model["dim"]))
            if "refused" in found:
                print(f"| `{kv}` | {' / '.join(codecs)} | | {found['refused']} | | | |")
                continue
            print(f"| `{kv}` | {' / '.join(codecs)} | {size[0]:.4g} / {size[1]:.4g} | {found['kl_mean']:.2g} | {found['kl_p99']:.2g} | {100 * found['top1_agreement']:.2f} % | {found['ppl']:.4g} |")
    draw(next(iter(reports.values())), known, svg)


def draw(model, known, path):
    """Bits per value against divergence, on a logarithmic scale."""
    points = []
    for kv, found in model["kv"].items():
        codecs = known.get(kv) or kv.split("/")
        if "kl_mean" in found and codecs[0] not in ("f16", "f32"):
            points.append((kv, sum(bits(codec, model["dim"]) for codec in codecs) / 2, found["kl_mean"]))
    width, height, left, bottom = 900, 520, 70, 50
    lowest = math.floor(math.log10(min(kl for _, _, kl in points)))
    highest = math.ceil(math.log10(max(kl for _, _, kl in points)))
    x = lambda size: left + (size - 3) / (16.5 - 3) * (width - left - 20)
    y = lambda kl: 20 + (highest - math.log10(kl)) / (highest - lowest) * (height - bottom - 20)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">', f'<rect width="{width}" height="{height}" fill="white"/>']
    for power in range(lowest, highest + 1):
        out.append(f'<path d="M{left} {y(10**power):.1f}H{width - 20}" stroke="#ddd"/><text x="{left - 6}" y="{y(10**power) + 4:.1f}" text-anchor="end">1e{power}</text>')
    for size in range(3, 17):
        out.append(f'<text x="{x(size):.1f}" y="{height - bottom + 16}" text-anchor="middle">{size}</text>')
    out.append(f'<text x="{(left + width) / 2}" y="{height - 12}" text-anchor="middle">bits per value of keys and values, scales included</text>')
    out.append(f'<text transform="translate(16 {height / 2}) rotate(-90)" text-anchor="middle">mean divergence from f32 state</text>')
    for kv, size, kl in sorted(points, key=lambda point: point[0] in known):
        preset = kv in known
        out.append(f'<circle cx="{x(size):.1f}" cy="{y(kl):.1f}" r="{5 if preset else 3}" fill="{"#c33" if preset else "#888"}"/>')
        if preset:
            out.append(f'<text x="{x(size) + 8:.1f}" y="{y(kl) - 4:.1f}" fill="#c33">{kv}</text>')
    Path(path).write_text("\n".join(out + ["</svg>"]) + "\n")


def main():
    if sys.argv[1:2] == ["--report"]:
        return report(*sys.argv[2:4])
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("out")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--limit", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--kvern", default=str(ROOT / "target/release/kvern"))
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
