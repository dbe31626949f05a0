"""Writes a Llama checkpoint of random weights, for measuring speed: `random_model.py 1b|8b bf16|q4 FOLDER`.

Weights repeat one block of random numbers; what matters is that they are many and not zeros. `q4` is MLX's affine format, 4 bits in groups of 64.
"""

import json
import os
import struct
import sys

import numpy as np

SHAPES = {
    "1b": dict(hidden_size=2048, num_hidden_layers=16, intermediate_size=8192, head_dim=64, tie_word_embeddings=True),
    "8b": dict(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, head_dim=128, tie_word_embeddings=False),
}
VOCAB = 128256
BLOCK = 1 << 26

shape, form, folder = sys.argv[1:4]
config = dict(
    model_type="llama", vocab_size=VOCAB, num_attention_heads=32, num_key_value_heads=8, rms_norm_eps=1e-5,
    rope_theta=500000.0, max_position_embeddings=131072, **SHAPES[shape],
)
if form == "q4":
    config["quantization"] = dict(group_size=64, bits=4)
os.makedirs(folder, exist_ok=True)
random = np.random.default_rng(0)


def bf16(values):
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


normal = bf16(random.standard_normal(BLOCK // 2, dtype=np.float32) * 0.02)
codes = random.bytes(BLOCK)
scales = bf16(random.uniform(0.002, 0.004, BLOCK // 16))
biases = bf16(random.uniform(-0.04, -0.01, BLOCK // 16))
ones = bf16(np.ones(1 << 16))

tensors = []


def matrix(name, outputs, inputs):
    if form == "q4":
        tensors.append((f"{name}.weight", "U32", [outputs, inputs // 8], outputs * inputs // 2, codes))
        tensors.append((f"{name}.scales", "BF16", [outputs, inputs // 64], outputs * inputs // 32, scales))
        tensors.append((f"{name}.biases", "BF16", [outputs, inputs // 64], outputs * inputs // 32, biases))
    else:
        tensors.append((f"{name}.weight", "BF16", [outputs, inputs], outputs * inputs * 2, normal))


def vector(name, width):
    tensors.append((f"{name}.weight", "BF16", [width], width * 2, ones))


hidden, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
matrix("model.embed_tokens", VOCAB, hidden)
for layer in range(config["num_hidden_layers"]):
    prefix = f"model.layers.{layer}."
    vector(prefix + "input_layernorm", hidden)
    matrix(prefix + "self_attn.q_proj", 32 * dim, hidden)
    matrix(prefix + "self_attn.k_proj", 8 * dim, hidden)
    matrix(prefix + "self_attn.v_proj", 8 * dim, hidden)
    matrix(prefix + "self_attn.o_proj", hidden, 32 * dim)
    vector(prefix + "post_attention_layernorm", hidden)
    matrix(prefix + "mlp.gate_proj", ffn, hidden)
    matrix(prefix + "mlp.up_proj", ffn, hidden)
    matrix(prefix + "mlp.down_proj", hidden, ffn)
vector("model.norm", hidden)
if not config["tie_word_embeddings"]:
    matrix("lm_head", VOCAB, hidden)

header, at = {}, 0
for name, dtype, dims, size, _ in tensors:
    header[name] = dict(dtype=dtype, shape=dims, data_offsets=[at, at + size])
    at += size
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(f"{folder}/model.safetensors", "wb") as file:
    file.write(struct.pack("<Q", len(text)))
    file.write(text)
    for _, _, _, size, source in tensors:
        while size > 0:
            piece = source[:size]
            file.write(piece)
            size -= len(piece)
json.dump(config, open(f"{folder}/config.json", "w"))
# A tokenizer of one word: these weights say nothing anyway.
json.dump(dict(version="1.0", model=dict(type="WordLevel", vocab={"a": 0}, unk_token="a")), open(f"{folder}/tokenizer.json", "w"))
