//! The header of a safetensors file, read with every bound checked.
//!
//! A file is an 8-byte little-endian header length, a JSON header, and data. The header gives each tensor's type, shape and byte
//! range. Only the header is parsed here; tensors stay in the mapping.

use std::ops::Range;

use serde_json::Value;

use crate::Error;
use crate::mapping::Mapping;

/// A tensor's entry in the header; `range` is absolute in the file.
#[derive(Debug)]
pub(crate) struct Entry {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub range: Range<usize>,
}

/// Bits of an element type; `None` for one that no model here uses.
pub(crate) fn bits(dtype: &str) -> Option<usize> {
    Some(match dtype {
        "F64" | "I64" | "U64" => 64,
        "F32" | "I32" | "U32" => 32,
        "F16" | "BF16" | "I16" | "U16" => 16,
        "U8" | "I8" | "BOOL" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 8,
        _ => return None,
    })
}

/// Reads the header of a mapped file.
pub(crate) fn read(mapping: &Mapping) -> Result<Vec<Entry>, Error> {
    let bytes = mapping.bytes();
    let damaged = |offset: usize, what: String| Error::Damaged {
        path: mapping.path().to_path_buf(),
        offset: offset as u64,
        what,
    };
    let (length, _) = bytes.split_first_chunk().ok_or_else(|| damaged(0, "shorter than its header".into()))?;
    let start = usize::try_from(u64::from_le_bytes(*length))
        .ok()
        .and_then(|length| length.checked_add(8))
        .filter(|&start| start <= bytes.len())
        .ok_or_else(|| damaged(0, "the header runs past the end of the file".into()))?;
    let header: serde_json::Map<String, Value> =
        serde_json::from_slice(&bytes[8..start]).map_err(|e| damaged(8, format!("the header is not JSON ({e})")))?;
    let mut entries = Vec::with_capacity(header.len());
    for (name, value) in header {
        if name == "__metadata__" {
            continue;
        }
        let bad = |what: &str| damaged(8, format!("tensor `{name}`: {what}"));
        let dtype = value["dtype"].as_str().ok_or_else(|| bad("no element type"))?.to_string();
        let numbers = |key: &str| -> Option<Vec<usize>> {
            value[key].as_array()?.iter().map(|n| usize::try_from(n.as_u64()?).ok()).collect()
        };
        let shape = numbers("shape").ok_or_else(|| bad("no shape"))?;
        let offsets = numbers("data_offsets").ok_or_else(|| bad("no byte range"))?;
        let &[from, to] = offsets.as_slice() else { return Err(bad("a byte range needs two ends")) };
        let range = from.checked_add(start).zip(to.checked_add(start)).map(|(from, to)| from..to);
        let range = range
            .filter(|r| r.start <= r.end && r.end <= bytes.len())
            .ok_or_else(|| bad("its bytes lie outside the file (is the file truncated?)"))?;
        if let Some(bits) = bits(&dtype) {
            let need = shape.iter().try_fold(bits, |n, &d| n.checked_mul(d)).map(|bits| bits / 8);
            if need != Some(range.len()) {
                return Err(bad("its byte range does not fit its shape"));
            }
        }
        entries.push(Entry { name, dtype, shape, range });
    }
    Ok(entries)
}
