//! Taking tensors out of a checkpoint and packing them for a backend.

use std::ops::ControlFlow;

use kvern_backend::Backend;
use kvern_base::Raw;
use kvern_state::Codec;
use kvern_weights::{Checkpoint, Encoding, Source, Tensor};

use crate::config::Outline;
use crate::{Error, LoadOptions, Weights};

/// A checkpoint being packed; counts what has been loaded.
pub(crate) struct Loader<'a, B> {
    pub(crate) backend: &'a B,
    pub(crate) checkpoint: Checkpoint,
    options: &'a LoadOptions<'a>,
    loaded: usize,
    total: usize,
    weights: Weights,
}

/// The two ends of a decoder: its embedding, and its head with the norm before it.
pub(crate) struct Ends<B: Backend> {
    pub(crate) embed: B::Linear,
    head: Option<B::Linear>,
    pub(crate) norm: B::Vector,
    /// How state is stored when nobody says: in the type of the embedding, and in half precision where that is quantized.
    pub(crate) codec: Codec,
}

impl<B: Backend> Ends<B> {
    /// The head, which may be the embedding.
    pub(crate) fn head(&self) -> &B::Linear {
        self.head.as_ref().unwrap_or(&self.embed)
    }
}

/// Rows `first..first + count` of a matrix that holds several.
pub(crate) fn rows(first: usize, count: usize) -> Option<Vec<u32>> {
    Some((first as u32..(first + count) as u32).collect())
}

impl<'a, B: Backend> Loader<'a, B> {
    pub(crate) fn new(backend: &'a B, checkpoint: Checkpoint, options: &'a LoadOptions<'a>) -> Self {
        let total = checkpoint.names().count();
        Self { backend, checkpoint, options, loaded: 0, total, weights: Weights::default() }
    }

    /// Whether the checkpoint is a GGUF file.
    pub(crate) fn is_gguf(&self) -> bool {
        matches!(self.checkpoint.source(), Source::Gguf(_))
    }

    pub(crate) fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, Error> {
        let tensor = self.checkpoint.take(name, shape)?;
        self.loaded += 1;
        match self.options.progress.map(|progress| progress(self.loaded, self.total)) {
            Some(ControlFlow::Break(())) => Err(Error::Stopped),
            _ => Ok(tensor),
        }
    }

    /// A vector of `width` values.
    pub(crate) fn vector(&mut self, name: &str, width: usize) -> Result<B::Vector, Error> {
        self.norm(name, width, 0.0)
    }

    /// The weights of a norm, with what its graph adds to them.
    pub(crate) fn norm(&mut self, name: &str, width: usize, offset: f32) -> Result<B::Vector, Error> {
        self.mapped(name, width, |weight| weight + offset)
    }

    /// A vector of `width` values, each of them changed.
    pub(crate) fn mapped(&mut self, name: &str, width: usize, map: impl Fn(f32) -> f32) -> Result<B::Vector, Error> {
        let values: Vec<f32> = self.take(name, &[width])?.to_vec().into_iter().map(map).collect();
        Ok(self.backend.vector(&values)?)
    }

    /// The matrix `{name}.weight` of `outputs × inputs`, with `{name}.bias` if `bias`; of these, the rows in `order` if given.
    pub(crate) fn linear(
        &mut self,
        name: &str,
        [outputs, inputs]: [usize; 2],
        bias: bool,
        order: Option<Vec<u32>>,
    ) -> Result<B::Linear, Error> {
        let ordered = |tensor: Tensor| match &order {
            Some(order) => tensor.with_row_order(order.clone()),
            None => tensor,
        };
        let weight = ordered(self.take(&format!("{name}.weight"), &[outputs, inputs])?);
        let bias = if bias { Some(self.take(&format!("{name}.bias"), &[outputs])?) } else { None };
        let bias = match (bias, order) {
            // A bias is a vector; its entries follow the rows of the weight.
            (Some(bias), Some(order)) => Some(bias.with_element_order(&order)?),
            (bias, _) => bias,
        };
        self.pack(weight, bias)
    }

    /// Packs a matrix that every token is multiplied with.
    pub(crate) fn pack(&mut self, weight: Tensor, bias: Option<Tensor>) -> Result<B::Linear, Error> {
        let parameters = weight.rows() * weight.cols();
        let linear = self.backend.linear(weight, bias)?;
        self.count(&linear, parameters, 1.0);
        Ok(linear)
    }

    /// Packs a stack of `count` matrices, with `used` of which a token is multiplied.
    pub(crate) fn stack(
        &mut self,
        weight: Tensor,
        bias: Option<Tensor>,
        [count, used]: [usize; 2],
    ) -> Result<B::Linear, Error> {
        let parameters = weight.rows() * weight.cols();
        let linear = self.backend.stack(weight, bias, count)?;
        self.count(&linear, parameters, used as f64 / count as f64);
        Ok(linear)
    }

    fn count(&mut self, linear: &B::Linear, parameters: usize, share: f64) {
        let bytes = self.backend.linear_bytes(linear);
        self.weights.bytes += bytes;
        self.weights.step_bytes += (bytes as f64 * share) as usize;
        self.weights.layer_parameters += (parameters as f64 * share) as usize;
    }

    /// Loads what a step of the trunk does not use: a draft head.
    pub(crate) fn beside<T>(&mut self, load: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        let before = self.weights;
        let loaded = load(self)?;
        self.weights = Weights { bytes: self.weights.bytes, ..before };
        Ok(loaded)
    }

    /// Embedding, last norm and head, each under its usual name. Whether the head is the embedding follows from the configuration, or from what is stored.
    pub(crate) fn ends(&mut self, outline: &Outline, norm_offset: f32) -> Result<Ends<B>, Error> {
        let Outline { vocab, hidden, .. } = *outline;
        let embed = self.take("model.embed_tokens.weight", &[vocab, hidden])?;
        let codec = match embed.encoding() {
            Encoding::Raw(Raw::F32) => Codec::F32,
            Encoding::Raw(Raw::Bf16) => Codec::Bf16,
            _ => Codec::F16,
        };
        let embed = self.backend.linear(embed, None)?;
        let tied = outline.tied.unwrap_or(!self.checkpoint.has("lm_head.weight"));
        let head = if tied {
            // A head that is stored although it is the embedding.
            ["weight", "scales", "biases"].iter().for_each(|part| self.checkpoint.ignore(&format!("lm_head.{part}")));
            None
        } else {
            let head = self.take("lm_head.weight", &[vocab, hidden])?;
            Some(self.backend.linear(head, None)?)
        };
        let embed_bytes = self.backend.linear_bytes(&embed);
        let head_bytes = head.as_ref().map(|head| self.backend.linear_bytes(head));
        self.weights.bytes += embed_bytes + head_bytes.unwrap_or(0);
        self.weights.step_bytes += head_bytes.unwrap_or(embed_bytes);
        Ok(Ends { embed, head, norm: self.norm("model.norm.weight", hidden, norm_offset)?, codec })
    }

    /// Checks that every tensor was taken, and tells the size of all.
    pub(crate) fn finish(self) -> Result<Weights, Error> {
        self.checkpoint.finish()?;
        Ok(self.weights)
    }
}
