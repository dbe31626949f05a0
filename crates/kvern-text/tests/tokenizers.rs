//! Token ids against the `tokenizers` package, llama.cpp and SentencePiece; see `tools/oracle/tokenizers_.py`.

use std::fs;
use std::path::PathBuf;

use kvern_text::{Error, Text, TextStream};
use kvern_weights::{Checkpoint, Source};
use serde_json::Value;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizers").join(name)
}

fn text(name: &str) -> Text {
    let path = fixture(name);
    if path.is_dir() {
        return Text::load(&Source::Directory { path, config: Value::Null }).unwrap();
    }
    Text::load(Checkpoint::open(&path).unwrap().source()).unwrap()
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&fs::read(fixture(name)).unwrap()).unwrap()
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap().into()).collect()
}

fn ids(value: &Value) -> Vec<Vec<u32>> {
    let ids = |value: &Value| value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    value.as_array().unwrap().iter().map(ids).collect()
}

#[test]
fn byte_level_ids_are_those_of_the_hub_and_of_llama_cpp() {
    let goldens = json("byte-level.json");
    let texts = strings(&goldens["texts"]);
    for (file, family) in [
        ("gpt-2.gguf", "gpt-2"),
        ("smollm.gguf", "smollm"),
        ("llama-bpe.gguf", "llama-bpe"),
        ("qwen2.gguf", "qwen2"),
        ("smollm-dir", "smollm"),
    ] {
        let tokenizer = text(file).tokenizer;
        let (special, plain) = (ids(&goldens["ids"][family]["special"]), ids(&goldens["ids"][family]["plain"]));
        for ((text, special), plain) in texts.iter().zip(special).zip(plain) {
            assert_eq!(tokenizer.encode(text, true).unwrap(), special, "{file}: {text:?}");
            assert_eq!(tokenizer.encode_plain(text).unwrap(), plain, "{file}: {text:?} as plain text");
        }
    }
}

#[test]
fn sentence_piece_ids_are_those_of_sentence_piece_and_of_llama_cpp() {
    let goldens = json("spm.json");
    let tokenizer = text("spm.gguf").tokenizer;
    for (text, ids) in strings(&goldens["texts"]).iter().zip(ids(&goldens["ids"])) {
        assert_eq!(tokenizer.encode_plain(text).unwrap(), ids, "{text:?}");
        let wrapped = tokenizer.encode(text, true).unwrap();
        assert_eq!(wrapped[0], 1, "a beginning token");
    }
}

#[test]
fn streams_give_what_decoding_at_once_gives() {
    let byte_level = strings(&json("byte-level.json")["texts"]);
    let piece = strings(&json("spm.json")["texts"]);
    for (file, texts) in [("smollm.gguf", &byte_level), ("spm.gguf", &piece)] {
        let tokenizer = text(file).tokenizer;
        for text in texts {
            let ids = tokenizer.encode_plain(text).unwrap();
            let mut stream = TextStream::new(Vec::new());
            let mut streamed = String::new();
            for &id in &ids {
                streamed += &stream.push(&tokenizer, id).unwrap();
            }
            streamed += &stream.finish();
            assert_eq!(streamed, tokenizer.decode(&ids).unwrap(), "{file}: {text:?}");
            assert_eq!(streamed, *text, "{file}");
        }
    }
}

#[test]
fn an_unfinished_character_is_held_until_it_is_whole() {
    let tokenizer = text("smollm.gguf").tokenizer;
    let ids = tokenizer.encode_plain("a🙃b").unwrap();
    let mut stream = TextStream::new(Vec::new());
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(&tokenizer, id).unwrap()).collect();
    assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pieces:?}");
    assert_eq!(pieces.concat(), "a🙃b");
    // A character that never gets whole is not held for ever.
    let broken: Vec<u32> = ids[1..2].repeat(8);
    let mut stream = TextStream::new(Vec::new());
    let text: String = broken.iter().map(|&id| stream.push(&tokenizer, id).unwrap()).collect();
    assert!(text.contains('\u{FFFD}'));
}

#[test]
fn stop_strings_match_across_token_borders() {
    let tokenizer = text("smollm.gguf").tokenizer;
    for (input, stops, output, stopped) in [
        ("one, two, three", vec!["two"], "one, ", true),
        ("one, two, three", vec![", t", "two"], "one", true),
        ("one, two, three", vec!["twofold", ""], "one, two, three", false),
        ("ends with a beginn", vec!["beginning"], "ends with a beginn", false),
        ("日本語のテキスト", vec!["テキ"], "日本語の", true),
        ("aaab", vec!["aab"], "a", true),
    ] {
        let mut stream = TextStream::new(stops.iter().map(|stop| stop.to_string()).collect());
        let mut text = String::new();
        for id in tokenizer.encode_plain(input).unwrap() {
            text += &stream.push(&tokenizer, id).unwrap();
        }
        assert_eq!(stream.stopped(), stopped, "{input:?}");
        text += &stream.finish();
        assert_eq!(text, output, "{input:?} before {stops:?}");
    }
}

#[test]
fn special_tokens_are_not_text() {
    let tokenizer = text("smollm.gguf").tokenizer;
    let ids = tokenizer.encode("<|im_start|>hi<|im_end|>", true).unwrap();
    assert_eq!(tokenizer.decode(&ids).unwrap(), "hi");
    // The metadata names one; the other also ends a turn.
    for stop in ["<|im_end|>", "<|endoftext|>"] {
        assert!(tokenizer.stops().contains(&tokenizer.id(stop).unwrap()), "{stop}");
    }
    assert!(!tokenizer.stops().contains(&tokenizer.id("<|im_start|>").unwrap()));
}

#[test]
fn tokenizers_that_cannot_be_rebuilt_are_named() {
    let mut bytes = fs::read(fixture("smollm.gguf")).unwrap();
    let at = bytes.windows(6).position(|window| window == b"smollm").unwrap();
    bytes[at..at + 6].copy_from_slice(b"klingo");
    let file = kvern_weights::Mapping::from_bytes("test.gguf".as_ref(), bytes);
    let error = Text::load(Checkpoint::from_gguf(&file).unwrap().source()).unwrap_err();
    assert!(matches!(&error, Error::Unknown { found, .. } if found == "klingo"), "{error}");
    let missing = Source::Directory { path: "/no/such/directory".into(), config: Value::Null };
    assert!(matches!(Text::load(&missing), Err(Error::File { .. })));
}
