//! Where a model runs.

use std::str::FromStr;

use crate::Error;

/// Where a model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// This machine's processor.
    #[default]
    Cpu,
}

impl FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "cpu" => Ok(Self::Cpu),
            _ if text.starts_with("cuda") => {
                Err(Error::Device { asked: text.into(), what: "this version of Kvern runs on the cpu only" })
            }
            _ => Err(Error::Device { asked: text.into(), what: "there is `cpu`" }),
        }
    }
}
