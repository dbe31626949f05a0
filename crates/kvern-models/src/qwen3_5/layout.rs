//! Where the tensors of a gated delta net lie, by who wrote the checkpoint.
//!
//! | layout | projections | convolution | norms | value heads |
//! |---|---|---|---|---|
//! | hub | `in_proj_qkv`, `_z`, `_b`, `_a` | `[channels, 1, taps]` | raw | by key head |
//! | converted by mlx-lm | the same | `[channels, taps, 1]` | 1 added | by key head |
//! | Qwen3-Next | `in_proj_qkvz`, `in_proj_ba`, each by key head | `[channels, 1, taps]` | raw | by key head |
//! | GGUF | as the hub's | `[channels, taps]` | 1 added | the first of each key head, then the second of each, … |

use kvern_backend::Backend;
use kvern_weights::gguf::Metadata;
use kvern_weights::{Checkpoint, Source, Tensor};
use serde_json::{Value, json};

use super::Config;
use crate::loader::{Loader, rows};
use crate::{Error, gguf};

/// Who wrote a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    Hub,
    Converted,
    Next,
    Gguf,
}

/// Rows of a stored matrix.
pub(super) struct Part {
    pub(super) name: &'static str,
    /// Rows that are stored.
    pub(super) rows: usize,
    /// Those of the part, in order.
    pub(super) order: Option<Vec<u32>>,
}

impl Layout {
    pub(super) fn of(checkpoint: &Checkpoint, config: &Config) -> Self {
        if matches!(checkpoint.source(), Source::Gguf(_)) {
            return Self::Gguf;
        }
        let Some(index) = config.attends.iter().position(|attends| !attends) else { return Self::Hub };
        let name = |part: &str| format!("model.layers.{index}.linear_attn.{part}.weight");
        if checkpoint.has(&name("in_proj_qkvz")) {
            return Self::Next;
        }
        let converted = checkpoint.shape(&name("conv1d")).is_some_and(|shape| shape.last() == Some(&1));
        if converted { Self::Converted } else { Self::Hub }
    }

    /// Whether norms lack the 1 that is added to them.
    pub(super) fn is_raw(self) -> bool {
        matches!(self, Self::Hub | Self::Next)
    }

    /// Stored place of each value head.
    fn value_heads(self, config: &Config) -> Vec<usize> {
        let (keys, values) = (config.key_heads, config.value_heads);
        let each = values / keys;
        let place = |head: usize| if self == Self::Gguf { head % each * keys + head / each } else { head };
        (0..values).map(place).collect()
    }

    /// Rows of runs of `run`, one for each value head, that begin at `first`.
    fn value_rows(self, config: &Config, first: usize, run: usize) -> Option<Vec<u32>> {
        let start = |head: usize| first + head * run;
        let runs = self.value_heads(config).into_iter().flat_map(|head| start(head)..start(head) + run);
        Some(runs.map(|row| row as u32).collect())
    }

    /// Queries, keys, values, `z`, `b` and `a`.
    pub(super) fn parts(self, config: &Config) -> [Part; 6] {
        let [keys, values] = config.delta_widths();
        let Config { key_heads, value_heads, key_dim, value_dim, .. } = *config;
        if self == Self::Next {
            let each = value_heads / key_heads;
            // A part of each key head's run.
            let of = |name, run: usize, first: usize, count: usize| Part {
                name,
                rows: key_heads * run,
                order: Some(
                    (0..key_heads).flat_map(|head| (0..count).map(move |i| (head * run + first + i) as u32)).collect(),
                ),
            };
            let (both, wide) = (2 * key_dim + 2 * each * value_dim, each * value_dim);
            let qkvz = |first, count| of("in_proj_qkvz", both, first, count);
            let ba = |first| of("in_proj_ba", 2 * each, first, each);
            let z = qkvz(2 * key_dim + wide, wide);
            return [qkvz(0, key_dim), qkvz(key_dim, key_dim), qkvz(2 * key_dim, wide), z, ba(0), ba(each)];
        }
        let qkv = |order| Part { name: "in_proj_qkv", rows: 2 * keys + values, order };
        let by_head = |name, run| Part { name, rows: value_heads * run, order: self.value_rows(config, 0, run) };
        let v = qkv(self.value_rows(config, 2 * keys, value_dim));
        let (b, a) = (by_head("in_proj_b", 1), by_head("in_proj_a", 1));
        [qkv(rows(0, keys)), qkv(rows(keys, keys)), v, by_head("in_proj_z", value_dim), b, a]
    }

    /// The convolutions' kernels `[taps, channels]` of queries, keys and values.
    pub(super) fn kernels<B: Backend>(
        self,
        loader: &mut Loader<'_, B>,
        config: &Config,
        name: &str,
    ) -> Result<[B::Vector; 3], Error> {
        let ([keys, values], taps) = (config.delta_widths(), config.taps);
        let channels = 2 * keys + values;
        let shape: &[usize] = match self {
            Self::Hub | Self::Next => &[channels, 1, taps],
            Self::Converted => &[channels, taps, 1],
            Self::Gguf => &[channels, taps],
        };
        // The elements are in one order, wherever the axis of one stands.
        let stored = loader.take(&format!("{name}.conv1d.weight"), shape)?.to_vec();
        let backend = loader.backend;
        let kernel = |channels: Vec<u32>| {
            let by_tap = (0..taps).flat_map(|tap| channels.iter().map(move |&channel| channel as usize * taps + tap));
            backend.vector(&by_tap.map(|at| stored[at]).collect::<Vec<f32>>())
        };
        let all = |order: Option<Vec<u32>>| order.unwrap_or_default();
        let v = all(self.value_rows(config, 2 * keys, config.value_dim));
        Ok([kernel(all(rows(0, keys)))?, kernel(all(rows(keys, keys)))?, kernel(v)?])
    }

    /// `e^A_log` and `dt_bias` of each value head.
    pub(super) fn decay<B: Backend>(
        self,
        loader: &mut Loader<'_, B>,
        config: &Config,
        name: &str,
    ) -> Result<(Vec<f32>, Vec<f32>), Error> {
        let mut of = |part: &str| -> Result<Vec<f32>, Error> {
            let stored = loader.take(&format!("{name}.{part}"), &[config.value_heads])?.to_vec();
            Ok(self.value_heads(config).into_iter().map(|head| stored[head]).collect())
        };
        let (rate, bias) = (of("A_log")?, of("dt_bias")?);
        // GGUF files hold -e^A_log.
        let rate_of = |x: f32| if self == Self::Gguf { -x } else { f64::from(x).exp() as f32 };
        Ok((rate.into_iter().map(rate_of).collect(), bias))
    }

    /// The output projection, whose columns are values.
    pub(super) fn output<B: Backend>(
        self,
        loader: &mut Loader<'_, B>,
        config: &Config,
        name: &str,
    ) -> Result<Tensor, Error> {
        let [_, values] = config.delta_widths();
        let tensor = loader.take(&format!("{name}.out_proj.weight"), &[config.outline.hidden, values])?;
        if self != Self::Gguf {
            return Ok(tensor);
        }
        Ok(tensor.with_column_runs(&self.value_heads(config), config.value_dim)?)
    }
}

/// Brings a checkpoint's names to those of the graph: the text model's of a multimodal one, which stand one level deeper, and GGUF's.
pub(super) fn rename(checkpoint: &mut Checkpoint, layers: usize) -> Result<(), Error> {
    const PARTS: [(&str, &str); 13] = [
        ("post_attention_norm", "post_attention_layernorm"),
        ("attn_qkv", "linear_attn.in_proj_qkv"),
        ("attn_gate", "linear_attn.in_proj_z"),
        ("ssm_beta", "linear_attn.in_proj_b"),
        ("ssm_alpha", "linear_attn.in_proj_a"),
        ("ssm_conv1d", "linear_attn.conv1d"),
        ("ssm_norm", "linear_attn.norm"),
        ("ssm_out", "linear_attn.out_proj"),
        ("ssm_a", "linear_attn.A_log"),
        ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
        ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
        ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
        ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ];
    let is_gguf = matches!(checkpoint.source(), Source::Gguf(_));
    let head = format!("model.layers.{layers}.");
    checkpoint.rename(|name| {
        if !is_gguf {
            return name.replacen("model.language_model.", "model.", 1).replacen("language_model.model.", "model.", 1);
        }
        let name = gguf::tensor(name, &PARTS).replace("ssm_dt.bias", "linear_attn.dt_bias");
        // The block after the last is the prediction head.
        match name.strip_prefix(&head) {
            Some("nextn.eh_proj.weight") => "mtp.fc.weight".into(),
            Some("nextn.enorm.weight") => "mtp.pre_fc_norm_embedding.weight".into(),
            Some("nextn.hnorm.weight") => "mtp.pre_fc_norm_hidden.weight".into(),
            Some("nextn.shared_head_norm.weight") => "mtp.norm.weight".into(),
            Some(part) => format!("mtp.layers.0.{part}"),
            None => name,
        }
    })?;
    Ok(())
}

/// The fields of a GGUF file's metadata that only these models have.
pub(super) fn gguf_config(name: &str, metadata: &Metadata) -> Result<Value, Error> {
    let mut config = gguf::config(name, metadata)?;
    let int = |key: &str| metadata.int(&format!("{name}.{key}"));
    let heads = int("ssm.time_step_rank")?;
    // The blocks include those of the prediction head.
    let head = int("nextn_predict_layers")?.unwrap_or(0);
    config["num_hidden_layers"] = json!(int("block_count")?.map(|blocks| blocks - head));
    config["full_attention_interval"] = json!(int("full_attention_interval")?);
    config["linear_num_key_heads"] = json!(int("ssm.group_count")?);
    config["linear_num_value_heads"] = json!(heads);
    config["linear_key_head_dim"] = json!(int("ssm.state_size")?);
    config["linear_value_head_dim"] =
        json!(int("ssm.inner_size")?.zip(heads).map(|(width, heads)| width / heads.max(1)));
    config["linear_conv_kernel_dim"] = json!(int("ssm.conv_kernel")?);
    config["num_experts"] = json!(int("expert_count")?);
    config["num_experts_per_tok"] = json!(int("expert_used_count")?);
    config["moe_intermediate_size"] = json!(int("expert_feed_forward_length")?);
    config["shared_expert_intermediate_size"] = json!(int("expert_shared_feed_forward_length")?);
    config["partial_rotary_factor"] =
        json!(int("rope.dimension_count")?.zip(int("attention.key_length")?).map(|(d, of)| d as f64 / of as f64));
    Ok(config)
}
