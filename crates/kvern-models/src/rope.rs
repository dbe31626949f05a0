//! Rotary position embeddings: frequencies by type.
//!
//! A pair `i` of a head's rotated dimensions turns by `position * frequency[i]`; the plain frequency is `theta^(-2i/d)`. The other
//! types stretch some of them: `linear` divides all by a factor (Chen et al. 2023, arXiv 2306.15595), `llama3` divides the low ones and
//! blends between two wavelengths, `yarn` blends by the number of turns within the original context and scales the result
//! (Peng et al. 2023, arXiv 2309.00071, equations 17 to 22). Formulas are those of Hugging Face transformers.
//!
//! ```
//! use kvern_models::rope::{Rope, Scaling};
//! let rope = Rope { theta: 10_000.0, dims: 4, scaling: Scaling::Linear { factor: 2.0 } };
//! assert_eq!(rope.frequencies(), [0.5, 0.005]);
//! ```

use std::f64::consts::PI;

use crate::Error;
use crate::config::Fields;

/// Rotary embeddings of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// The base.
    pub theta: f64,
    /// Rotated dimensions of a head; even.
    pub dims: usize,
    /// How the frequencies are stretched.
    pub scaling: Scaling,
}

/// How frequencies are stretched to contexts longer than those trained on.
#[derive(Debug, Clone, PartialEq)]
pub enum Scaling {
    /// Not at all.
    None,
    /// All by one factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// By wavelength, as Llama 3.1 does.
    Llama3 {
        /// Factor on the lowest frequencies.
        factor: f64,
        /// Turns within the original context below which a frequency is stretched in full.
        low: f64,
        /// Turns within the original context above which a frequency is kept.
        high: f64,
        /// The original context.
        original: f64,
    },
    /// By turns within the original context.
    Yarn {
        /// Factor on the lowest frequencies.
        factor: f64,
        /// Turns above which a frequency is kept.
        fast: f64,
        /// Turns below which a frequency is stretched in full.
        slow: f64,
        /// The original context.
        original: f64,
        /// Factor on the rotated vectors.
        attention: f64,
        /// Whether the borders of the blend are rounded to whole dimensions.
        truncate: bool,
    },
    /// Only the first pairs turn, at the frequencies that they have among all pairs of the head (Gemma 4).
    Proportional {
        /// Pairs that turn.
        pairs: usize,
        /// The divisor of their frequencies.
        factor: f64,
    },
    /// By a divisor for each frequency, as GGUF files store them.
    Divisors(Vec<f32>),
}

impl Rope {
    /// Reads the fields of a Hugging Face configuration: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`.
    pub(crate) fn from_config(config: Fields<'_>, head_dim: usize, context: usize) -> Result<Self, Error> {
        let parameters = match config.object("rope_parameters", "rope_parameters.")? {
            Some(parameters) => Some(parameters),
            None => config.object("rope_scaling", "rope_scaling.")?,
        };
        Self::from_parameters(config, parameters, head_dim, context)
    }

    /// Reads one set of parameters, of a configuration that may have several.
    pub(crate) fn from_parameters(
        config: Fields<'_>,
        parameters: Option<Fields<'_>>,
        head_dim: usize,
        context: usize,
    ) -> Result<Self, Error> {
        let theta = parameters.map(|p| p.float("rope_theta")).transpose()?.flatten();
        let theta = theta.or(config.float("rope_theta")?).unwrap_or(10_000.0);
        let partial = parameters.map(|p| p.float("partial_rotary_factor")).transpose()?.flatten();
        let partial = partial.or(config.float("partial_rotary_factor")?).unwrap_or(1.0);
        let rotated = (head_dim as f64 * partial) as usize;
        let scaling = match parameters {
            None => Scaling::None,
            Some(parameters) => Self::scaling(config, parameters, (rotated, context))?,
        };
        let dims = if matches!(scaling, Scaling::Proportional { .. }) { head_dim } else { rotated };
        Self { theta, dims, scaling }.checked(head_dim)
    }

    fn scaling(config: Fields<'_>, p: Fields<'_>, (rotated, context): (usize, usize)) -> Result<Scaling, Error> {
        let original = || -> Result<f64, Error> {
            let original = p.float("original_max_position_embeddings")?;
            Ok(original.or(config.float("original_max_position_embeddings")?).unwrap_or(context as f64))
        };
        let kind = match p.text("rope_type")? {
            Some(kind) => kind,
            None => p.text("type")?.unwrap_or("default"),
        };
        Ok(match kind {
            "default" => Scaling::None,
            "proportional" => {
                Scaling::Proportional { pairs: rotated / 2, factor: p.positive("factor")?.unwrap_or(1.0) }
            }
            "linear" => Scaling::Linear { factor: p.needed_float("factor")? },
            "llama3" => Scaling::Llama3 {
                factor: p.needed_float("factor")?,
                low: p.needed_float("low_freq_factor")?,
                high: p.needed_float("high_freq_factor")?,
                original: original()?,
            },
            "yarn" => {
                let factor = p.needed_float("factor")?;
                let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
                let attention = match (p.float("attention_factor")?, p.float("mscale")?, p.float("mscale_all_dim")?) {
                    (Some(attention), ..) => attention,
                    (None, Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => scale(mscale) / scale(all),
                    _ => scale(1.0),
                };
                Scaling::Yarn {
                    factor,
                    fast: p.float("beta_fast")?.unwrap_or(32.0),
                    slow: p.float("beta_slow")?.unwrap_or(1.0),
                    original: original()?,
                    attention,
                    truncate: p.flag("truncate")?.unwrap_or(true),
                }
            }
            other => {
                let expected = "default, linear, llama3, proportional or yarn";
                return Err(Error::Config { field: "rope_type".into(), expected, found: other.into() });
            }
        })
    }

    /// Checks what the frequencies need.
    pub(crate) fn checked(self, head_dim: usize) -> Result<Self, Error> {
        let wrong = |field: &str, expected, found: f64| {
            Err(Error::Config { field: field.into(), expected, found: found.to_string() })
        };
        if self.dims == 0 || !self.dims.is_multiple_of(2) || self.dims > head_dim {
            return wrong("rotated dimensions", "an even number up to the head dimension", self.dims as f64);
        }
        if self.theta <= 1.0 {
            return wrong("rope_theta", "above 1", self.theta);
        }
        match self.scaling {
            Scaling::Linear { factor } | Scaling::Llama3 { factor, .. } | Scaling::Yarn { factor, .. }
                if factor < 1.0 =>
            {
                wrong("rope factor", "at least 1", factor)
            }
            Scaling::Llama3 { low, high, .. } if low >= high => wrong("low_freq_factor", "below high_freq_factor", low),
            _ => Ok(self),
        }
    }

    /// Frequency of each pair, in radians per position: `dims / 2` of them.
    pub fn frequencies(&self) -> Vec<f32> {
        let pairs = self.dims / 2;
        let plain = |i: usize| self.theta.powf(-((2 * i) as f64) / self.dims as f64);
        let frequency = |i: usize| match &self.scaling {
            Scaling::None => plain(i),
            Scaling::Linear { factor } => plain(i) / factor,
            &Scaling::Proportional { pairs, factor } => {
                if i < pairs {
                    plain(i) / factor
                } else {
                    0.0
                }
            }
            Scaling::Divisors(divisors) => plain(i) / f64::from(divisors[i]),
            &Scaling::Llama3 { factor, low, high, original } => {
                let turns = original * plain(i) / (2.0 * PI);
                let blend = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - blend) * plain(i) / factor + blend * plain(i)
            }
            &Scaling::Yarn { factor, fast, slow, original, truncate, .. } => {
                // The pair that makes `turns` turns within the original context.
                let pair =
                    |turns: f64| self.dims as f64 * (original / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
                let (mut first, mut last) = (pair(fast), pair(slow));
                if truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                let (first, mut last) = (first.max(0.0), last.min((self.dims - 1) as f64));
                if first == last {
                    last += 0.001;
                }
                let stretch = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
                plain(i) / factor * stretch + plain(i) * (1.0 - stretch)
            }
        };
        (0..pairs).map(|i| frequency(i) as f32).collect()
    }

    /// Factor on the rotated vectors.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            Scaling::Yarn { attention, .. } => attention as f32,
            _ => 1.0,
        }
    }
}
