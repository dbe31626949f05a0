"""Small random checkpoints in the hub's layout, with logits, greedy tokens and draft heads by Hugging Face transformers in float32.

transformers builds each model from its configuration and writes it in the hub's layout; weights are rounded to float16 first, which float32 holds
exactly. Where mlx-lm knows a model, it runs the same files in float32, and the largest difference goes to `goldens.json`.
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from common import FIXTURES, write_json

OUT = FIXTURES / "models"
LENGTHS = [24, 200]
BASE = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 96, "max_position_embeddings": 512,
}
GEMMA4 = {
    "model_type": "gemma4_text", "rms_norm_eps": 1e-6, "sliding_window": 37, "global_head_dim": 32, "final_logit_softcapping": 6.0,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "vocab_size_per_layer_input": 96,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
    },
}
DELTA = {
    "full_attention_interval": 4, "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32,
}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}
INDEX = {"index_n_heads": 8, "index_head_dim": 32, "index_topk": 12}
CASES = {
    # Layers 3 and 4 attend the state of layers 0 and 2 and are twice as wide.
    "gemma4": GEMMA4 | {
        "num_hidden_layers": 5, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16,
    },
    "gemma4-moe": GEMMA4 | {
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 16,
    },
    "qwen3_5_moe": DELTA | {
        "model_type": "qwen3_5_moe_text", "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
    },
    # One layer is dense.
    "qwen3_next": DELTA | {
        "model_type": "qwen3_next", "tie_word_embeddings": False, "mlp_only_layers": [1], "decoder_sparse_step": 1, "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    },
    "glm_moe_dsa": LATENT | INDEX | {
        "model_type": "glm_moe_dsa", "num_nextn_predict_layers": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    # Two layers attend what an earlier indexer picked.
    "glm_moe_dsa-shared": LATENT | INDEX | {
        "model_type": "glm_moe_dsa", "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    # Experts in groups, and an indexer that rotates half-split pairs.
    "deepseek_v32": LATENT | INDEX | {
        "model_type": "deepseek_v32", "n_group": 4, "topk_group": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "deepseek_v3": LATENT | {
        "model_type": "deepseek_v3", "n_group": 2, "topk_group": 1,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
            "beta_fast": 32.0, "beta_slow": 1.0,
        },
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "num_local_experts": 6, "num_experts_per_tok": 2,
        "sliding_window": 37, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False,
        },
    },
}
# Named otherwise on the hub than in the model's own configuration.
HUB_TYPES = {"gemma4_text": "gemma4", "qwen3_5_moe_text": "qwen3_5_moe"}
# Norms of these multiply by 1 + weight.
ZERO_CENTRED = ("qwen3_5_moe_text", "qwen3_next")
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def build(config: dict):
    model_type = config["model_type"]
    made = AutoConfig.for_model(model_type, **{key: value for key, value in config.items() if key != "model_type"})
    # The plain implementation of attention, whose mask has windows and picks in it.
    made._attn_implementation = "eager"
    made._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager").eval()


def value(name: str, shape, config: dict, random) -> np.ndarray:
    """A random value for a parameter, of a size that keeps activations near 1 and reaches caps and limits."""
    last = name.split(".")[-1]
    if last == "A_log":
        return np.log(random.uniform(0.002, 1, shape))
    if last == "layer_scalar":
        return random.uniform(0.6, 1.2, shape)
    if "norm" in name and last == "weight":
        centred = config["model_type"] in ZERO_CENTRED and "linear_attn.norm" not in name
        return random.normal(0, 0.2, shape) + (not centred)
    if last in ("scale", "per_expert_scale"):
        return 1 + random.normal(0, 0.2, shape)
    if last == "e_score_correction_bias":
        return random.normal(0, 0.3, shape)
    if "conv1d" in name or last in ("bias", "dt_bias", "gate_up_proj_bias", "down_proj_bias"):
        return random.normal(0, 0.5, shape)
    if last == "sinks":
        return random.normal(0, 2, shape)
    scale = 3 if "embed_tokens" in name else 1
    return random.normal(0, 1.6 * scale / np.sqrt(shape[-1]), shape)


def randomize(model, config: dict, seed: int) -> dict:
    """Gives every parameter a random value that float16 holds, and tells what a file must have beside transformers' own layout."""
    random, extra = np.random.default_rng(seed), {}
    with torch.no_grad():
        named = dict(model.named_parameters()) | {
            name: buffer for name, buffer in model.named_buffers() if name.endswith(("layer_scalar", "e_score_correction_bias"))
        }
        for name, parameter in named.items():
            if config["model_type"] == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj")):
                # [experts, inputs, outputs] here; rows of outputs, in blocks of 32 inputs, on the hub.
                experts, inputs, outputs = parameter.shape
                blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
                scales = random.integers(122, 126, (experts, outputs, inputs // 32), np.uint8)
                pairs = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], -1).reshape(experts, outputs, inputs // 32, 32)
                values = (pairs * np.exp2(scales.astype(np.float32) - 127)[..., None]).reshape(experts, outputs, inputs)
                parameter.copy_(torch.from_numpy(values).transpose(1, 2))
                extra |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
                continue
            rounded = value(name, tuple(parameter.shape), config, random).astype(np.float16)
            parameter.copy_(torch.from_numpy(rounded.astype(np.float32)))
    return extra


def head_layer(config: dict):
    """A trunk of one layer, like that of a draft head."""
    changes = {"num_hidden_layers": 1}
    if config["model_type"] == "glm_moe_dsa":
        changes |= {"mlp_layer_types": ["sparse"], "indexer_types": ["full"], "first_k_dense_replace": 0}
    else:
        changes |= {"full_attention_interval": 1, "layer_types": ["full_attention"]}
    return build(config | changes)


def hub_tensors(model) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        files = sorted(Path(directory).glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


def draft_head(config: dict, seed: int):
    """A random draft head: its layer as a model of its own, the rest by name, and all in the hub's layout."""
    if config["model_type"] == "qwen3_5_moe_text":
        names = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight")
        layer_name, norm_name = "mtp.layers.0.", "mtp.norm.weight"
    elif config["model_type"] == "glm_moe_dsa" and config.get("num_nextn_predict_layers"):
        prefix = f"model.layers.{config['num_hidden_layers']}."
        names = tuple(f"{prefix}{part}.weight" for part in ("enorm", "hnorm", "eh_proj"))
        layer_name, norm_name = prefix, f"{prefix}shared_head.norm.weight"
    else:
        return None
    random, hidden = np.random.default_rng(seed + 1000), config["hidden_size"]
    layer = head_layer(config)
    randomize(layer, config, seed + 2000)
    shapes = [(hidden,), (hidden,), (hidden, 2 * hidden)]
    own = {
        name: torch.from_numpy(value(f"norm.{name}" if len(shape) == 1 else name, shape, config, random).astype(np.float16).astype(np.float32))
        for name, shape in zip(names, shapes)
    }
    tensors = {
        name.replace("model.language_model.", "model.").replace("model.layers.0.", layer_name): tensor
        for name, tensor in hub_tensors(layer).items() if ".layers.0." in name
    }
    return layer, [own[name] for name in names], own | tensors | {norm_name: layer.model.norm.weight.detach()}


def draft_goldens(head, model, config: dict, tensors: dict, tokens: dict) -> None:
    """What a head makes of each position of a prompt, and three guesses in a row after it."""
    layer, (embed_norm, hidden_norm, fc), _ = head
    offset = 1.0 if config["model_type"] in ZERO_CENTRED else 0.0

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * (offset + weight)

    def run(row, hidden):
        embedded = model.model.embed_tokens(torch.tensor([row]))
        joined = torch.cat([norm(embedded, embed_norm), norm(hidden, hidden_norm)], -1)
        out = layer.model(inputs_embeds=joined @ fc.T, use_cache=False).last_hidden_state
        return out, model.lm_head(out)

    with torch.no_grad():
        for length in LENGTHS:
            prompt = tokens[str(length)]["prompt"]
            result = model.model(torch.tensor([prompt]), use_cache=False).last_hidden_state
            _, logits = run(prompt[1:], result[:, :-1])
            tensors[f"draft.{length}"] = np.ascontiguousarray(logits[0, -32:].numpy())
            row, hidden, guesses = prompt[1:] + tokens[str(length)]["greedy"][:1], result, []
            for _ in range(3):
                out, logits = run(row, hidden)
                guesses.append(int(logits[0, -1].argmax()))
                row, hidden = row + guesses[-1:], torch.cat([hidden, out[:, -1:]], 1)
            tokens[str(length)]["guesses"] = guesses


def by_mlx(path: Path, config: dict):
    """mlx-lm's logits of the files in float32, or why there are none."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    # Fields of older configurations, without which it takes its own defaults or fails.
    rope = config.get("rope_parameters", {})
    older = {"moe_layer_freq": 1, "attention_bias": config["model_type"] == "gpt_oss"}
    if "rope_theta" in rope:
        older |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0)}
    if rope.get("rope_type") == "yarn":
        older["rope_scaling"] = rope
    # It adds 1 to norms in their own type, which rounds float16, and wants Qwen3.5's gate and up in one tensor.
    files = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in load_file(path / "model.safetensors").items()}
    if config["model_type"] == "qwen3_5_moe_text":
        files = fused({name: tensor for name, tensor in files.items() if not name.startswith("mtp.")})
    with tempfile.TemporaryDirectory() as directory:
        save_file({name: tensor.numpy() for name, tensor in files.items()}, Path(directory) / "model.safetensors")
        (Path(directory) / "config.json").write_text((path / "config.json").read_text())
        try:
            model, _ = load_model(Path(directory), model_config=older)
            model.set_dtype(mx.float32)
            mx.eval(model.parameters())
            return lambda row: np.array(model(mx.array([row])))[0]
        except Exception as error:  # Whatever it cannot load.
            return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def fused(tensors: dict) -> dict:
    """Experts' matrices as two tensors for each layer."""
    out, parts = {}, {}
    for name, tensor in tensors.items():
        before, found, rest = name.partition(".experts.")
        if found:
            number, part, _ = rest.split(".")
            parts.setdefault(before, {})[int(number), part] = tensor
        else:
            out[name] = tensor
    for before, experts in parts.items():
        numbers = sorted({number for number, _ in experts})
        out[f"{before}.experts.gate_up_proj"] = torch.stack([torch.cat([experts[i, "gate_proj"], experts[i, "up_proj"]]) for i in numbers])
        out[f"{before}.experts.down_proj"] = torch.stack([experts[i, "down_proj"] for i in numbers])
    return out


def write(name: str, seed: int) -> None:
    config = BASE | CASES[name]
    path = OUT / name
    path.mkdir(parents=True, exist_ok=True)
    model = build(config)
    extra = randomize(model, config, seed)
    head = draft_head(config, seed)
    hub = hub_tensors(model) | (head[2] if head else {})
    files = {}
    for key, tensor in hub.items():
        if config["model_type"] == "gpt_oss" and key.endswith(("gate_up_proj", "down_proj")):
            continue
        if config["model_type"] in HUB_TYPES and key.startswith("model.") and not key.startswith("model.language_model."):
            key = key.replace("model.", "model.language_model.", 1)
        # Some values are not float16's: those that transformers rounded or computed by itself.
        half = tensor.numpy().astype(np.float16)
        files[key] = half if np.array_equal(half.astype(np.float32), tensor.numpy()) else tensor.numpy()
    files |= extra
    save_file({key: np.ascontiguousarray(tensor) for key, tensor in files.items()}, path / "model.safetensors")
    hub_type = HUB_TYPES.get(config["model_type"])
    if hub_type:
        # Some loaders look for the vocabulary beside the text model.
        write_json(path / "config.json", {"model_type": hub_type, "vocab_size": config["vocab_size"], "text_config": config,
                                          "tie_word_embeddings": config["tie_word_embeddings"]})
    elif config["model_type"] == "gpt_oss":
        write_json(path / "config.json", config | {"quantization_config": {"quant_method": "mxfp4"}})
    else:
        write_json(path / "config.json", config)

    def logits(row):
        with torch.no_grad():
            return model(torch.tensor([row]), use_cache=False).logits[0].numpy()

    tensors, tokens, second = {}, {}, by_mlx(path, config)
    for length in LENGTHS:
        prompt = [(7 * i * i + 3 * i + 1) % config["vocab_size"] for i in range(length)]
        result = logits(prompt)
        row, gap = list(prompt), np.inf
        for _ in range(16):
            last = logits(row)[-1]
            top = np.sort(last)[-2:]
            gap = min(gap, float(top[1] - top[0]))
            row.append(int(np.argmax(last)))
        # All positions of the short prompt, the last ones of the long one.
        tensors[f"logits.{length}"] = np.ascontiguousarray(result[-32:]).astype(np.float32)
        tokens[str(length)] = {"prompt": prompt, "greedy": row[length:], "smallest_greedy_gap": gap, "range": float(np.abs(result).max())}
        if callable(second):
            difference = np.abs(second(prompt) - result)
            worst = difference.max(-1)
            first = int(np.argmax(worst > 1e-3)) if (worst > 1e-3).any() else None
            tokens[str(length)]["mlx_lm"] = {"largest_difference": float(difference.max()), "first_position_off_by_1e-3": first}
        else:
            tokens[str(length)]["mlx_lm"] = second
    if head:
        draft_goldens(head, model, config, tensors, tokens)
    # Not `.safetensors`: a loader takes every such file of a directory for weights.
    save_file(tensors, path / "goldens.safetensors_")
    (path / "goldens.safetensors_").rename(path / "goldens.bin")
    write_json(path / "goldens.json", tokens)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(name, size, {length: (tokens[str(length)]["smallest_greedy_gap"], tokens[str(length)]["range"], tokens[str(length)]["mlx_lm"]) for length in LENGTHS})


if __name__ == "__main__":
    for index, case in enumerate(CASES):
        if not sys.argv[1:] or case in sys.argv[1:]:
            write(case, index)
