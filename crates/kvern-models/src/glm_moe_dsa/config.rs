//! The shapes of a GLM-5 or DeepSeek-V3, and the names of its tensors.

use kvern_backend::{Routing, Score};
use kvern_weights::gguf::Metadata;
use kvern_weights::{Checkpoint, Source};
use serde_json::{Value, json};

use crate::config::{Fields, Outline, check_multiple};
use crate::experts::Sizes;
use crate::rope::Rope;
use crate::{Error, gguf};

/// Latent attention.
#[derive(Debug, Clone, Copy)]
pub(super) struct Latent {
    pub(super) q_rank: usize,
    pub(super) latent: usize,
    /// Values of a head of queries and keys that are not rotated, and that are.
    pub(super) nope: usize,
    pub(super) rope: usize,
    /// Values of a head of the result.
    pub(super) value: usize,
    /// Whether pairs that rotate together lie side by side.
    pub(super) interleaved: bool,
    pub(super) bias: bool,
}

/// A sparse indexer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Index {
    pub(super) heads: usize,
    pub(super) dim: usize,
    /// Columns that a query attends.
    pub(super) picks: usize,
    pub(super) interleaved: bool,
}

/// A layer's experts.
#[derive(Debug, Clone)]
pub(super) struct Moe {
    pub(super) sizes: Sizes,
    pub(super) routing: Routing,
    /// Width of what all tokens share.
    pub(super) shared: Option<usize>,
}

#[derive(Debug, Clone)]
pub(super) struct Config {
    pub(super) outline: Outline,
    /// Of dense layers.
    pub(super) intermediate: usize,
    /// Which layers have experts, and which an indexer of their own.
    pub(super) sparse: Vec<bool>,
    pub(super) own_index: Vec<bool>,
    pub(super) attention: Latent,
    pub(super) index: Option<Index>,
    pub(super) experts: Option<Moe>,
    pub(super) rope: Rope,
    /// Factor on scores.
    pub(super) scale: f32,
}

impl Config {
    pub(super) fn from_json(name: &str, config: &Value) -> Result<Self, Error> {
        let fields = Fields::new(config, "");
        let outline = Outline::new(fields, 131_072)?;
        let layers = outline.layers;
        let dense = fields.index("first_k_dense_replace")?.unwrap_or(3).min(layers);
        if fields.count("moe_layer_freq")?.is_some_and(|every| every != 1) {
            return Err(fields.wrong("moe_layer_freq", "1"));
        }
        let kinds = fields.kinds("mlp_layer_types", layers, ["sparse", "dense"], "sparse or dense")?;
        let sparse = kinds.unwrap_or_else(|| (0..layers).map(|layer| layer >= dense).collect());
        let attention = Latent {
            q_rank: fields.needed("q_lora_rank")?,
            latent: fields.needed("kv_lora_rank")?,
            nope: fields.needed("qk_nope_head_dim")?,
            rope: fields.needed("qk_rope_head_dim")?,
            value: fields.needed("v_head_dim")?,
            interleaved: fields.flag("rope_interleave")?.unwrap_or(true),
            bias: fields.flag("attention_bias")?.unwrap_or(false),
        };
        let index = match name {
            "deepseek_v3" => None,
            _ => Some(Index {
                heads: fields.needed("index_n_heads")?,
                dim: fields.needed("index_head_dim")?,
                picks: fields.needed("index_topk")?,
                interleaved: fields.flag("indexer_rope_interleave")?.unwrap_or(name != "deepseek_v32"),
            }),
        };
        if index.is_some_and(|index| index.dim < attention.rope) {
            return Err(fields.wrong("index_head_dim", "at least qk_rope_head_dim"));
        }
        let own_index = Self::own_index(fields, layers)?;
        if own_index.first() == Some(&false) {
            return Err(fields.wrong("indexer_types", "full for the first layer"));
        }
        let rope = Rope::from_config(fields, attention.rope, outline.context)?;
        let parameters = match fields.object("rope_parameters", "rope_parameters.")? {
            Some(parameters) => Some(parameters),
            None => fields.object("rope_scaling", "rope_scaling.")?,
        };
        let mut scale = ((attention.nope + attention.rope) as f64).sqrt().recip();
        if let Some(parameters) = parameters {
            // The stretch of the rotation also sharpens the scores.
            let (factor, all) = (parameters.float("factor")?, parameters.float("mscale_all_dim")?.unwrap_or(0.0));
            if let Some(factor) = factor.filter(|&factor| factor > 1.0 && all != 0.0) {
                scale *= (0.1 * all * factor.ln() + 1.0).powi(2);
            }
        }
        let experts = if sparse.contains(&true) { Some(Self::experts(fields, outline.hidden)?) } else { None };
        let intermediate = if sparse.contains(&false) { fields.needed("intermediate_size")? } else { 0 };
        let scale = scale as f32;
        Ok(Self { outline, intermediate, sparse, own_index, attention, index, experts, rope, scale })
    }

    /// Widths of what is dense.
    pub(super) fn widths(&self) -> Vec<usize> {
        let shared = self.experts.as_ref().and_then(|moe| moe.shared);
        shared.into_iter().chain(Some(self.intermediate).filter(|&width| width > 0)).collect()
    }

    /// Which layers have an indexer: as a list, a pattern or a schedule says.
    fn own_index(fields: Fields<'_>, layers: usize) -> Result<Vec<bool>, Error> {
        if let Some(kinds) = fields.kinds("indexer_types", layers, ["full", "shared"], "full or shared")? {
            return Ok(kinds);
        }
        if let Some(pattern) = fields.text("index_topk_pattern")? {
            if pattern.len() != layers || !pattern.chars().all(|kind| "FS".contains(kind)) {
                return Err(fields.wrong("index_topk_pattern", "F or S for each layer"));
            }
            return Ok(pattern.chars().map(|kind| kind == 'F').collect());
        }
        let every = fields.count("index_topk_freq")?.unwrap_or(1);
        let offset = fields.index("index_skip_topk_offset")?.unwrap_or(2);
        Ok((0..layers).map(|layer| (layer + 1).saturating_sub(offset).is_multiple_of(every)).collect())
    }

    fn experts(fields: Fields<'_>, hidden: usize) -> Result<Moe, Error> {
        fields.only("topk_method", "noaux_tc")?;
        fields.only("scoring_func", "sigmoid")?;
        let sizes = Sizes {
            experts: fields.needed("n_routed_experts")?,
            picks: fields.needed("num_experts_per_tok")?,
            hidden,
            intermediate: fields.needed("moe_intermediate_size")?,
        };
        let (groups, kept) = (fields.count("n_group")?.unwrap_or(1), fields.count("topk_group")?.unwrap_or(1));
        check_multiple("n_routed_experts", sizes.experts, "a multiple of n_group", groups)?;
        if kept > groups || kept * (sizes.experts / groups) < sizes.picks {
            return Err(fields.wrong("topk_group", "groups with experts enough for each token"));
        }
        let routing = Routing {
            score: Score::Sigmoid,
            normalize: fields.flag("norm_topk_prob")?.unwrap_or(true),
            scale: fields.float("routed_scaling_factor")?.unwrap_or(1.0) as f32,
            groups: (groups > 1).then_some((groups, kept)),
        };
        let shared = fields.index("n_shared_experts")?.filter(|&count| count > 0);
        Ok(Moe { sizes, routing, shared: shared.map(|count| count * sizes.intermediate) })
    }

    pub(super) fn from_gguf(name: &str, metadata: &Metadata) -> Result<Self, Error> {
        let mut config = gguf::config(name, metadata)?;
        let int = |key: &str| metadata.int(&format!("{name}.{key}"));
        // The blocks include those of the prediction head.
        let head = int("nextn_predict_layers")?.unwrap_or(0);
        let layers = int("block_count")?.map(|blocks| blocks - head);
        let (both, rope) = (int("attention.key_length_mla")?, int("rope.dimension_count")?);
        config["num_hidden_layers"] = json!(layers);
        config["first_k_dense_replace"] = json!(int("leading_dense_block_count")?);
        config["q_lora_rank"] = json!(int("attention.q_lora_rank")?);
        config["kv_lora_rank"] = json!(int("attention.kv_lora_rank")?);
        config["qk_rope_head_dim"] = json!(rope);
        config["qk_nope_head_dim"] = json!(both.zip(rope).map(|(both, rope)| both - rope));
        config["v_head_dim"] = json!(int("attention.value_length_mla")?);
        config["index_n_heads"] = json!(int("attention.indexer.head_count")?);
        config["index_head_dim"] = json!(int("attention.indexer.key_length")?);
        config["index_topk"] = json!(int("attention.indexer.top_k")?);
        if let Some(full) = metadata.bools(&format!("{name}.attention.indexer.types"))? {
            let count = layers.and_then(|layers| usize::try_from(layers).ok()).unwrap_or(0);
            let kind = |&full: &bool| if full { "full" } else { "shared" };
            config["indexer_types"] = json!(full.iter().take(count).map(kind).collect::<Vec<_>>());
        }
        config["n_routed_experts"] = json!(int("expert_count")?);
        config["num_experts_per_tok"] = json!(int("expert_used_count")?);
        config["n_shared_experts"] = json!(int("expert_shared_count")?);
        config["moe_intermediate_size"] = json!(int("expert_feed_forward_length")?);
        config["n_group"] = json!(int("expert_group_count")?);
        config["topk_group"] = json!(int("expert_group_used_count")?);
        config["routed_scaling_factor"] = json!(metadata.float(&format!("{name}.expert_weights_scale"))?);
        config["norm_topk_prob"] = json!(metadata.bool(&format!("{name}.expert_weights_norm"))?.unwrap_or(false));
        Self::from_json(name, &config)
    }
}

/// Brings a GGUF file's names to those of the graph.
pub(super) fn rename(checkpoint: &mut Checkpoint) -> Result<(), Error> {
    const PARTS: [(&str, &str); 21] = [
        ("attn_q_a", "self_attn.q_a_proj"),
        ("attn_q_a_norm", "self_attn.q_a_layernorm"),
        ("attn_q_b", "self_attn.q_b_proj"),
        ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
        ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
        ("attn_k_b", "self_attn.k_b_proj"),
        ("attn_v_b", "self_attn.v_b_proj"),
        ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
        ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
        ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
        ("exp_probs_b", "mlp.gate.e_score_correction_bias"),
        ("indexer.k_norm", "self_attn.indexer.k_norm"),
        ("indexer.proj", "self_attn.indexer.weights_proj"),
        ("indexer.attn_k", "self_attn.indexer.wk"),
        ("indexer.attn_q_b", "self_attn.indexer.wq_b"),
        ("nextn.eh_proj", "eh_proj"),
        ("nextn.enorm", "enorm"),
        ("nextn.hnorm", "hnorm"),
        ("nextn.embed_tokens", "embed_tokens"),
        ("nextn.shared_head_head", "shared_head.head"),
        ("nextn.shared_head_norm", "shared_head.norm"),
    ];
    if matches!(checkpoint.source(), Source::Gguf(_)) {
        checkpoint.rename(|name| {
            gguf::tensor(name, &PARTS).replace("e_score_correction_bias.bias", "e_score_correction_bias")
        })?;
    }
    Ok(())
}
