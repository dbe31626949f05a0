"""Other formats of the same weights, written by llama.cpp: BF16 (decoded), and Q4_0, Q8_0 and Q4_K_M of that.

usage: formats.py MODEL.gguf DIRECTORY
"""

import ctypes
import sys
from pathlib import Path

import llama_cpp

FORMATS = [
    ("bf16", llama_cpp.LLAMA_FTYPE_MOSTLY_BF16), ("q4_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0),
    ("q8_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0), ("q4_k", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M),
]


def main() -> None:
    source, directory = sys.argv[1], Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    for name, ftype in FORMATS:
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype, parameters.allow_requantize = ftype, True
        target = directory / f"{name}.gguf"
        if llama_cpp.llama_model_quantize(source.encode(), str(target).encode(), ctypes.byref(parameters)) != 0:
            sys.exit(f"could not write {target}")
        source = str(directory / "bf16.gguf")


if __name__ == "__main__":
    main()
