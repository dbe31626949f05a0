//! The shapes of a Gemma 4, and the names of its tensors.

use kvern_weights::gguf::Metadata;
use kvern_weights::{Checkpoint, Source};
use serde_json::{Value, json};

use crate::config::{Fields, Outline, check_multiple};
use crate::experts::Sizes;
use crate::rope::{Rope, Scaling};
use crate::{Error, gguf};

/// Attention of one kind of layer.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    pub(super) dim: usize,
    pub(super) kv_heads: usize,
    pub(super) rope: Rope,
    /// Whether values are the keys before their norm and rotation.
    pub(super) values_are_keys: bool,
}

#[derive(Debug, Clone)]
pub(super) struct Config {
    pub(super) outline: Outline,
    /// Widths of the layers' dense parts.
    pub(super) intermediate: Vec<usize>,
    /// Which layers see a window.
    pub(super) sliding: Vec<bool>,
    pub(super) window: usize,
    /// Of sliding and of full layers.
    pub(super) shapes: [Shape; 2],
    /// The first layer that owns no state.
    pub(super) shared_from: usize,
    /// Values of a layer's own input, and rows of the table that it comes from.
    pub(super) per_layer: Option<usize>,
    pub(super) per_layer_vocab: usize,
    pub(super) experts: Option<Sizes>,
    pub(super) logit_cap: Option<f32>,
}

impl Config {
    pub(super) fn from_json(config: &Value) -> Result<Self, Error> {
        let outer = Fields::new(config, "");
        let fields = outer.object("text_config", "text_config.")?.unwrap_or(outer);
        // The embedding is the head, whatever is said.
        let outline = Outline { tied: Some(true), ..Outline::new(fields, 131_072)? };
        let layers = outline.layers;
        fields.only("hidden_activation", "gelu_pytorch_tanh")?;
        if fields.flag("attention_bias")? == Some(true) {
            return Err(fields.wrong("attention_bias", "false"));
        }
        fields.only("use_bidirectional_attention", "vision")?;
        let kinds = ["sliding_attention", "full_attention"];
        let sliding = fields.layer_types(layers, kinds, "sliding_attention or full_attention")?;
        let mut sliding = sliding.unwrap_or_else(|| (1..=layers).map(|layer| layer % 6 != 0).collect());
        // The last layer attends everything, whatever is said.
        if let Some(last) = sliding.last_mut() {
            *last = false;
        }
        let shared = fields.index("num_kv_shared_layers")?.unwrap_or(0);
        let shared_from = layers.checked_sub(shared).filter(|&from| from > 0);
        let shared_from = shared_from.ok_or_else(|| fields.wrong("num_kv_shared_layers", "fewer than the layers"))?;
        if !sliding[shared_from..].iter().all(|kind| sliding[..shared_from].contains(kind)) {
            return Err(fields.wrong("num_kv_shared_layers", "preceded by a layer of each kind that is shared"));
        }
        let wide = fields.flag("use_double_wide_mlp")?.unwrap_or(false);
        let ffn = fields.needed("intermediate_size")?;
        let intermediate = (0..layers).map(|layer| if wide && layer >= shared_from { 2 * ffn } else { ffn });
        let parameters = fields.object("rope_parameters", "rope_parameters.")?;
        let rope = |kind, dim, theta, scaling: Scaling| -> Result<Rope, Error> {
            let own = parameters.map(|parameters| parameters.object(kind, kind)).transpose()?.flatten();
            match own {
                Some(own) => Rope::from_parameters(fields, Some(own), dim, outline.context),
                None => Ok(Rope { theta, dims: dim, scaling }),
            }
        };
        let (dim, full_dim) =
            (fields.count("head_dim")?.unwrap_or(256), fields.count("global_head_dim")?.unwrap_or(512));
        let kv_heads = outline.kv_heads(fields)?;
        let values_are_keys = fields.flag("attention_k_eq_v")?.unwrap_or(false);
        let full_kv_heads = fields.count("num_global_key_value_heads")?.filter(|_| values_are_keys).unwrap_or(kv_heads);
        let expected = "a multiple of num_global_key_value_heads";
        check_multiple("num_attention_heads", outline.heads, expected, full_kv_heads)?;
        let sliding_rope = rope("sliding_attention", dim, 1e4, Scaling::None)?;
        let scaling = Scaling::Proportional { pairs: full_dim / 8, factor: 1.0 };
        let full_rope = rope("full_attention", full_dim, 1e6, scaling)?;
        let experts = match fields.flag("enable_moe_block")? {
            Some(true) => Some(Sizes {
                experts: fields.needed("num_experts")?,
                picks: fields.needed("top_k_experts")?,
                hidden: outline.hidden,
                intermediate: fields.needed("moe_intermediate_size")?,
            }),
            _ => None,
        };
        if experts.is_some_and(|sizes| sizes.picks > sizes.experts) {
            return Err(fields.wrong("top_k_experts", "at most num_experts"));
        }
        let per_layer = fields.index("hidden_size_per_layer_input")?.unwrap_or(256);
        Ok(Self {
            intermediate: intermediate.collect(),
            sliding,
            window: fields.count("sliding_window")?.unwrap_or(512),
            shapes: [
                Shape { dim, kv_heads, rope: sliding_rope, values_are_keys: false },
                Shape { dim: full_dim, kv_heads: full_kv_heads, rope: full_rope, values_are_keys },
            ],
            shared_from,
            per_layer: (per_layer > 0).then_some(per_layer),
            per_layer_vocab: fields.count("vocab_size_per_layer_input")?.unwrap_or(outline.vocab),
            experts,
            logit_cap: fields.positive("final_logit_softcapping")?.map(|cap| cap as f32),
            outline,
        })
    }

    pub(super) fn from_gguf(metadata: &Metadata, checkpoint: &mut Checkpoint) -> Result<Self, Error> {
        let name = "gemma4";
        let int = |key: &str| metadata.int(&format!("{name}.{key}"));
        let float = |key: &str| metadata.float(&format!("{name}.{key}"));
        let mut config = gguf::config(name, metadata)?;
        let layers = int("block_count")?.and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
        let wrong = |field: &str, expected, found: String| Error::Config { field: field.into(), expected, found };
        let pattern = metadata.bools("gemma4.attention.sliding_window_pattern")?.unwrap_or(&[]);
        if pattern.len() != layers || layers == 0 {
            let found = format!("{} of them for {layers} layers", pattern.len());
            return Err(wrong("gemma4.attention.sliding_window_pattern", "a kind for each layer", found));
        }
        let kind = |&sliding: &bool| if sliding { "sliding_attention" } else { "full_attention" };
        config["layer_types"] = json!(pattern.iter().map(kind).collect::<Vec<_>>());
        let of_kind = |all: &Option<Vec<i64>>, sliding| {
            let at = pattern.iter().position(|&kind| kind == sliding);
            all.as_ref().zip(at).map(|(all, at)| all[at])
        };
        let kv_heads = gguf::ints(name, metadata, "attention.head_count_kv", layers)?;
        config["num_key_value_heads"] = json!(of_kind(&kv_heads, true).or(of_kind(&kv_heads, false)));
        config["num_global_key_value_heads"] = json!(of_kind(&kv_heads, false));
        config["head_dim"] = json!(int("attention.key_length_swa")?);
        config["global_head_dim"] = json!(int("attention.key_length")?);
        config["num_kv_shared_layers"] = json!(int("attention.shared_kv_layers")?);
        config["hidden_size_per_layer_input"] = json!(int("embedding_length_per_layer_input")?.unwrap_or(0));
        config["sliding_window"] = json!(int("attention.sliding_window")?);
        config["final_logit_softcapping"] = json!(float("final_logit_softcapping")?);
        config["enable_moe_block"] = json!(int("expert_count")?.is_some_and(|count| count > 0));
        config["num_experts"] = json!(int("expert_count")?.filter(|&count| count > 0));
        config["top_k_experts"] = json!(int("expert_used_count")?.filter(|&count| count > 0));
        config["moe_intermediate_size"] = json!(int("expert_feed_forward_length")?);
        // A full layer without a matrix for values takes its keys for them.
        let full = pattern.iter().position(|sliding| !sliding).unwrap_or(0);
        config["attention_k_eq_v"] = json!(!checkpoint.has(&format!("blk.{full}.attn_v.weight")));
        let theta = float("rope.freq_base_swa")?.unwrap_or(1e4);
        config["rope_parameters"] = json!({
            "sliding_attention": { "rope_type": "default", "rope_theta": theta },
            "full_attention": { "rope_type": "default", "rope_theta": float("rope.freq_base")?.unwrap_or(1e6) },
        });
        let mut config = Self::from_json(&config)?;
        if let Some(widths) = gguf::ints(name, metadata, "feed_forward_length", layers)? {
            config.intermediate = widths.into_iter().map(|width| usize::try_from(width).unwrap_or(0)).collect();
        }
        // Pairs that do not turn have a divisor beyond all positions.
        let rope = &mut config.shapes[1].rope;
        let divisors = checkpoint.take("rope_freqs.weight", &[rope.dims / 2])?.to_vec();
        let pairs = divisors.iter().position(|&divisor| divisor != 1.0).unwrap_or(divisors.len());
        if divisors[pairs..].iter().any(|&divisor| divisor < 1e20) {
            return Err(wrong("rope_freqs.weight", "1 for the pairs that turn, then 1e30", format!("{divisors:?}")));
        }
        rope.scaling = Scaling::Proportional { pairs, factor: 1.0 };
        Ok(config)
    }

    /// The layer whose state a layer attends: its own, or the last of its kind that owns some.
    pub(super) fn owner(&self, index: usize) -> usize {
        let owns = |&other: &usize| other == index || self.sliding[other] == self.sliding[index];
        // There is one, or the configuration was refused.
        (0..self.shared_from.min(index + 1)).rev().find(owns).unwrap_or(0)
    }
}

/// Brings a checkpoint's names to those of the graph, and leaves out what is not the text model's.
pub(super) fn rename(checkpoint: &mut Checkpoint) -> Result<(), Error> {
    const PARTS: [(&str, &str); 16] = [
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
        ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
        ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
        ("inp_gate", "per_layer_input_gate"),
        ("proj", "per_layer_projection"),
        ("post_norm", "post_per_layer_input_norm"),
        ("ffn_gate_inp", "router.proj"),
        ("ffn_gate_inp.scale", "router.scale"),
        ("ffn_down_exps.scale", "router.per_expert_scale"),
        ("ffn_gate_up_exps", "experts.gate_up_proj"),
        ("ffn_gate_exps", "switch_mlp.gate_proj"),
        ("ffn_up_exps", "switch_mlp.up_proj"),
        ("ffn_down_exps", "switch_mlp.down_proj"),
    ];
    let is_gguf = matches!(checkpoint.source(), Source::Gguf(_));
    checkpoint.rename(|name| {
        if !is_gguf {
            return name.replacen("model.language_model.", "model.", 1).replacen("language_model.model.", "model.", 1);
        }
        let name = match name {
            "per_layer_token_embd.weight" => "model.embed_tokens_per_layer.weight".into(),
            "per_layer_model_proj.weight" => "model.per_layer_model_projection.weight".into(),
            "per_layer_proj_norm.weight" => "model.per_layer_projection_norm.weight".into(),
            name => gguf::tensor(name, &PARTS),
        };
        // Names that are no matrix of a layer have no kind on the hub.
        let name = name.replace("layer_output_scale.weight", "layer_scalar");
        name.replace("experts.gate_up_proj.weight", "experts.gate_up_proj")
    })?;
    let others = ["vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "multi_modal_projector."];
    let is_other = |name: &&str| others.iter().any(|other| name.trim_start_matches("model.").starts_with(other));
    let left_out: Vec<String> = checkpoint.names().filter(is_other).map(String::from).collect();
    left_out.iter().for_each(|name| checkpoint.ignore(name));
    Ok(())
}
