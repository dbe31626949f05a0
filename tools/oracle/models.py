"""Small random checkpoints in the hub's layout, with logits and greedy tokens by mlx-lm in float32.

Weights are stored in float16, which float32 holds exactly. mlx-lm reads `rope_theta` and `rope_scaling`; a checkpoint with the newer
`rope_parameters` is run by mlx-lm under the older names. mlx-lm has no windows for these models; Hugging Face transformers computes
those with one, and Qwen3.5.
"""

import json
import sys

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from safetensors.numpy import save_file

from common import FIXTURES, write_json

OUT = FIXTURES / "models"
BASE = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "vocab_size": 96, "max_position_embeddings": 512,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}
CASES = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama-linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-llama3": {
        "model_type": "llama", "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64},
    },
    "llama-yarn": {
        "model_type": "llama", "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "llama-mlx": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 1, "sliding_window": None},
    # mlx-lm takes the head dimension of qwen2 from hidden size and heads.
    "qwen2": {"model_type": "qwen2", "hidden_size": 64, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 4},
    # Shorter than the long prompt, and no multiple of anything.
    "mistral-window": {"model_type": "mistral", "sliding_window": 37},
    # One layer attends all columns, the others a window.
    "qwen2-window": {
        "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "tie_word_embeddings": True,
        "use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1,
    },
    # Caps that random weights reach, and a scale that is not the head dimension's.
    "gemma2": {
        "model_type": "gemma2", "num_hidden_layers": 3, "sliding_window": 37, "query_pre_attn_scalar": 20, "tie_word_embeddings": True,
        "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    },
    # Three delta nets for each full attention; more value than key heads, and dimensions that differ.
    "qwen3_5": {
        "model_type": "qwen3_5", "num_hidden_layers": 4, "full_attention_interval": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
    },
}
LENGTHS = [24, 200]


def weights(config: dict, seed: int) -> dict:
    random = np.random.default_rng(seed)
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim, ffn, vocab = config["head_dim"], config["intermediate_size"], config["vocab_size"]
    out = {}

    def matrix(name, rows, cols, bias=False):
        out[f"{name}.weight"] = random.normal(0, 1.6 / np.sqrt(cols), (rows, cols))
        if bias:
            out[f"{name}.bias"] = random.normal(0, 0.5, rows)

    def norm(name, width):
        # Gemma and Qwen3.5 multiply by 1 + weight.
        out[f"{name}.weight"] = random.normal(0, 0.2, width) + (config["model_type"] not in ("gemma2", "qwen3_5"))

    def attention(name):
        # Qwen3.5 has a gate beside each query.
        matrix(f"{name}.q_proj", heads * dim * (1 + (config["model_type"] == "qwen3_5")), hidden, qkv_bias)
        matrix(f"{name}.k_proj", kv * dim, hidden, qkv_bias)
        matrix(f"{name}.v_proj", kv * dim, hidden, qkv_bias)
        matrix(f"{name}.o_proj", hidden, heads * dim, config.get("attention_bias", False))
        if config["model_type"] in ("qwen3", "qwen3_5"):
            norm(f"{name}.q_norm", dim)
            norm(f"{name}.k_norm", dim)

    def delta_net(name):
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        value_heads, taps = config["linear_num_value_heads"], config["linear_conv_kernel_dim"]
        matrix(f"{name}.in_proj_qkv", 2 * keys + values, hidden)
        matrix(f"{name}.in_proj_z", values, hidden)
        matrix(f"{name}.in_proj_a", value_heads, hidden)
        matrix(f"{name}.in_proj_b", value_heads, hidden)
        matrix(f"{name}.out_proj", hidden, values)
        out[f"{name}.conv1d.weight"] = random.normal(0, 0.5, (2 * keys + values, 1, taps))
        # From states that forget within a few tokens to states that keep hundreds.
        out[f"{name}.A_log"] = np.log(random.uniform(0.002, 1, value_heads))
        out[f"{name}.dt_bias"] = random.normal(0, 0.5, value_heads)
        out[f"{name}.norm.weight"] = 1 + random.normal(0, 0.2, config["linear_value_head_dim"])

    qkv_bias = config.get("attention_bias", False) or config["model_type"] == "qwen2"
    matrix("model.embed_tokens", vocab, hidden)
    out["model.embed_tokens.weight"] *= 3
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        if config["model_type"] == "gemma2":
            norm(f"{layer}.pre_feedforward_layernorm", hidden)
            norm(f"{layer}.post_feedforward_layernorm", hidden)
        if config["model_type"] == "qwen3_5" and (i + 1) % config["full_attention_interval"]:
            delta_net(f"{layer}.linear_attn")
        else:
            attention(f"{layer}.self_attn")
        for name, rows, cols in [("gate_proj", ffn, hidden), ("up_proj", ffn, hidden), ("down_proj", hidden, ffn)]:
            matrix(f"{layer}.mlp.{name}", rows, cols, config.get("mlp_bias", False))
    if config["model_type"] == "qwen3_5":
        matrix("mtp.fc", hidden, 2 * hidden)
        for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"]:
            norm(f"mtp.{name}", hidden)
        attention("mtp.layers.0.self_attn")
        for name, rows, cols in [("gate_proj", ffn, hidden), ("up_proj", ffn, hidden), ("down_proj", hidden, ffn)]:
            matrix(f"mtp.layers.0.mlp.{name}", rows, cols)
        out = {name.replace("model.", "model.language_model.", 1): value for name, value in out.items()}
    return {name: value.astype(np.float16) for name, value in out.items()}


def by_mlx(path, config: dict):
    model, _ = load_model(path, model_config={k: v for k, v in config.items()})
    model.set_dtype(mx.float32)
    return lambda row: np.array(model(mx.array([row])))[0]


def qwen3_5_model(weights: dict, config: dict):
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**{key: value for key, value in config.items() if key != "model_type"})
    config._attn_implementation = "eager"
    model = Qwen3_5ForCausalLM(config).to(torch.float32).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model


def qwen3_5_text(path, config: dict):
    """The text part of a multimodal layout, without the other parts."""
    from safetensors.torch import load_file

    weights = {name.replace("language_model.", ""): value.float() for name, value in load_file(path / "model.safetensors").items()}
    return qwen3_5_model({name: value for name, value in weights.items() if not name.startswith("mtp.")}, config)


def draft_goldens(path, config: dict, tensors: dict, tokens: dict) -> None:
    """What the head of Qwen3.5 makes of each position of a prompt, and three guesses in a row after it. transformers leaves the head out; its layer
    and last norm are those of a trunk of one layer, which transformers runs on the head's inputs."""
    import torch
    from safetensors.torch import load_file

    weights = {name: value.float() for name, value in load_file(path / "model.safetensors").items()}
    head = {name.replace("mtp.", "model."): value for name, value in weights.items() if name.startswith(("mtp.layers.", "mtp.norm."))}
    head["model.embed_tokens.weight"] = weights["model.language_model.embed_tokens.weight"]
    layer = qwen3_5_model(head, config | {"num_hidden_layers": 1, "full_attention_interval": 1, "layer_types": ["full_attention"]})
    trunk = qwen3_5_text(path, config)

    def norm(x, name):
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
        return scaled * (1 + weights[f"mtp.{name}.weight"])

    def run(row, hidden):
        """Outputs for inputs of a token and the hidden state before it."""
        embedded = trunk.model.embed_tokens(torch.tensor([row]))
        joined = torch.cat([norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")], -1)
        out = layer.model(inputs_embeds=joined @ weights["mtp.fc.weight"].T, use_cache=False).last_hidden_state
        return out, out @ head["model.embed_tokens.weight"].T

    with torch.no_grad():
        for length in LENGTHS:
            prompt = tokens[str(length)]["prompt"]
            result = trunk.model(torch.tensor([prompt]), use_cache=False).last_hidden_state
            _, logits = run(prompt[1:], result[:, :-1])
            tensors[f"draft.{length}"] = np.ascontiguousarray(logits[0, -32:].numpy())
            row, hidden = prompt[1:] + tokens[str(length)]["greedy"][:1], result
            guesses = []
            for _ in range(3):
                out, logits = run(row, hidden)
                guesses.append(int(logits[0, -1].argmax()))
                row, hidden = row + guesses[-1:], torch.cat([hidden, out[:, -1:]], 1)
            tokens[str(length)]["guesses"] = guesses


def by_transformers(path, config: dict):
    import torch
    from transformers import AutoModelForCausalLM

    if config["model_type"] == "qwen3_5":
        model = qwen3_5_text(path, config)
    else:
        # The plain implementation of attention, whose mask has the window in it.
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    def logits(row):
        with torch.no_grad():
            return model(torch.tensor([row]), use_cache=False).logits[0].numpy()

    return logits


def goldens(path, config: dict) -> None:
    transformers = config.get("sliding_window") or config["model_type"] == "qwen3_5"
    model = by_transformers(path, config) if transformers else by_mlx(path, config)
    tensors, tokens = {}, {}
    for length in LENGTHS:
        prompt = [(7 * i * i + 3 * i + 1) % config["vocab_size"] for i in range(length)]
        logits = model(prompt)
        row = list(prompt)
        for _ in range(16):
            row.append(int(np.argmax(model(row)[-1])))
        # All positions of the short prompt, the last ones of the long one.
        tensors[f"logits.{length}"] = np.ascontiguousarray(logits[-32:]).astype(np.float32)
        tokens[str(length)] = {"prompt": prompt, "greedy": row[length:]}
    if config["model_type"] == "qwen3_5":
        draft_goldens(path, config, tensors, tokens)
    save_file(tensors, path / "goldens.safetensors_")
    # Not `.safetensors`: a loader takes every such file of a directory for weights.
    (path / "goldens.safetensors_").rename(path / "goldens.bin")
    write_json(path / "goldens.json", tokens)


def quantize(path, config: dict, bits: int) -> None:
    """Rewrites a checkpoint as mlx-lm's converter would, with 4-bit attention and `bits` elsewhere."""
    model, _ = load_model(path)
    model.set_dtype(mx.float32)
    width = lambda name, module: hasattr(module, "to_quantized") and {"group_size": 32, "bits": 4 if "self_attn" in name else bits}
    nn.quantize(model, 32, bits, class_predicate=width)
    overrides = {
        name: {"group_size": 32, "bits": module.bits} for name, module in model.named_modules()
        if hasattr(module, "bits") and module.bits != bits
    }
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    write_json(path / "config.json", config | {"quantization": {"group_size": 32, "bits": bits, **overrides}})


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of Q and K: pairs that rotate together lie side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def to_gguf(path, config: dict, tensors: dict) -> None:
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }
    architecture = config["model_type"]
    gemma = architecture == "gemma2"
    if gemma:
        names |= {
            "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    writer = gguf.GGUFWriter(path / "model.gguf", architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if gemma:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])
    for name, value in tensors.items():
        base, kind = name.rsplit(".", 1)
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(base.split(".")[-1])
        if heads and not gemma:
            value = interleave(value, heads)
        if gemma and "norm" in base:
            value = value.astype(np.float32) + 1
        if base.startswith("model.layers."):
            _, _, index, part = base.split(".", 3)
            base = f"blk.{index}.{names[part]}"
        else:
            base = names[base]
        value = value.astype(np.float32) if value.ndim == 1 else value
        writer.add_tensor(f"{base}.{kind}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Makes all fixtures, or those that are named."""
    for seed, (name, changes) in enumerate(CASES.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        config = BASE | changes
        path = OUT / name
        path.mkdir(parents=True, exist_ok=True)
        tensors = weights(config, seed)
        save_file(tensors, path / "model.safetensors")
        nested = {"model_type": name, "text_config": config | {"model_type": "qwen3_5_text"}}
        write_json(path / "config.json", nested if name == "qwen3_5" else config)
        if name == "llama-mlx":
            write_json(path / "config.json", config)
            quantize(path, config, 6)
            config = json.loads((path / "config.json").read_text())
        goldens(path, config)
        if name in ("llama", "gemma2"):
            to_gguf(path, config, tensors)
        if name == "llama-yarn":
            # The newer layout of the same configuration.
            newer = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
            newer["rope_parameters"] = config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
            write_json(path / "config.json", newer)
    sizes = {p.name: sum(f.stat().st_size for f in p.iterdir()) for p in OUT.iterdir()}
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
