//! Tokenizers rebuilt from GGUF metadata.
//!
//! `tokenizer.ggml.model` names the kind: `gpt2` is byte-level BPE, whose split into words `tokenizer.ggml.pre` names; `llama` is
//! SentencePiece BPE, whose merges follow from the scores. Both are put together from the parts of the `tokenizers` crate.

use std::collections::BTreeSet;

use ahash::AHashMap;
use kvern_weights::gguf::Metadata;
use serde_json::{Value, json};
use tokenizers::models::bpe::BPE;
use tokenizers::{AddedToken, Tokenizer as Inner};

use crate::{ChatTemplate, Error, Text, Tokenizer};

/// `tokenizer.ggml.token_type` values.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Control tokens that end a turn in the families' chat formats; many files name only one of theirs in the metadata.
const TURN_ENDS: [&str; 7] =
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"];

/// The words of GPT-2.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// The words of Llama 3: case-insensitive contractions, up to three digits, punctuation takes line ends along.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The words of Qwen2: as Llama 3, but digits one by one.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Reads tokenizer and template from metadata.
pub(crate) fn text(metadata: &Metadata) -> Result<Text, Error> {
    let model = metadata.str("tokenizer.ggml.model")?.unwrap_or("nothing");
    let tokens = metadata.strs("tokenizer.ggml.tokens")?.unwrap_or_default();
    let mut inner = match model {
        "gpt2" => byte_level(metadata, tokens)?,
        "llama" => sentence_piece(metadata, tokens)?,
        _ => {
            let (key, known) = ("tokenizer.ggml.model", "gpt2 and llama");
            return Err(Error::Unknown { key, found: model.into(), known });
        }
    };
    let types = metadata.ints("tokenizer.ggml.token_type")?.unwrap_or_default();
    let of_type =
        |wanted: i64| tokens.iter().zip(types).filter(move |(_, kind)| **kind == wanted).map(|(token, _)| token);
    inner.add_special_tokens(of_type(CONTROL).map(|token| AddedToken::from(token.clone(), true)))?;
    inner.add_tokens(of_type(USER_DEFINED).map(|token| AddedToken::from(token.clone(), false).normalized(false)))?;

    let id = |name: &str| -> Result<Option<u32>, Error> {
        let id = metadata.int(&format!("tokenizer.ggml.{name}_token_id"))?;
        Ok(id.and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < tokens.len()))
    };
    let (bos, eos) = (id("bos")?, id("eos")?);
    let spelled = |id: Option<u32>| id.map(|id| tokens[id as usize].clone());
    // SentencePiece models begin with a token unless they say otherwise; byte-level ones do not.
    let begins = metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(model == "llama");
    if let (true, Some(bos), Some(token)) = (begins, bos, spelled(bos)) {
        inner.with_post_processor(Some(part::<tokenizers::PostProcessorWrapper>(json!({
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": token, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { token.clone(): { "id": token, "ids": [bos], "tokens": [token] } },
        }))?));
    }
    let mut stops: BTreeSet<u32> = [eos, id("eot")?, id("eom")?].into_iter().flatten().collect();
    let turn_ends = of_type(CONTROL).filter(|token| TURN_ENDS.contains(&token.as_str()));
    stops.extend(turn_ends.filter_map(|token| inner.token_to_id(token)));
    let source = metadata.str("tokenizer.chat_template")?;
    let template =
        source.map(|source| ChatTemplate::new(source, spelled(bos).as_deref(), spelled(eos).as_deref())).transpose()?;
    Ok(Text { tokenizer: Tokenizer::new(inner, stops), template })
}

/// A part of a tokenizer from the JSON that describes it in a `tokenizer.json`.
fn part<T: serde::de::DeserializeOwned>(json: Value) -> Result<T, Error> {
    serde_json::from_value(json).map_err(|e| Error::Tokenizer(e.to_string()))
}

fn vocabulary(tokens: &[String]) -> AHashMap<String, u32> {
    // Where a spelling appears twice, the first id counts, as in llama.cpp's lookup.
    tokens.iter().enumerate().rev().map(|(id, token)| (token.clone(), id as u32)).collect()
}

fn byte_level(metadata: &Metadata, tokens: &[String]) -> Result<Inner, Error> {
    let merges = metadata.strs("tokenizer.ggml.merges")?.unwrap_or_default();
    let merges = merges.iter().filter_map(|merge| {
        // The separator is a space; a token of byte-level BPE never holds one, but may be of any other character.
        let (left, right) = merge.split_once(' ')?;
        Some((left.to_string(), right.to_string()))
    });
    let found = metadata.str("tokenizer.ggml.pre")?.unwrap_or("nothing");
    let split = |regex: &str| json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false });
    // How text is split, whether a word that is a token skips the merges, and whether characters are composed first.
    let (words, ignore_merges, compose) = match found {
        "gpt-2" => (vec![split(GPT2)], false, false),
        "smollm" | "starcoder" | "refact" | "command-r" => {
            (vec![json!({ "type": "Digits", "individual_digits": true }), split(GPT2)], false, false)
        }
        "llama-bpe" | "llama3" | "llama-v3" => (vec![split(LLAMA3)], true, false),
        // The model was trained on composed characters, though llama.cpp does not compose them.
        "qwen2" | "deepseek-r1-qwen" => (vec![split(QWEN2)], false, true),
        _ => {
            let known = "gpt-2, smollm, starcoder, refact, command-r, llama-bpe, qwen2 and deepseek-r1-qwen";
            return Err(Error::Unknown { key: "tokenizer.ggml.pre", found: found.into(), known });
        }
    };
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let model = BPE::builder().vocab_and_merges(vocabulary(tokens), merges.collect::<Vec<_>>());
    let mut inner = Inner::new(model.ignore_merges(ignore_merges).build()?);
    let mut steps = words;
    steps.push(bytes.clone());
    if compose {
        inner.with_normalizer(Some(part::<tokenizers::NormalizerWrapper>(json!({ "type": "NFC" }))?))?;
    }
    let steps = json!({ "type": "Sequence", "pretokenizers": steps });
    inner.with_pre_tokenizer(Some(part::<tokenizers::PreTokenizerWrapper>(steps)?));
    inner.with_decoder(Some(part::<tokenizers::DecoderWrapper>(bytes)?));
    Ok(inner)
}

fn sentence_piece(metadata: &Metadata, tokens: &[String]) -> Result<Inner, Error> {
    let scores = metadata.floats("tokenizer.ggml.scores")?.unwrap_or_default();
    if scores.len() != tokens.len() {
        let found = format!("{} scores for {} tokens", scores.len(), tokens.len());
        return Err(Error::Unknown { key: "tokenizer.ggml.scores", found, known: "one score for each token" });
    }
    let vocab = vocabulary(tokens);
    // SentencePiece joins the adjacent pair whose union has the best score; as ranked merges, that is every split of every token,
    // in the order of the tokens' scores.
    let mut splits: Vec<(usize, &str, &str)> = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if vocab.contains_key(left) && vocab.contains_key(right) {
                splits.push((id, left, right));
            }
        }
    }
    splits.sort_by(|(a, a_left, _), (b, b_left, _)| {
        scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)).then(vocab[*a_left].cmp(&vocab[*b_left]))
    });
    let merges: Vec<_> = splits.into_iter().map(|(_, left, right)| (left.to_string(), right.to_string())).collect();
    let unknown = metadata.int("tokenizer.ggml.unknown_token_id")?.and_then(|id| tokens.get(usize::try_from(id).ok()?));
    let mut model = BPE::builder().vocab_and_merges(vocab, merges).byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = unknown {
        model = model.unk_token(unknown.clone());
    }
    let mut inner = Inner::new(model.build()?);
    let space = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let prefix = metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let normalizers = if prefix { vec![json!({ "type": "Prepend", "prepend": "▁" }), space] } else { vec![space] };
    let normalizer = json!({ "type": "Sequence", "normalizers": normalizers });
    inner.with_normalizer(Some(part::<tokenizers::NormalizerWrapper>(normalizer)?))?;
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let decoder = json!({ "type": "Sequence", "decoders": decoders });
    inner.with_decoder(Some(part::<tokenizers::DecoderWrapper>(decoder)?));
    Ok(inner)
}
