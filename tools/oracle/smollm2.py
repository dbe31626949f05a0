"""SmolLM2's ids by llama.cpp, and logits by mlx-lm in float32 over weights that `gguf` decodes.

usage: smollm2.py MODEL.gguf
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from safetensors.numpy import save_file

from common import FIXTURES, write_json
from tokenizers_ import AWKWARD

OUT = FIXTURES / "smollm2"
TEXT = (
    "A page holds a fixed number of token columns for all layers of one group. When two rows share a page, the first of them to append "
    "copies it; nobody else notices. In 1969, the Apollo 11 mission landed on the Moon, and about 650 million people watched."
)


def decode_to_directory(path: str, directory: Path) -> None:
    """Writes a llama GGUF file as a float32 checkpoint in the hub's layout."""
    reader = gguf.GGUFReader(path)
    field = lambda key: reader.fields[f"llama.{key}"].contents()
    heads, kv = field("attention.head_count"), field("attention.head_count_kv")
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }
    tensors = {}
    for tensor in reader.tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        base = tensor.name.removesuffix(".weight")
        if base.startswith("blk."):
            _, index, part = base.split(".")
            if part in ("attn_q", "attn_k"):
                count = heads if part == "attn_q" else kv
                value = value.reshape(count, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
            base = f"model.layers.{index}.{names[part]}"
        else:
            base = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[base]
        tensors[f"{base}.weight"] = np.ascontiguousarray(value)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": field("embedding_length"), "num_hidden_layers": field("block_count"),
        "intermediate_size": field("feed_forward_length"), "num_attention_heads": heads, "num_key_value_heads": kv,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"), "vocab_size": field("vocab_size"),
        "rope_theta": field("rope.freq_base"), "max_position_embeddings": field("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }))


def read_config(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def float32_logits(path: str, tokens: list) -> np.ndarray:
    """Logits [tokens, vocabulary] of a GGUF file, computed in float32."""
    with tempfile.TemporaryDirectory() as directory:
        decode_to_directory(path, Path(directory))
        model, _ = load_model(Path(directory))
        model.set_dtype(mx.float32)
        logits = model(mx.array([tokens]))[0]
        mx.eval(logits)
        return np.array(logits)


def main() -> None:
    model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
    texts = AWKWARD + [TEXT]
    ids = {
        kind: [model.tokenize(text.encode(), add_bos=False, special=special) for text in texts]
        for kind, special in [("special", True), ("plain", False)]
    }
    tokens = ids["plain"][-1]
    logits = float32_logits(sys.argv[1], tokens)
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
