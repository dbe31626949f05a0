//! What GGUF files say, in the words of the hub: their metadata as the JSON that a configuration would be, their tensors' names as a graph's own.

use kvern_weights::gguf::Metadata;
use serde_json::Value;

use crate::Error;

/// The fields that all architectures share.
pub(crate) fn config(name: &str, metadata: &Metadata) -> Result<Value, Error> {
    let int = |key: &str| int(name, metadata, key);
    let float = |key: &str| metadata.float(&format!("{name}.{key}"));
    let vocab = match int("vocab_size")? {
        Some(vocab) => Some(vocab),
        None => metadata.strs("tokenizer.ggml.tokens")?.map(|tokens| tokens.len() as i64),
    };
    // llama.cpp multiplies its attention factor with the one that follows from the stretch.
    let stretch = 1.0 + 0.1 * float("rope.scaling.factor")?.unwrap_or(1.0).max(1.0).ln();
    let attention_factor = float("rope.scaling.attn_factor")?.map(|factor| factor * stretch);
    Ok(serde_json::json!({
        "hidden_size": int("embedding_length")?,
        "num_hidden_layers": int("block_count")?,
        "intermediate_size": int("feed_forward_length")?,
        "num_attention_heads": int("attention.head_count")?,
        "num_key_value_heads": int("attention.head_count_kv")?,
        "head_dim": int("attention.key_length")?,
        "vocab_size": vocab,
        "max_position_embeddings": int("context_length")?,
        "rms_norm_eps": float("attention.layer_norm_rms_epsilon")?,
        "rope_theta": float("rope.freq_base")?,
        "rope_scaling": match metadata.str(&format!("{name}.rope.scaling.type"))? {
            None | Some("none") => Value::Null,
            Some(kind) => serde_json::json!({
                "rope_type": kind,
                "factor": float("rope.scaling.factor")?,
                "original_max_position_embeddings": int("rope.scaling.original_context_length")?,
                "attention_factor": attention_factor,
                "beta_fast": float("rope.scaling.yarn_beta_fast")?,
                "beta_slow": float("rope.scaling.yarn_beta_slow")?,
            }),
        },
    }))
}

/// The graph's name of a tensor; `own` names parts of a layer that mean something else here than in other architectures.
pub(crate) fn tensor(name: &str, own: &[(&str, &str)]) -> String {
    let Some((layer, part)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
        return match name {
            "token_embd.weight" => "model.embed_tokens.weight".into(),
            "output_norm.weight" => "model.norm.weight".into(),
            "output.weight" => "lm_head.weight".into(),
            other => other.into(),
        };
    };
    // A part that is no matrix may have no kind.
    let (base, kind) = match part.rsplit_once('.') {
        Some((base, kind @ ("weight" | "bias"))) => (base, kind),
        _ => (part, ""),
    };
    let own = own.iter().find(|(gguf, _)| *gguf == base).map(|(_, hub)| *hub);
    let base = own.unwrap_or(match base {
        "attn_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        "ffn_gate_inp" => "mlp.gate",
        "ffn_gate_exps" => "mlp.switch_mlp.gate_proj",
        "ffn_up_exps" => "mlp.switch_mlp.up_proj",
        "ffn_down_exps" => "mlp.switch_mlp.down_proj",
        other => other,
    });
    let dot = if kind.is_empty() { "" } else { "." };
    format!("model.layers.{layer}.{base}{dot}{kind}")
}

/// An integer of the architecture `name`, or the first of a list with one for each layer.
fn int(name: &str, metadata: &Metadata, key: &str) -> Result<Option<i64>, Error> {
    let key = format!("{name}.{key}");
    match metadata.get(&key) {
        Some(kvern_weights::gguf::Value::Ints(all)) => Ok(all.first().copied()),
        _ => Ok(metadata.int(&key)?),
    }
}

/// An integer for each of `layers` layers: as many are given, or one for all.
pub(crate) fn ints(name: &str, metadata: &Metadata, key: &str, layers: usize) -> Result<Option<Vec<i64>>, Error> {
    let full = format!("{name}.{key}");
    match metadata.get(&full) {
        Some(kvern_weights::gguf::Value::Ints(all)) if all.len() == layers => Ok(Some(all.clone())),
        Some(kvern_weights::gguf::Value::Ints(all)) => {
            let found = format!("{} of them", all.len());
            Err(Error::Config { field: full, expected: "a number for each layer", found })
        }
        _ => Ok(metadata.int(&full)?.map(|one| vec![one; layers])),
    }
}
