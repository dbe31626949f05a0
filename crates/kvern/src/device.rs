//! Where a model runs.

use std::str::FromStr;

use crate::Error;

/// Where a model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// This machine's processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by its number.
    Cuda(usize),
}

impl FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let number = |text: &str| text.strip_prefix(':')?.parse().ok();
        match (text, text.strip_prefix("cuda")) {
            ("cpu", _) => Ok(Self::Cpu),
            (_, Some("")) => Ok(Self::Cuda(0)),
            (_, Some(rest)) if number(rest).is_some() => Ok(Self::Cuda(number(rest).unwrap_or(0))),
            _ => Err(Error::Device { asked: text.into(), what: "there are `cpu`, `cuda` and `cuda:N`" }),
        }
    }
}
