//! Taking tensors out of a checkpoint and packing them for a backend.

use std::ops::ControlFlow;

use kvern_backend::Backend;
use kvern_base::Raw;
use kvern_state::Codec;
use kvern_weights::{Checkpoint, Encoding, Tensor};

use crate::{Error, LoadOptions};

/// A checkpoint being packed; counts what has been loaded.
pub(crate) struct Loader<'a, B> {
    pub(crate) backend: &'a B,
    pub(crate) checkpoint: Checkpoint,
    options: &'a LoadOptions<'a>,
    loaded: usize,
    total: usize,
}

impl<'a, B: Backend> Loader<'a, B> {
    pub(crate) fn new(backend: &'a B, checkpoint: Checkpoint, options: &'a LoadOptions<'a>) -> Self {
        let total = checkpoint.names().count();
        Self { backend, checkpoint, options, loaded: 0, total }
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
        let values: Vec<f32> = self.take(name, &[width])?.to_vec().into_iter().map(|weight| weight + offset).collect();
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
        Ok(self.backend.linear(weight, bias)?)
    }
}

/// How state is stored when nobody says: in the type of the weights, as the embedding has it, and in half precision where that is quantized.
pub(crate) fn state_codec(embed: &Tensor) -> Codec {
    match embed.encoding() {
        Encoding::Raw(Raw::F32) => Codec::F32,
        Encoding::Raw(Raw::Bf16) => Codec::Bf16,
        _ => Codec::F16,
    }
}
