//! The dense feed-forward part of a layer: `Down · (activation(Gate · h) * (Up · h))`.

use kvern_backend::{Activation, Backend};

use crate::Error;
use crate::loader::Loader;
use crate::workspace::{Gated, Workspace};

/// The three matrices of a gated unit.
pub(crate) struct Mlp<B: Backend> {
    gate: B::Linear,
    up: B::Linear,
    down: B::Linear,
    width: usize,
}

impl<B: Backend> Mlp<B> {
    /// `{name}.gate_proj`, `{name}.up_proj` and `{name}.down_proj`.
    pub(crate) fn load(
        loader: &mut Loader<'_, B>,
        name: &str,
        [hidden, width]: [usize; 2],
        bias: bool,
    ) -> Result<Self, Error> {
        let mut linear = |part: &str, shape| loader.linear(&format!("{name}.{part}"), shape, bias, None);
        Ok(Self {
            gate: linear("gate_proj", [width, hidden])?,
            up: linear("up_proj", [width, hidden])?,
            down: linear("down_proj", [hidden, width])?,
            width,
        })
    }

    /// The matrices of gate, up and down.
    pub(crate) fn into_parts(self) -> [B::Linear; 3] {
        [self.gate, self.up, self.down]
    }

    /// `x +=` the unit of `h = rms(x)`.
    pub(crate) fn add(
        &self,
        backend: &B,
        activation: Activation,
        (norm, eps): (&B::Vector, f32),
        w: &mut Workspace<B>,
    ) -> Result<(), Error> {
        let Gated { gate, up, .. } = self.space(&mut w.gated)?;
        backend.project_norm(&w.x, (norm, eps), &mut w.h, &mut [(&self.gate, gate), (&self.up, up)])?;
        Ok(backend.project_gate_add((activation, gate, up), &self.down, &mut w.x)?)
    }

    /// `x +=` the unit of `h`.
    pub(crate) fn add_of(&self, backend: &B, activation: Activation, w: &mut Workspace<B>) -> Result<(), Error> {
        let Gated { gate, up, .. } = self.space(&mut w.gated)?;
        backend.project(&w.h, &mut [(&self.gate, gate), (&self.up, up)])?;
        Ok(backend.project_gate_add((activation, gate, up), &self.down, &mut w.x)?)
    }

    /// `h =` the unit of `rms(x)`.
    pub(crate) fn set(
        &self,
        backend: &B,
        activation: Activation,
        (norm, eps): (&B::Vector, f32),
        w: &mut Workspace<B>,
    ) -> Result<(), Error> {
        let Gated { gate, up, .. } = self.space(&mut w.gated)?;
        backend.project_norm(&w.x, (norm, eps), &mut w.h, &mut [(&self.gate, gate), (&self.up, up)])?;
        backend.gate(activation, gate, up)?;
        Ok(backend.project(gate, &mut [(&self.down, &mut w.h)])?)
    }

    /// The activations of the unit's width.
    fn space<'a>(&self, all: &'a mut [Gated<B>]) -> Result<&'a mut Gated<B>, Error> {
        let widest = all.last().map_or(0, |gated| gated.width);
        let missing = kvern_backend::Error::Shape {
            verb: "mlp",
            what: "width of the activations",
            expected: self.width,
            found: widest,
        };
        all.iter_mut().find(|gated| gated.width == self.width).ok_or(Error::Backend(missing))
    }
}
