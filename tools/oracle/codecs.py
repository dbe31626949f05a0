"""Decodes encoded columns with numpy, from the description of the layout alone, and writes what came out bit by bit.

    python3 tools/oracle/codecs.py tests/fixtures/codecs.json

Columns are random bytes with sound scales, so that every code occurs. Codebooks are computed here too, by another method than Kvern's: Lloyd's iteration
on a fine grid of the density, so that their agreement means something.
"""

import json
import sys

import numpy as np

GROUP = 32
BITS = [2, 3, 4, 5, 6, 8]


def codebook(bits):
    """Integer levels of N(0, 1)."""
    if bits == 8:
        return list(range(-128, 128))
    count = 1 << bits
    grid = np.linspace(-9, 9, 1_800_001)
    weight = np.exp(-grid * grid / 2)
    weight /= weight.sum()
    sums = [np.concatenate([[0], np.cumsum(weight * grid**power)]) for power in range(3)]

    def cells(levels):
        """Mass and moments of what is nearest to each level."""
        borders = np.concatenate([[0], np.searchsorted(grid, (levels[1:] + levels[:-1]) / 2), [len(grid)]])
        return [part[borders[1:]] - part[borders[:-1]] for part in sums]

    levels = np.linspace(-2.5, 2.5, count)
    for _ in range(20000):
        mass, moment, _ = cells(levels)
        new = moment / mass
        moved, levels = np.max(np.abs(new - levels)), new
        if moved < 1e-9:
            break
    levels = (levels - levels[::-1]) / 2

    def error(levels):
        mass, moment, square = cells(levels)
        return float(np.sum(square - 2 * levels * moment + levels**2 * mass))

    steps = levels[-1] / 127 * (1 + np.arange(2000) * 1e-3)
    rounded = [np.sign(levels) * np.floor(np.abs(levels) / step + 0.5) for step in steps]
    sound = [(error(x * step), x) for x, step in zip(rounded, steps) if np.all(np.diff(x) > 0)]
    return [int(level) for level in min(sound, key=lambda pair: pair[0])[1]]


def sign(index):
    """The highest bit of SplitMix64, seeded with the index."""
    mask = (1 << 64) - 1
    z = (index + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return np.float32(1 if (z ^ z >> 31) >> 63 == 0 else -1)


def rotate_back(x):
    x = x.copy()
    size = len(x) & -len(x)
    for block in x.reshape(-1, size):
        half = 1
        while half < size:
            pairs = block.reshape(-1, 2, half)
            low, high = pairs[:, 0].copy(), pairs[:, 1].copy()
            pairs[:, 0], pairs[:, 1] = low + high, low - high
            half *= 2
        block *= np.float32(1) / np.sqrt(np.float32(size))
    return x * np.array([sign(i) for i in range(len(x))], np.float32)


def decode(data, dim, bits, affine, rotated, levels):
    stream = np.unpackbits(np.frombuffer(data[: dim * bits // 8], np.uint8), bitorder="little").reshape(dim, bits)
    codes = (stream.astype(np.int64) << np.arange(bits)).sum(1)
    halves = np.frombuffer(data[dim * bits // 8 :], np.float16).astype(np.float32)
    if affine:
        groups = -(-dim // GROUP)
        scale, zero = (np.repeat(part, GROUP)[:dim] for part in (halves[:groups], halves[groups:]))
        values = scale * codes.astype(np.float32) + zero
    else:
        values = halves[0] * np.array(levels, np.float32)[codes]
    return rotate_back(values) if rotated else values


def main():
    random = np.random.default_rng(5)
    books = {bits: codebook(bits) for bits in BITS}
    cases = []
    for method, bits, dim in [(m, b, d) for m in ("q", "turbo") for b in BITS for d in (64, 80)]:
        affine = method == "q"
        if affine and bits not in (4, 8):
            continue
        for rotated in (False, True):
            name = f"{method}{bits}" + ("" if rotated != affine else "-rotated" if rotated else "-unrotated")
            scales = -(-dim // GROUP) if affine else 1
            halves = [random.uniform(0.001, 0.5, scales)] + ([random.uniform(-4, 4, scales)] if affine else [])
            data = random.integers(0, 256, dim * bits // 8, np.uint8).tobytes()
            data += np.concatenate(halves).astype(np.float16).tobytes()
            values = decode(data, dim, bits, affine, rotated, books[bits])
            cases.append({"codec": name, "bytes": data.hex(), "values": values.astype("<f4").tobytes().hex()})
    report = {"levels": {str(bits): book for bits, book in books.items() if bits < 8}, "cases": cases}
    with open(sys.argv[1], "w") as file:
        json.dump(report, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
