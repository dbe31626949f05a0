//! The main job on the real model, through the command that users run. The model is fetched into the cache on first use.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

fn kvern(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvern")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(&kvern(&[arguments, &["--json"]].concat()))).unwrap()
}

/// The model's file; fetched once, whichever test comes first.
fn model() -> &'static str {
    static MODEL: OnceLock<String> = OnceLock::new();
    MODEL.get_or_init(|| kvern::Cache::from_env().resolve("smollm2", |_| ()).unwrap().to_str().unwrap().into())
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/smollm2").join(name)
}

fn golden(name: &str) -> Value {
    serde_json::from_slice(&fs::read(fixture(name)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn it_knows_the_capital_of_france() {
    let answer = json(&["chat", "What is the capital of France?", "-m", model()]);
    assert!(answer["text"].as_str().unwrap().contains("Paris"), "{answer}");
    assert_eq!(answer["finish_reason"], "stop");
    // Plain output is the answer and nothing else.
    let text = stdout(&kvern(&["chat", "What is the capital of France?", "-m", model()]));
    assert_eq!(text.trim_end(), answer["text"].as_str().unwrap());
}

#[test]
fn a_long_story_stays_free_of_special_tokens() {
    let sampling = ["-t", "0.7", "--top-p", "0.9", "--seed", "3", "--repetition-penalty", "1.1"];
    let story = json(
        &[&["chat", "Tell me a long story about a lighthouse.", "-m", model(), "-n", "300"], &sampling[..]].concat(),
    );
    let text = story["text"].as_str().unwrap();
    assert!(story["tokens"].as_array().unwrap().len() > 100, "{text}");
    assert!(!text.contains("<|") && !text.contains('\u{FFFD}'), "{text}");
    let words: std::collections::BTreeSet<&str> = text.split_whitespace().collect();
    assert!(words.len() > 60, "a story does not repeat itself: {text}");
}

#[test]
fn a_conversation_remembers_its_beginning() {
    use std::io::Write;
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvern"))
        .args(["chat", "-m", model(), "-n", "40", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"What is the capital of France?\n\nAnd of Italy?\n").unwrap();
    let text = stdout(&child.wait_with_output().unwrap());
    let answers: Vec<Value> = serde_json::Deserializer::from_str(&text).into_iter().map(Result::unwrap).collect();
    assert_eq!(answers.len(), 2, "an empty line is no question: {text}");
    assert!(answers[1]["text"].as_str().unwrap().contains("Rome"), "{text}");
    let tokens = |answer: &Value| answer["prompt_tokens"].as_u64().unwrap();
    let said = answers[0]["tokens"].as_array().unwrap().len() as u64;
    assert!(tokens(&answers[1]) > tokens(&answers[0]) + said, "the first turn is part of the second prompt");
    let cached = |answer: &Value| answer["cached_tokens"].as_u64().unwrap();
    assert_eq!(cached(&answers[0]), 0);
    assert!(cached(&answers[1]) >= tokens(&answers[0]) + said - 1, "and is not computed again");
}

/// Stopped, saved, and gone on with in another process: the same tokens as in one go.
#[test]
fn a_generation_goes_on_from_a_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("story.kvern");
    let file = file.to_str().unwrap();
    let sampling = ["-m", model(), "-t", "0.8", "--seed", "5", "--json"];
    let generate = |flags: &[&str]| json(&[&["generate"], flags, &sampling[..6]].concat());
    let prompt = ["-p", "The lighthouse stood at the edge of"];
    let whole = generate(&[&prompt[..], &["-n", "60"]].concat());
    let first = generate(&[&prompt[..], &["-n", "25", "--save", file]].concat());
    let second = generate(&["--resume", file, "-n", "35"]);
    assert_eq!(ids(&whole["tokens"]), [ids(&first["tokens"]), ids(&second["tokens"])].concat());
    let count = |report: &Value, field: &str| report[field].as_u64().unwrap();
    assert_eq!(
        count(&second, "cached_tokens") + 1,
        count(&second, "prompt_tokens"),
        "the last token alone is computed"
    );

    let shown = json(&["inspect", file]);
    assert_eq!(shown["manifest"]["groups"][0]["columns"], second["cached_tokens"]);
    assert!(stdout(&kvern(&["inspect", file])).contains("every hash right"));

    // Another way to store state is another state.
    let refused = kvern(&["generate", "--resume", file, "-m", model(), "--kv", "f32"]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && message.contains("does not fit"), "{message}");
    let mut bytes = fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(file, bytes).unwrap();
    let refused = kvern(&["generate", "--resume", file, "-m", model()]);
    assert!(refused.status.code() == Some(1) && String::from_utf8_lossy(&refused.stderr).contains("has changed"));
}

#[test]
fn prompts_of_an_earlier_process_are_found_in_the_directory() {
    let directory = tempfile::tempdir().unwrap();
    let ask = |question: &str| {
        let system = "You answer in one short sentence, whatever the question may be, and never apologize.";
        json(&[
            "chat",
            question,
            "-m",
            model(),
            "-n",
            "12",
            "--system",
            system,
            "--prefix-dir",
            directory.path().to_str().unwrap(),
        ])
    };
    let first = ask("What is the capital of France?");
    let again = ask("What is the capital of France?");
    assert_eq!((&first["tokens"], first["cached_tokens"].as_u64()), (&again["tokens"], Some(0)));
    assert_eq!(again["cached_tokens"].as_u64().unwrap() + 1, again["prompt_tokens"].as_u64().unwrap());
    let other = ask("Where do penguins live?");
    assert!(other["cached_tokens"].as_u64().unwrap() > 20, "the system prompt is shared: {other}");
}

/// The disk is full, or the process dies in the middle of a write: no file of that name, or the older one, whole.
#[cfg(target_os = "linux")]
#[test]
fn a_save_that_cannot_finish_leaves_nothing_to_see() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("row.kvern");
    let run = |limits: &str| {
        let kvern = env!("CARGO_BIN_EXE_kvern");
        let command = format!(
            "{limits} exec {kvern} generate -m {} -p 'Some words to begin with' -n 20 --save {}",
            model(),
            file.display()
        );
        Command::new("sh").args(["-c", &command]).stdin(Stdio::null()).output().unwrap()
    };
    // Writing past the limit fails, or kills where nobody says otherwise.
    let full = run("trap '' XFSZ; ulimit -f 100;");
    assert_eq!(full.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&full.stderr).contains("cannot write"), "{full:?}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing stays behind");
    let killed = run("ulimit -f 100;");
    assert_eq!(killed.status.code(), None, "{killed:?}");
    assert!(!file.exists());
    assert!(run("").status.success());
    let whole = fs::read(&file).unwrap();
    assert_eq!(run("ulimit -f 100;").status.code(), None);
    assert_eq!(fs::read(&file).unwrap(), whole, "the older file is as it was");
}

#[test]
fn token_ids_are_those_of_llama_cpp() {
    let golden = golden("ids.json");
    let checkpoint = kvern_weights::Checkpoint::open(Path::new(model())).unwrap();
    let tokenizer = kvern_text::Text::load(checkpoint.source()).unwrap().tokenizer;
    for (index, text) in golden["texts"].as_array().unwrap().iter().enumerate() {
        let text = text.as_str().unwrap();
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids(&golden["ids"]["special"][index]), "{text:?}");
        assert_eq!(
            tokenizer.encode_plain(text).unwrap(),
            ids(&golden["ids"]["plain"][index]),
            "{text:?} as plain text"
        );
    }
}

#[test]
fn logits_are_those_of_exact_arithmetic() {
    let golden = golden("logits.json");
    let (rows, columns, best) = (ids(&golden["rows"]), ids(&golden["columns"]), ids(&golden["argmax"]));
    let want = fs::read(fixture("logits.bin")).unwrap();
    let want = safetensors::SafeTensors::deserialize(&want).unwrap();
    let floats =
        |data: &[u8]| -> Vec<f32> { data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect() };
    let want = floats(want.tensor("logits").unwrap().data());
    let directory = tempfile::tempdir().unwrap();
    let (tokens, output) = (directory.path().join("tokens.json"), directory.path().join("logits.safetensors"));
    fs::write(&tokens, golden["tokens"].to_string()).unwrap();
    let run = |flags: &[&str]| {
        let files = ["logits", "-m", model(), "--tokens", tokens.to_str().unwrap(), "-o", output.to_str().unwrap()];
        stdout(&kvern(&[&files, flags].concat()));
        let file = fs::read(&output).unwrap();
        let file = safetensors::SafeTensors::deserialize(&file).unwrap();
        let logits = file.tensor("logits").unwrap();
        let vocab = logits.shape()[1];
        let all = floats(logits.data());
        let mut worst = 0.0f32;
        for (row, (&position, &best)) in rows.iter().zip(&best).enumerate() {
            let logits = &all[position as usize * vocab..][..vocab];
            let found = (0..vocab).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            assert_eq!(found as u32, best, "position {position}");
            for (&column, want) in columns.iter().zip(&want[row * columns.len()..]) {
                worst = worst.max((logits[column as usize] - want).abs());
            }
        }
        worst
    };
    let exact = run(&["--exact"]);
    assert!(exact < 1e-4, "exact: {exact}");
    // 16-bit activations, and state in half precision.
    let fast = run(&[]);
    assert!(fast < 0.05, "fast: {fast}");
}

#[test]
fn perplexity_and_divergence_are_reported() {
    let text = tempfile::NamedTempFile::new().unwrap();
    fs::write(text.path(), golden("ids.json")["texts"].as_array().unwrap().last().unwrap().as_str().unwrap()).unwrap();
    let file = text.path().to_str().unwrap();
    let report = json(&["perplexity", "-m", model(), "-f", file, "--kv", "f16"]);
    let ppl = report["ppl"].as_f64().unwrap();
    assert!(ppl > 1.0 && ppl < 100.0, "{report}");
    assert!(report["kl_mean"].as_f64().unwrap() < 5e-4, "{report}");
    assert!(report["top1_agreement"].as_f64().unwrap() > 0.95, "{report}");
}

/// What each preset may cost on a short text: about twice what `docs/kv-quality.md` has for a long one.
#[test]
fn encoded_state_costs_no_more_than_is_known() {
    let text = tempfile::NamedTempFile::new().unwrap();
    fs::write(text.path(), diary(30, &[])).unwrap();
    let file = text.path().to_str().unwrap();
    let bounds = [("q8", 1e-3), ("k8v8", 1e-3), ("k8v4", 0.015), ("k5v4", 0.05), ("k4v4", 0.1), ("k4v3", 0.15)];
    for (kv, bound) in bounds {
        let report = json(&["perplexity", "-m", model(), "-f", file, "--kv", kv]);
        assert!(report["kl_mean"].as_f64().unwrap() < bound, "{kv}: {report}");
    }
    let message =
        |kv: &str| String::from_utf8(kvern(&["perplexity", "-m", model(), "-f", file, "--kv", kv]).stderr).unwrap();
    assert!(message("k9v9").contains("there are f32, f16, bf16, k8v8, q8"), "{}", message("k9v9"));
}

/// Days of a town of so many entries, with facts after a share of them.
fn diary(entries: usize, facts: &[(f64, &str)]) -> String {
    let places = ["harbour", "market", "old mill", "station", "library", "garden", "north gate", "bakery"];
    let things =
        ["a cart of apples", "two barrels of salt", "a letter", "a box of nails", "a new lantern", "a roll of cloth"];
    let days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
    let mut text = String::from("Here is the diary of a town.\n\n");
    for i in 0..entries {
        let (thing, place) = (things[(i * 5 + i / 6) % 6], places[(i * 3 + i / 8) % 8]);
        text += &format!("On {} the carrier brought {thing} to the {place}. ", days[i % 7]);
        for (_, fact) in facts.iter().filter(|(share, _)| (share * entries as f64) as usize == i) {
            text += fact;
            text.push(' ');
        }
    }
    text
}

#[test]
fn a_fact_in_a_long_context_is_recalled_with_every_preset() {
    let directory = tempfile::tempdir().unwrap();
    let presets = ["f32", "q8", "k8v8", "k8v4", "k8v3", "k5v4", "q4", "k4v4", "k4v3", "k4v2"];
    for (kv, (share, code)) in
        presets.into_iter().zip([(0.06, "7429"), (0.5, "3186"), (0.92, "5074")].into_iter().cycle())
    {
        let fact = format!("The secret number of the vault is {code}.");
        let prompt = diary(40, &[(share, &fact)]) + "\n\nThe diary says: the secret number of the vault is";
        let answer = json(&["generate", "-m", model(), "-p", &prompt, "-n", "5", "--kv", kv]);
        assert!(answer["text"].as_str().unwrap().contains(code), "{kv}: {answer}");
        if !["q8", "k4v3"].contains(&kv) {
            continue;
        }
        // Encoded state is saved as it is, and goes on with the same tokens.
        let file = directory.path().join(kv);
        let file = file.to_str().unwrap();
        let half = json(&["generate", "-m", model(), "-p", &prompt, "-n", "2", "--kv", kv, "--save", file]);
        let rest = json(&["generate", "-m", model(), "-n", "3", "--kv", kv, "--resume", file]);
        let tokens = |answer: &Value| ids(&answer["tokens"]);
        assert_eq!([tokens(&half), tokens(&rest)].concat(), tokens(&answer), "{kv}");
    }
}

#[test]
fn speed_is_reported_against_the_machine_s_limits() {
    let report = json(&[
        "bench",
        "-m",
        model(),
        "--prompt",
        "32",
        "--generate",
        "4",
        "--batch",
        "1,2",
        "--depth",
        "0,70",
        "--repeat",
        "1",
    ]);
    assert!(report["machine"]["read_gb_s"].as_f64().unwrap() > 0.0, "{report}");
    assert_eq!(report["prefill"].as_array().unwrap().len(), 1);
    assert_eq!(report["decode"].as_array().unwrap().len(), 4);
    assert!(report["decode"][3]["tok_s"].as_f64().unwrap() > 0.0, "{report}");
}

#[test]
fn inspecting_shows_what_a_row_costs() {
    let report = json(&["inspect", model()]);
    assert_eq!((&report["architecture"], &report["context"]), (&"llama".into(), &8192.into()));
    // 30 layers × 3 heads × (64 + 64) values × 2 bytes.
    assert_eq!(report["presets"][2]["bytes_per_token"], 23_040);
    assert!(stdout(&kvern(&["inspect", model()])).contains("23040"));
}

/// Runs a command that must fail with exit code 1 and a message that holds `expected`.
fn fails(arguments: &[&str], expected: &str) {
    let output = kvern(arguments);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {message}");
    assert!(message.starts_with("error: ") && message.contains(expected), "{arguments:?}: {message}");
}

#[test]
fn bad_input_is_explained() {
    let directory = tempfile::tempdir().unwrap();
    let cut = directory.path().join("cut.gguf");
    let whole = fs::read(model()).unwrap();
    fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    fails(&["chat", "hi", "-m", cut.to_str().unwrap()], "is the file truncated?");
    let mut flipped = whole[..10_000].to_vec();
    flipped[9] ^= 0x80;
    fs::write(&cut, flipped).unwrap();
    fails(&["chat", "hi", "-m", cut.to_str().unwrap()], "is more than the file can hold");
    fails(&["chat", "hi", "-m", "no-such-model"], "no model `no-such-model`");
    fails(&["chat", "hi", "-m", "someone/some-model"], "Hub ids are not fetched yet");
    fails(&["pull", "nothing"], "no model `nothing`");
    fails(&["chat", "hi", "-m", model(), "--isa", "mmx"], "instruction set `mmx` is not available");
    fails(&["chat", &"word ".repeat(9000), "-m", model()], "the context holds 8192");
    // Without a driver it says so, and with one, that there are not so many devices.
    fails(&["chat", "hi", "-m", model(), "--device", "cuda:99"], "CUDA");
    fails(&["chat", "hi", "-m", model(), "--ctx", "20"], "the context holds 20");
    fails(&["chat", "hi", "-m", model(), "--state-memory", "1"], "the budget is 1048576 bytes");
    fails(&["chat", "hi", "-m", model(), "--temperature=-1"], "temperature should be");
    fails(&["perplexity", "-m", model(), "-f", "/no/such/file"], "/no/such/file");
    fs::write(&cut, [0xFF, 0xFE, b'a']).unwrap();
    fails(&["perplexity", "-m", model(), "-f", cut.to_str().unwrap()], "is not a UTF-8 text");
    fails(
        &["logits", "-m", model(), "--tokens", cut.to_str().unwrap(), "-o", "/dev/null"],
        "is not a JSON array of token ids",
    );
}

#[test]
fn wrong_usage_exits_with_2() {
    for arguments in
        [&["chat", "--kv", "k9v9"][..], &["chat", "--device", "cuda:x"], &["chat", "--device", "tpu"], &["dance"]]
    {
        assert_eq!(kvern(arguments).status.code(), Some(2), "{arguments:?}");
    }
    #[cfg(unix)]
    {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;
        let output =
            Command::new(env!("CARGO_BIN_EXE_kvern")).arg("chat").arg(OsStr::from_bytes(b"\xff\xfe")).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("UTF-8"));
    }
}

#[test]
fn an_unwritable_cache_and_a_missing_network_are_explained() {
    let pull = |cache: &Path, environment: &[(&str, &str)]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvern"))
            .args(["pull", "smollm2"])
            .env("KVERN_CACHE", cache)
            .envs(environment.iter().copied())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    // A file where the directory should be is unwritable for everyone, root included.
    let file = tempfile::NamedTempFile::new().unwrap();
    let message = pull(&file.path().join("cache"), &[]);
    assert!(message.contains("cannot write") && message.contains("set KVERN_CACHE"), "{message}");
    let cache = tempfile::tempdir().unwrap();
    // Nothing listens on port 9 of this machine.
    let offline =
        [("PIP_INDEX_URL", "http://127.0.0.1:9/simple"), ("PIP_RETRIES", "0"), ("PIP_CONFIG_FILE", "/dev/null")];
    let message = pull(cache.path(), &offline);
    assert!(message.contains("cannot fetch `smollm2`") && message.contains("is there a network?"), "{message}");
    let message = pull(cache.path(), &[("PATH", "/nowhere")]);
    assert!(message.contains("cannot run python3"), "{message}");
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0, "nothing half-fetched is left behind");
}
