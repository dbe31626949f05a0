"""Logits of a llama GGUF file by independent implementations, over weights that the `gguf` package decodes.

`float64_logits` is the graph in numpy: what float32 implementations are rounded versions of. `float32_logits` is mlx-lm.
"""

import json
import tempfile
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from safetensors.numpy import load_file, save_file


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


def float32_logits(path: str, tokens: list) -> np.ndarray:
    """Logits [tokens, vocabulary] of a GGUF file by mlx-lm in float32."""
    with tempfile.TemporaryDirectory() as directory:
        decode_to_directory(path, Path(directory))
        model, _ = load_model(Path(directory))
        model.set_dtype(mx.float32)
        logits = model(mx.array([tokens]))[0]
        mx.eval(logits)
        return np.array(logits)


def float64_logits(path: str, tokens: list) -> np.ndarray:
    """Logits [tokens, vocabulary] of a GGUF file in float64; only angles are rounded to float32, as every implementation does."""
    with tempfile.TemporaryDirectory() as directory:
        decode_to_directory(path, Path(directory))
        config = json.loads(Path(directory, "config.json").read_text())
        weights = {name: value.astype(np.float64) for name, value in load_file(Path(directory, "model.safetensors")).items()}
    heads, kv, count = config["num_attention_heads"], config["num_key_value_heads"], len(tokens)
    dim = config["hidden_size"] // heads

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight

    frequencies = (config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)
    angles = (np.arange(count, dtype=np.float32)[:, None, None] * frequencies).astype(np.float64)
    cos, sin = np.cos(angles), np.sin(angles)

    def rope(x):
        a, b = np.split(x.reshape(count, -1, dim), 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    embedding = weights["model.embed_tokens.weight"]
    x = embedding[tokens]
    mask = np.triu(np.full((count, count), -np.inf), 1)
    for index in range(config["num_hidden_layers"]):
        w = lambda name: weights[f"model.layers.{index}.{name}.weight"]
        h = norm(x, w("input_layernorm"))
        q, k = rope(h @ w("self_attn.q_proj").T), rope(h @ w("self_attn.k_proj").T)
        v = (h @ w("self_attn.v_proj").T).reshape(count, kv, dim)
        out = np.empty((count, heads, dim))
        for head in range(heads):
            scores = q[:, head] @ k[:, head * kv // heads].T / np.sqrt(dim) + mask
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, head * kv // heads]
        x = x + out.reshape(count, -1) @ w("self_attn.o_proj").T
        h = norm(x, w("post_attention_layernorm"))
        gate = h @ w("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
    return norm(x, weights["model.norm.weight"]) @ weights.get("lm_head.weight", embedding).T
