"""SmolLM2's ids by llama.cpp, and logits in float64 over weights that `gguf` decodes.

usage: smollm2.py MODEL.gguf
"""

import sys

import llama_cpp
import numpy as np
from safetensors.numpy import save_file

from common import FIXTURES, write_json
from llama_reference import float64_logits
from tokenizers_ import AWKWARD

OUT = FIXTURES / "smollm2"
TEXT = (
    "A page holds a fixed number of token columns for all layers of one group. When two rows share a page, the first of them to append "
    "copies it; nobody else notices. In 1969, the Apollo 11 mission landed on the Moon, and about 650 million people watched."
)


def main() -> None:
    model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
    texts = AWKWARD + [TEXT]
    ids = {
        kind: [model.tokenize(text.encode(), add_bos=False, special=special) for text in texts]
        for kind, special in [("special", True), ("plain", False)]
    }
    tokens = ids["plain"][-1]
    logits = float64_logits(sys.argv[1], tokens)
    # Some rows and some columns: the fixture stays small.
    rows = sorted({0, 1, 2, 7, 20, 40, len(tokens) - 1})
    columns = sorted({int(i) for i in np.linspace(0, logits.shape[1] - 1, 1500)} | set(np.argmax(logits[rows], -1).tolist()))
    OUT.mkdir(parents=True, exist_ok=True)
    write_json(OUT / "ids.json", {"texts": texts, "ids": ids})
    write_json(OUT / "logits.json", {"tokens": tokens, "rows": rows, "columns": columns,
                                     "argmax": np.argmax(logits[rows], -1).tolist()})
    save_file({"logits": np.ascontiguousarray(logits[rows][:, columns]).astype(np.float32)}, OUT / "logits.bin")


if __name__ == "__main__":
    main()
