"""Small random models as GGUF files, with logits and greedy tokens by Hugging Face transformers in float32, and a check by llama.cpp.

Tensors are named by the `gguf` package's own map from the hub's names. What the format changes besides is written down in `converted`. llama.cpp runs each file;
its largest difference goes to `goldens.json`, and is that of its half-precision products.
"""

import json
import subprocess
import sys
import tempfile

import gguf
import numpy as np
import torch
from safetensors.numpy import save_file

from common import write_json
from hub_models import BASE, CASES, LENGTHS, OUT, build, hub_tensors, randomize

# The GGUF architecture of a case of `hub_models`, with changes that keep files small.
FILES = {
    "gguf-gemma4": ("gemma4", "gemma4", {}),
    "gguf-gemma4-moe": ("gemma4-moe", "gemma4", {}),
    "gguf-qwen35moe": ("qwen3_5_moe", "qwen35moe", {}),
    "gguf-glm-dsa": ("glm_moe_dsa", "glm-dsa", {"num_hidden_layers": 2}),
    "gguf-glm-dsa-shared": ("glm_moe_dsa-shared", "glm-dsa", {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}),
    "gguf-gpt-oss": ("gpt_oss", "gpt-oss", {}),
}


def tiled(array: np.ndarray, config: dict, run: int, axis: int = 0, first: int = 0) -> np.ndarray:
    """Value heads, runs of `run` from `first` on, in the order of first heads of all key heads, second heads, and so on."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = np.arange(values * run).reshape(keys, values // keys, run).swapaxes(0, 1).reshape(-1)
    return np.take(array, np.concatenate([np.arange(first), first + order]), axis)


def converted(name: str, array: np.ndarray, config: dict) -> tuple[str, np.ndarray]:
    """What the format stores for a tensor of Qwen3.5."""
    dim = config["linear_value_head_dim"]
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if name.endswith("A_log"):
        return name, -np.exp(tiled(array, config, 1))
    if name.endswith("dt_bias"):
        return name.replace("dt_bias", "dt_proj.bias"), tiled(array, config, 1)
    if "conv1d" in name:
        return name, tiled(array.squeeze(), config, dim, 0, keys)
    if "in_proj_qkv" in name:
        return name, tiled(array, config, dim, 0, keys)
    if "in_proj_z" in name:
        return name, tiled(array, config, dim)
    if "in_proj_a" in name or "in_proj_b" in name:
        return name, tiled(array, config, 1)
    if "out_proj" in name:
        return name, tiled(array, config, dim, 1)
    if "norm" in name and "linear_attn" not in name:
        return name, array + 1
    return name, array


def stacked(tensors: dict) -> dict:
    """Experts' matrices, which stand apart on the hub, as one tensor for each matrix."""
    out, parts = {}, {}
    for name, array in tensors.items():
        before, _, rest = name.partition(".mlp.experts.")
        if rest[:1].isdigit():
            number, part = rest.split(".", 1)
            parts.setdefault(f"{before}.mlp.experts.{part}", {})[int(number)] = array
        else:
            out[name] = array
    return out | {name: np.stack([experts[i] for i in sorted(experts)]) for name, experts in parts.items()}


def metadata(writer, architecture: str, config: dict) -> None:
    layers = config["num_hidden_layers"]
    put = lambda key, value: writer.add_uint32(f"{architecture}.{key}", value)
    real = lambda key, value: writer.add_float32(f"{architecture}.{key}", value)
    rope = config["rope_parameters"]
    put("block_count", layers)
    put("context_length", config["max_position_embeddings"])
    put("embedding_length", config["hidden_size"])
    put("attention.head_count", config["num_attention_heads"])
    put("vocab_size", config["vocab_size"])
    real("attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_tokenizer_model("none")
    if architecture != "gemma4":
        real("rope.freq_base", rope["rope_theta"])
        put("feed_forward_length", config["intermediate_size"])
    if architecture == "gemma4":
        sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
        full_heads = config.get("num_global_key_value_heads") or config["num_key_value_heads"]
        real("rope.freq_base", rope["full_attention"]["rope_theta"])
        real("rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        shared = config.get("num_kv_shared_layers", 0)
        wide = [2 if config.get("use_double_wide_mlp") and layer >= layers - shared else 1 for layer in range(layers)]
        writer.add_array("gemma4.feed_forward_length", [config["intermediate_size"] * factor for factor in wide])
        writer.add_array("gemma4.attention.head_count_kv", [config["num_key_value_heads"] if kind else full_heads for kind in sliding])
        writer.add_array("gemma4.attention.sliding_window_pattern", sliding)
        put("attention.sliding_window", config["sliding_window"])
        put("attention.shared_kv_layers", shared)
        put("embedding_length_per_layer_input", config["hidden_size_per_layer_input"])
        for part in ("key", "value"):
            put(f"attention.{part}_length", config["global_head_dim"])
            put(f"attention.{part}_length_swa", config["head_dim"])
        put("rope.dimension_count", config["global_head_dim"])
        put("rope.dimension_count_swa", config["head_dim"])
        real("final_logit_softcapping", config["final_logit_softcapping"])
        if config.get("enable_moe_block"):
            put("expert_count", config["num_experts"])
            put("expert_used_count", config["top_k_experts"])
            put("expert_feed_forward_length", config["moe_intermediate_size"])
    elif architecture == "qwen35moe":
        put("attention.head_count_kv", config["num_key_value_heads"])
        put("attention.key_length", config["head_dim"])
        put("attention.value_length", config["head_dim"])
        put("rope.dimension_count", int(config["head_dim"] * rope["partial_rotary_factor"]))
        writer.add_array("qwen35moe.rope.dimension_sections", [*rope["mrope_section"], 0])
        put("full_attention_interval", config["full_attention_interval"])
        put("ssm.conv_kernel", config["linear_conv_kernel_dim"])
        put("ssm.state_size", config["linear_key_head_dim"])
        put("ssm.group_count", config["linear_num_key_heads"])
        put("ssm.time_step_rank", config["linear_num_value_heads"])
        put("ssm.inner_size", config["linear_num_value_heads"] * config["linear_value_head_dim"])
        put("expert_count", config["num_experts"])
        put("expert_used_count", config["num_experts_per_tok"])
        put("expert_feed_forward_length", config["moe_intermediate_size"])
        put("expert_shared_feed_forward_length", config["shared_expert_intermediate_size"])
    elif architecture == "glm-dsa":
        latent, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
        put("attention.head_count_kv", 1)
        put("attention.q_lora_rank", config["q_lora_rank"])
        put("attention.kv_lora_rank", latent)
        put("attention.key_length", latent + turned)
        put("attention.value_length", latent)
        put("attention.key_length_mla", config["qk_nope_head_dim"] + turned)
        put("attention.value_length_mla", config["v_head_dim"])
        put("rope.dimension_count", turned)
        put("leading_dense_block_count", config["first_k_dense_replace"])
        put("expert_count", config["n_routed_experts"])
        put("expert_used_count", config["num_experts_per_tok"])
        put("expert_shared_count", config["n_shared_experts"])
        put("expert_feed_forward_length", config["moe_intermediate_size"])
        put("expert_group_count", config["n_group"])
        put("expert_group_used_count", config["topk_group"])
        put("expert_gating_func", 2)
        real("expert_weights_scale", config["routed_scaling_factor"])
        writer.add_bool("glm-dsa.expert_weights_norm", config["norm_topk_prob"])
        put("attention.indexer.head_count", config["index_n_heads"])
        put("attention.indexer.key_length", config["index_head_dim"])
        put("attention.indexer.top_k", config["index_topk"])
        if "indexer_types" in config:
            writer.add_array("glm-dsa.attention.indexer.types", [kind == "full" for kind in config["indexer_types"]])
    elif architecture == "gpt-oss":
        put("attention.head_count_kv", config["num_key_value_heads"])
        put("attention.key_length", config["head_dim"])
        put("attention.value_length", config["head_dim"])
        put("attention.sliding_window", config["sliding_window"])
        put("expert_count", config["num_local_experts"])
        put("expert_used_count", config["num_experts_per_tok"])
        put("expert_feed_forward_length", config["intermediate_size"])
        writer.add_string("gpt-oss.rope.scaling.type", "yarn")
        real("rope.scaling.factor", rope["factor"])
        put("rope.scaling.original_context_length", rope["original_max_position_embeddings"])
        real("rope.scaling.yarn_beta_fast", rope["beta_fast"])
        real("rope.scaling.yarn_beta_slow", rope["beta_slow"])


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks of a scale and 16 bytes: the first 16 codes in the low nibbles, the others in the high ones."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    whole = np.concatenate([scales[..., None], packed], -1).astype(np.uint8)
    return whole.reshape(*whole.shape[:-2], -1)


def write(name: str, seed: int) -> None:
    case, architecture, changes = FILES[name]
    config = BASE | CASES[case] | changes
    config.pop("num_nextn_predict_layers", None)
    path = OUT / name
    path.mkdir(parents=True, exist_ok=True)
    model = build(config)
    extra = randomize(model, config, seed)
    named = {key.replace("model.language_model.", "model."): tensor.numpy() for key, tensor in hub_tensors(model).items()}
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path / "model.gguf", architecture)
    metadata(writer, architecture, config)

    def add(key: str, array: np.ndarray) -> None:
        base = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert base, key
        # Matrices in float16, which holds them; what has one value for a row in float32.
        matrix = array.ndim > 1 and not key.endswith(".bias") and "conv1d" not in key
        writer.add_tensor(base, np.ascontiguousarray(array.astype(np.float16 if matrix else np.float32)))

    for key, array in stacked(named).items():
        block = key.split(".")[2] if ".layers." in key else ""
        if architecture == "qwen35moe":
            key, array = converted(key, array, config)
        if key.endswith(".router.scale"):
            writer.add_tensor(f"blk.{block}.ffn_gate_inp.scale", array.astype(np.float32))
        elif key.endswith(".router.per_expert_scale"):
            writer.add_tensor(f"blk.{block}.ffn_down_exps.scale", array.astype(np.float32))
        elif key.endswith("kv_b_proj.weight"):
            both = array.reshape(config["num_attention_heads"], -1, array.shape[-1])
            nope = config["qk_nope_head_dim"]
            add(key.replace("kv_b_proj", "k_b_proj"), both[:, :nope].swapaxes(1, 2))
            add(key.replace("kv_b_proj", "v_b_proj"), both[:, nope:])
        elif architecture == "gpt-oss" and ".mlp.experts." in key:
            if key.endswith("down_proj_bias"):
                add(key.replace("_bias", ".bias"), array)
            elif key.endswith("gate_up_proj_bias"):
                add(key.replace("gate_up_proj_bias", "gate_proj.bias"), array[:, ::2])
                add(key.replace("gate_up_proj_bias", "up_proj.bias"), array[:, 1::2])
            else:
                data = mxfp4(extra[f"{key}_blocks"], extra[f"{key}_scales"])
                parts = {"down_proj": data} if key.endswith("down_proj") else {"gate_proj": data[:, ::2], "up_proj": data[:, 1::2]}
                for part, rows in parts.items():
                    base = names.get_name(f"{key.rsplit('.', 1)[0]}.{part}.weight", try_suffixes=(".weight",))
                    writer.add_tensor(base, np.ascontiguousarray(rows), raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            whole = key if key.endswith((".weight", ".bias")) or key.endswith(("A_log",)) else f"{key}.weight"
            add(key.replace("e_score_correction_bias", "e_score_correction.bias") if "e_score" in key else whole, array)
    if architecture == "gemma4":
        half = config["global_head_dim"] // 2
        turning = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * config["global_head_dim"] / 2)
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (half - turning), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def logits(row):
        with torch.no_grad():
            return model(torch.tensor([row]), use_cache=False).logits[0].numpy()

    tensors, tokens = {}, {}
    for length in LENGTHS:
        prompt = [(7 * i * i + 3 * i + 1) % config["vocab_size"] for i in range(length)]
        result, row = logits(prompt), list(prompt)
        for _ in range(16):
            row.append(int(np.argmax(logits(row)[-1])))
        tensors[f"logits.{length}"] = np.ascontiguousarray(result[-32:]).astype(np.float32)
        tokens[str(length)] = {"prompt": prompt, "greedy": row[length:], "llama_cpp": by_llama_cpp(path / "model.gguf", prompt, result)}
    save_file(tensors, path / "goldens.safetensors_")
    (path / "goldens.safetensors_").rename(path / "goldens.bin")
    write_json(path / "goldens.json", tokens)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(name, size, {length: tokens[str(length)]["llama_cpp"] for length in LENGTHS})


CHILD = """
import json, sys
import numpy as np
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=512, logits_all=True, verbose=False, n_threads=2)
prompt = json.load(sys.stdin)
model.eval(prompt)
np.save(sys.argv[2], np.array(model.scores[: len(prompt)]))
"""


def by_llama_cpp(path, prompt, want):
    """llama.cpp's largest difference, or why there is none; in a process of its own, which a failed assertion ends."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as out:
        child = subprocess.run([sys.executable, "-c", CHILD, str(path), out.name], input=json.dumps(prompt), capture_output=True, text=True)
        if child.returncode == 0:
            return float(np.abs(np.load(out.name) - want).max())
        why = [line for line in child.stderr.splitlines() if "ASSERT" in line or "rror" in line]
        return " ".join(why[:1] or child.stderr.splitlines()[-1:])[:160]


if __name__ == "__main__":
    for index, case in enumerate(FILES):
        if not sys.argv[1:] or case in sys.argv[1:]:
            write(case, 100 + index)
