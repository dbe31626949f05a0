"""The llama graph in numpy, float64: what float32 implementations are rounded versions of.

Only the rotation angles are rounded to float32, as every implementation of these models does.
"""

import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from smollm2 import decode_to_directory, read_config


def logits(path: str, tokens: list) -> np.ndarray:
    """Logits [tokens, vocabulary] of a llama GGUF file."""
    with tempfile.TemporaryDirectory() as directory:
        decode_to_directory(path, Path(directory))
        config = read_config(Path(directory))
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
