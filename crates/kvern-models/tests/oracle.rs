//! Small random checkpoints against goldens of mlx-lm, with windows of transformers, in float32; see `tools/oracle/models.py`.

#[path = "../../../tests/support/subjects.rs"]
mod subjects;

use std::fs;
use std::path::{Path, PathBuf};

use kvern_backend::{Backend, Reference};
use kvern_models::{Error, KvPolicy, LoadOptions, Model, load};
use kvern_state::{Batch, Codec, Demand, Pool};
use kvern_weights::Checkpoint;
use safetensors::SafeTensors;
use serde_json::Value;
use subjects::{Set, on, sets_of_fixtures as sets};

const CASES: [&str; 28] = [
    "deepseek_v3",
    "deepseek_v32",
    "gemma2",
    "gemma4",
    "gemma4-moe",
    "gguf-gemma4",
    "gguf-gemma4-moe",
    "gguf-glm-dsa",
    "gguf-glm-dsa-shared",
    "gguf-gpt-oss",
    "gguf-qwen35moe",
    "glm_moe_dsa",
    "glm_moe_dsa-shared",
    "gpt_oss",
    "llama",
    "llama-tied",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "llama-mlx",
    "mistral",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
];
const LENGTHS: [&str; 2] = ["24", "200"];
const VOCAB: usize = 96;
/// The largest error of a logit in exact mode; logits range over about ±7.
const EXACT: f32 = 2e-4;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(name)
}

fn options(kv: Option<Codec>) -> LoadOptions<'static> {
    LoadOptions {
        kv: KvPolicy { codecs: kv.map(|codec| (codec, codec)), ..KvPolicy::default() },
        max_tokens: 256,
        max_outputs: 256,
        ..LoadOptions::default()
    }
}

fn open<B: Backend>(backend: &B, path: &Path, kv: Option<Codec>) -> Box<dyn Model<B>> {
    load(backend, checkpoint(path), &options(kv)).unwrap()
}

/// A checkpoint in a directory, which may be a GGUF file there.
fn checkpoint(path: &Path) -> Checkpoint {
    let whole = path.is_file() || path.join("config.json").is_file();
    Checkpoint::open(&if whole { path.to_path_buf() } else { path.join("model.gguf") }).unwrap()
}

/// The cases that a kernel set runs: a GPU has no kernels for experts and latents yet, and says so when it loads a model that has them.
fn cases(set: Set) -> Vec<&'static str> {
    let stacks = |case: &str| ["moe", "glm", "deepseek", "gpt", "next"].iter().any(|part| case.contains(part));
    CASES.into_iter().filter(|case| matches!(set, Set::Cpu(_)) || !stacks(case)).collect()
}

#[test]
fn a_device_without_kernels_for_a_model_says_so_when_it_loads_it() {
    for set in sets().into_iter().filter(|set| matches!(set, Set::Cuda)) {
        for case in CASES.into_iter().filter(|case| !cases(set).contains(case)) {
            let error = on!(set, 1, false, |backend| load(backend, checkpoint(&fixture(case)), &options(None)).err());
            assert!(matches!(error, Some(Error::Backend(kvern_backend::Error::Verb { verb: "stack" }))), "{case}");
        }
    }
}

/// Runs `tokens` in steps of `chunk` and gives the logits of all positions.
fn logits<B: Backend>(backend: &B, model: &mut dyn Model<B>, tokens: &[u32], chunk: usize) -> Vec<f32> {
    logits_at(backend, model, tokens, chunk, 1)
}

/// The same at every `every`th position of a step, and the last of each.
fn logits_at<B: Backend>(
    backend: &B,
    model: &mut dyn Model<B>,
    tokens: &[u32],
    chunk: usize,
    every: usize,
) -> Vec<f32> {
    let pool = Pool::new(model.info().spec.clone(), 1 << 30);
    let mut pages = backend.pages(pool.spec()).unwrap();
    let mut batch = Batch::new(&pool);
    batch.prepare_admit(vec![(pool.row(), tokens.len())]).unwrap().commit();
    let mut out = Vec::new();
    for tokens in tokens.chunks(chunk) {
        let append = batch.prepare_append(&[tokens.len()]).unwrap();
        let wanted = |i: &u32| (*i as usize).is_multiple_of(every) || *i as usize + 1 == tokens.len();
        let outputs: Vec<u32> = (0..tokens.len() as u32).filter(wanted).collect();
        let step = backend.begin(append.plan(tokens, &outputs).unwrap(), &mut pages).unwrap();
        let logits = model.forward(backend, &step, &mut pages).unwrap();
        out.extend(backend.download(logits).unwrap());
        append.commit();
    }
    out
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Largest error over the golden positions of all lengths; greedy tokens must be identical if `greedy`.
fn error<B: Backend>(backend: &B, path: &Path, goldens: &Path, kv: Option<Codec>, greedy: bool) -> f32 {
    let mut model = open(backend, path, kv);
    let file = fs::read(goldens.join("goldens.bin")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let tokens: Value = serde_json::from_slice(&fs::read(goldens.join("goldens.json")).unwrap()).unwrap();
    let mut worst = 0.0f32;
    for length in LENGTHS {
        let golden = file.tensor(&format!("logits.{length}")).unwrap();
        let golden: Vec<f32> = golden.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let mut row = ids(&tokens[length]["prompt"]);
        let got = logits(backend, model.as_mut(), &row, 256);
        let last = &got[got.len() - golden.len()..];
        for (got, want) in last.iter().zip(&golden) {
            let error = (got - want).abs();
            worst = if error <= worst { worst } else { error };
        }
        if greedy {
            let wanted = ids(&tokens[length]["greedy"]);
            let prompt = row.len();
            row.extend(&wanted);
            // What is chosen after the prompt and after each token that was chosen before.
            let got = logits(backend, model.as_mut(), &row, prompt);
            let next = got.chunks_exact(VOCAB).skip(prompt - 1);
            assert_eq!(next.map(argmax).take(wanted.len()).collect::<Vec<_>>(), wanted, "{}", path.display());
        }
    }
    worst
}

#[test]
fn the_reference_backend_computes_the_oracle_s_logits() {
    for case in CASES {
        let error = error(&Reference::new(), &fixture(case), &fixture(case), Some(Codec::F32), false);
        println!("{case}: {error:.1e}");
        assert!(error < EXACT, "{case}: {error}");
    }
}

#[test]
fn exact_mode_computes_the_oracle_s_logits_and_tokens() {
    for set in sets() {
        for case in cases(set) {
            let of = |path: &Path| on!(set, 2, true, |backend| error(backend, path, path, Some(Codec::F32), true));
            let error = of(&fixture(case));
            println!("{case}, {}: {error:.1e}", set.name());
            assert!(error < EXACT, "{case}, {}: {error}", set.name());
        }
    }
}

#[test]
fn state_in_half_precision_stays_within_its_bound() {
    // Where columns are picked, one that is picked in place of another moves logits by as much as it weighs.
    let picks = |case: &str| case.contains("glm") || case == "deepseek_v32";
    for set in sets() {
        for case in cases(set).into_iter().filter(|case| !picks(case)) {
            let of = |path: &Path| on!(set, 2, false, |backend| error(backend, path, path, None, false));
            let error = of(&fixture(case));
            // Logits range over about ±10; keys and values carry 11 bits, and on a GPU so do activations and decoded weights.
            assert!(error < if matches!(set, Set::Cuda) { 0.2 } else { 0.05 }, "{case}, {}: {error}", set.name());
        }
    }
}

#[test]
fn a_gguf_file_gives_the_same_bits_as_its_checkpoint() {
    let tokens: Vec<u32> = (0..70).map(|i| i * 5 % VOCAB as u32).collect();
    let from = |path: &Path| {
        on!(sets()[0], 2, false, |backend| logits(backend, open(backend, path, None).as_mut(), &tokens, 256))
    };
    assert!(from(&fixture("llama")) == from(&fixture("llama/model.gguf")));
    // A GGUF file does not say by what Gemma 2 scales its scores; all published models but one scale by the head dimension.
    let scaled = changed("gemma2", |config| config["query_pre_attn_scalar"] = 16.into());
    assert!(from(scaled.path()) == from(&fixture("gemma2/model.gguf")));
}

/// The draft head of a model: its logits at every position of a prompt that comes in chunks, with rejected guesses in between, and three guesses in a row.
fn draft_error<B: Backend>(backend: &B, case: &str, chunk: usize) -> f32 {
    let kv = Some(Codec::F32);
    let options = LoadOptions { draft: true, ..options(kv) };
    let mut model = load(backend, Checkpoint::open(&fixture(case)).unwrap(), &options).unwrap();
    let file = fs::read(fixture(case).join("goldens.bin")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let tokens: Value = serde_json::from_slice(&fs::read(fixture(case).join("goldens.json")).unwrap()).unwrap();
    let mut worst = 0.0f32;
    for length in LENGTHS {
        let prompt = ids(&tokens[length]["prompt"]);
        let pool = Pool::new(model.info().spec.clone(), 1 << 30);
        let mut pages = backend.pages(pool.spec()).unwrap();
        let mut batch = Batch::new(&pool);
        let demand = Demand { tokens: prompt.len() + 8, step: chunk, round: 4 };
        batch.prepare_admit(vec![(pool.row(), demand)]).unwrap().commit();
        // Guesses from `token`, each from the one before it.
        macro_rules! guesses {
            ($round:expr, $token:expr, $count:expr) => {{
                let (mut token, mut guesses) = ($token, Vec::new());
                for guess in 1..=$count {
                    let append = $round.prepare_draft(&[1]).unwrap();
                    let step = backend.begin(append.plan(&[token], &[0]).unwrap(), &mut pages).unwrap();
                    let logits = model.draft(backend, &step, &mut pages, guess).unwrap().unwrap();
                    token = argmax(&backend.download(logits).unwrap());
                    append.commit();
                    guesses.push(token);
                }
                guesses
            }};
        }
        let mut got = Vec::new();
        for piece in prompt.chunks(chunk) {
            if !batch.rows()[0].is_empty() {
                // Guesses that lead nowhere, and a verification of which nothing is kept.
                let mut round = batch.begin_round();
                guesses!(round, 7, 2);
                let append = round.prepare_append(&[3]).unwrap();
                let step = backend.begin(append.plan(&[7, 8, 9], &[]).unwrap(), &mut pages).unwrap();
                model.forward(backend, &step, &mut pages).unwrap();
                model.draft(backend, &step, &mut pages, 0).unwrap();
                append.commit();
                round.commit(&[0]).map_err(|(_, error)| error).unwrap();
            }
            let append = batch.prepare_append(&[piece.len()]).unwrap();
            let outputs: Vec<u32> = (0..piece.len() as u32).collect();
            let step = backend.begin(append.plan(piece, &outputs).unwrap(), &mut pages).unwrap();
            model.forward(backend, &step, &mut pages).unwrap();
            let logits = model.draft(backend, &step, &mut pages, 0).unwrap().unwrap();
            got.extend(backend.download(logits).unwrap());
            append.commit();
        }
        let golden = file.tensor(&format!("draft.{length}")).unwrap();
        let golden: Vec<f32> = golden.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        // The first token has no hidden state before it.
        let last = &got[VOCAB..][got.len() - VOCAB - golden.len()..];
        for (got, want) in last.iter().zip(&golden) {
            let error = (got - want).abs();
            worst = if error <= worst { worst } else { error };
        }
        let mut round = batch.begin_round();
        assert_eq!(guesses!(round, ids(&tokens[length]["greedy"])[0], 3), ids(&tokens[length]["guesses"]));
    }
    worst
}

#[test]
fn draft_heads_make_the_oracle_s_guesses() {
    for case in ["glm_moe_dsa", "qwen3_5", "qwen3_5_moe"] {
        let error = draft_error(&Reference::new(), case, 256);
        assert!(error < EXACT, "{case}: {error}");
        for set in sets().into_iter().filter(|&set| cases(set).contains(&case)) {
            for chunk in [1, 7, 256] {
                let error = on!(set, 2, true, |backend| draft_error(backend, case, chunk));
                assert!(error < EXACT, "{case}, {}, chunks of {chunk}: {error}", set.name());
            }
        }
    }
}

/// Greedy tokens after a prompt, and three guesses in a row after each of them, of a model with its draft head.
fn guess_along<B: Backend>(backend: &B, path: &Path, prompts: &[Vec<u32>], count: usize) -> Vec<(Vec<u32>, Vec<u32>)> {
    let options = LoadOptions { draft: true, ..options(Some(Codec::F32)) };
    let mut model = load(backend, Checkpoint::open(path).unwrap(), &options).unwrap();
    let along = |prompt: &Vec<u32>| {
        let pool = Pool::new(model.info().spec.clone(), 1 << 30);
        let (mut pages, mut batch) = (backend.pages(pool.spec()).unwrap(), Batch::new(&pool));
        let demand = Demand { tokens: prompt.len() + count + 8, step: prompt.len(), round: 4 };
        batch.prepare_admit(vec![(pool.row(), demand)]).unwrap().commit();
        let (mut greedy, mut guesses, mut piece) = (Vec::new(), Vec::new(), prompt.clone());
        for _ in 0..count {
            let append = batch.prepare_append(&[piece.len()]).unwrap();
            let last = piece.len() as u32 - 1;
            let step = backend.begin(append.plan(&piece, &[last]).unwrap(), &mut pages).unwrap();
            let next = argmax(&backend.download(model.forward(backend, &step, &mut pages).unwrap()).unwrap());
            model.draft(backend, &step, &mut pages, 0).unwrap();
            append.commit();
            greedy.push(next);
            let (mut round, mut token) = (batch.begin_round(), next);
            for guess in 1..=3 {
                let append = round.prepare_draft(&[1]).unwrap();
                let step = backend.begin(append.plan(&[token], &[0]).unwrap(), &mut pages).unwrap();
                let logits = model.draft(backend, &step, &mut pages, guess).unwrap().unwrap();
                token = argmax(&backend.download(logits).unwrap());
                append.commit();
                guesses.push(token);
            }
            piece = vec![next];
        }
        (greedy, guesses)
    };
    prompts.iter().map(along).collect()
}

/// Trained models: the guesses after each token of a greedy continuation are those of their makers, and as many are right as these measured.
#[test]
#[ignore = "KVERN_TRAINED names a directory with trained models, KVERN_PROMPTS a JSON list of prompts of 192 tokens"]
fn draft_heads_of_trained_models_guess_as_their_makers_say() {
    let root = PathBuf::from(std::env::var("KVERN_TRAINED").unwrap());
    let prompts: Vec<Vec<u32>> =
        serde_json::from_slice(&fs::read(std::env::var("KVERN_PROMPTS").unwrap()).unwrap()).unwrap();
    for (name, accepted) in [("tiny-qwen3_5", [0.930, 0.874, 0.827]), ("tiny-glm5", [0.936, 0.883, 0.840])] {
        let path = root.join(name);
        let file = fs::read(path.join("goldens.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&file).unwrap();
        let numbers = |name: &str| -> Vec<u32> {
            let tensor = file.tensor(name).unwrap();
            let step = tensor.data().len() / tensor.shape().iter().product::<usize>();
            tensor.data().chunks(step).map(|bytes| u32::from_le_bytes(bytes[..4].try_into().unwrap())).collect()
        };
        let set = *sets().last().unwrap();
        let run =
            |prompts: &[Vec<u32>], count| on!(set, 2, true, |backend| guess_along(backend, &path, prompts, count));
        let golden = &run(&[numbers("p64.ids")], 64)[0];
        assert_eq!((&golden.0, &golden.1), (&numbers("p64.greedy"), &numbers("p64.mtp_drafts")), "{name}");
        let (mut right, mut all) = ([0; 3], [0; 3]);
        for (greedy, guesses) in run(&prompts, 128) {
            for (done, guesses) in guesses.chunks_exact(3).enumerate() {
                let equal = guesses.iter().zip(&greedy[done + 1..]).take_while(|(a, b)| a == b).count();
                for depth in 0..3 {
                    // Only where the continuation is long enough to tell.
                    all[depth] += usize::from(done + 1 + depth < greedy.len());
                    right[depth] += usize::from(equal > depth);
                }
            }
        }
        for depth in 0..3 {
            let rate = right[depth] as f64 / all[depth] as f64;
            println!("{name}, depth {}: {rate:.3}, its makers' {}", depth + 1, accepted[depth]);
            assert!((rate - accepted[depth]).abs() < 0.02 || prompts.len() < 64);
        }
    }
}

#[test]
fn chunks_do_not_change_a_bit() {
    for set in sets() {
        for case in cases(set) {
            let tokens: Vec<u32> = (0..150).map(|i| i * i % VOCAB as u32).collect();
            let by = |chunk: usize| {
                on!(set, 2, false, |backend| {
                    logits(backend, open(backend, &fixture(case), None).as_mut(), &tokens, chunk)
                })
            };
            let whole = by(256);
            for chunk in [1, 7, 64] {
                assert!(by(chunk) == whole, "{case}, {}, chunks of {chunk}", set.name());
            }
        }
    }
}

/// A graph may leave out what no logits are wanted of; what it computes stays the same.
#[test]
fn logits_where_they_are_wanted_are_those_of_every_position() {
    for set in sets() {
        for case in cases(set) {
            let tokens: Vec<u32> = (0..90).map(|i| i * i % VOCAB as u32).collect();
            let at = |every: usize| {
                on!(set, 2, false, |backend| {
                    logits_at(backend, open(backend, &fixture(case), None).as_mut(), &tokens, 40, every)
                })
            };
            let (all, some) = (at(1), at(7));
            let wanted = (0..90).filter(|i| (i % 40) % 7 == 0 || i % 40 == 39 || *i == 89);
            let want: Vec<f32> = wanted.flat_map(|i| &all[i * VOCAB..][..VOCAB]).copied().collect();
            assert!(some == want, "{case}, {}", set.name());
        }
    }
}

/// A fixture with a changed configuration.
fn changed(case: &str, change: impl Fn(&mut Value)) -> tempfile::TempDir {
    let (from, directory) = (fixture(case), tempfile::tempdir().unwrap());
    let mut config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    fs::copy(from.join("model.safetensors"), directory.path().join("model.safetensors")).unwrap();
    directory
}

/// Why a fixture with a changed configuration cannot be loaded.
fn refused(case: &str, change: impl Fn(&mut Value)) -> Error {
    let directory = changed(case, change);
    match load(&Reference::new(), Checkpoint::open(directory.path()).unwrap(), &options(None)) {
        Ok(_) => panic!("the configuration was accepted"),
        Err(error) => error,
    }
}

#[test]
fn configurations_that_make_no_sense_are_errors_that_name_the_field() {
    let cases: [(&str, Value, &str); 9] = [
        ("model_type", "mystery".into(), "the architecture `mystery` is not supported"),
        ("model_type", Value::Null, "`model_type`"),
        ("hidden_size", Value::Null, "`hidden_size`"),
        ("hidden_size", (-3).into(), "`hidden_size`"),
        ("num_key_value_heads", 3.into(), "`num_attention_heads` should be a multiple"),
        ("rope_scaling", serde_json::json!({ "rope_type": "spiral" }), "`rope_type`"),
        ("rope_scaling", serde_json::json!({ "rope_type": "linear" }), "`rope_scaling.factor`"),
        ("rope_theta", 0.5.into(), "`rope_theta`"),
        ("vocab_size", 97.into(), "tensor `model.embed_tokens.weight` should have the shape [97, 32], found [96, 32]"),
    ];
    for (field, value, expected) in cases {
        let error = refused("llama", |config| config[field] = value.clone()).to_string();
        assert!(error.contains(expected), "{field}: {error}");
    }
    let error = refused("llama", |config| config["num_hidden_layers"] = 1.into()).to_string();
    assert!(error.contains("belong to no part of this model"), "{error}");
    let error = refused("llama", |config| config["num_hidden_layers"] = 3.into()).to_string();
    assert!(error.contains("`model.layers.2.") && error.contains("missing"), "{error}");
}

#[test]
fn configurations_of_gemma2_that_make_no_sense_are_errors_too() {
    let cases: [(&str, Value, &str); 6] = [
        ("query_pre_attn_scalar", 0.into(), "`query_pre_attn_scalar`"),
        ("final_logit_softcapping", (-1).into(), "`final_logit_softcapping`"),
        ("hidden_activation", "relu".into(), "`hidden_activation`"),
        ("layer_types", serde_json::json!(["full_attention"]), "`layer_types`"),
        ("layer_types", serde_json::json!(["full_attention", "full_attention", "round"]), "`layer_types`"),
        ("num_key_value_heads", 3.into(), "`num_attention_heads`"),
    ];
    for (field, value, expected) in cases {
        let error = refused("gemma2", |config| config[field] = value.clone()).to_string();
        assert!(error.contains(expected), "{field}: {error}");
    }
}

#[test]
fn configurations_of_experts_and_latents_that_make_no_sense_are_errors_too() {
    let rope = |kind: &str| serde_json::json!({ "rope_type": kind, "rope_theta": 500.0 });
    let cases: [(&str, &str, Value, &str); 18] = [
        ("deepseek_v32", "n_routed_experts", 6.into(), "`n_routed_experts` should be a multiple of n_group"),
        ("deepseek_v32", "topk_group", 5.into(), "`topk_group`"),
        ("glm_moe_dsa", "n_routed_experts", 9.into(), "`model.layers.1.mlp.gate.weight` should have the shape [9, 32]"),
        ("glm_moe_dsa", "moe_intermediate_size", 32.into(), "`model.layers.1.mlp.experts.0.gate_proj.weight`"),
        ("glm_moe_dsa", "topk_method", "greedy".into(), "`topk_method`"),
        ("glm_moe_dsa", "scoring_func", "softmax".into(), "`scoring_func`"),
        ("glm_moe_dsa", "index_head_dim", 8.into(), "`index_head_dim`"),
        ("glm_moe_dsa", "num_hidden_layers", 5.into(), "`model.layers.4.input_layernorm.weight` is missing"),
        ("glm_moe_dsa", "rope_parameters", rope("spiral"), "`rope_type`"),
        ("glm_moe_dsa-shared", "indexer_types", serde_json::json!(["full", "shared", "full"]), "`indexer_types`"),
        (
            "glm_moe_dsa-shared",
            "indexer_types",
            serde_json::json!(["shared", "full", "full", "full"]),
            "`indexer_types`",
        ),
        (
            "glm_moe_dsa-shared",
            "indexer_types",
            serde_json::json!(["full", "shared", "shared", "shared"]),
            "belong to no part of this model, the first is `model.layers.2.self_attn.indexer",
        ),
        ("gpt_oss", "num_experts_per_tok", 7.into(), "`num_experts_per_tok`"),
        (
            "gpt_oss",
            "intermediate_size",
            48.into(),
            "`model.layers.0.mlp.experts.gate_up_proj_blocks` should have the shape",
        ),
        ("gpt_oss", "sliding_window", 0.into(), "`sliding_window`"),
        ("qwen3_next", "num_experts_per_tok", 7.into(), "`num_experts_per_tok`"),
        ("qwen3_next", "linear_num_value_heads", 3.into(), "`linear_num_value_heads`"),
        ("qwen3_next", "mlp_only_layers", serde_json::json!([-1]), "`mlp_only_layers`"),
    ];
    for (case, field, value, expected) in cases {
        let error = refused(case, |config| config[field] = value.clone()).to_string();
        assert!(error.contains(expected), "{case}, {field}: {error}");
    }
    let text: [(&str, Value, &str); 6] = [
        ("num_kv_shared_layers", 5.into(), "`text_config.num_kv_shared_layers` should be fewer"),
        ("num_kv_shared_layers", 3.into(), "`text_config.num_kv_shared_layers` should be preceded"),
        ("hidden_activation", "relu".into(), "`text_config.hidden_activation`"),
        ("rope_parameters", serde_json::json!({ "full_attention": rope("spiral") }), "`rope_type`"),
        ("use_bidirectional_attention", "all".into(), "`text_config.use_bidirectional_attention`"),
        ("use_double_wide_mlp", false.into(), "`model.layers.3.mlp.gate_proj.weight` should have the shape [64, 32]"),
    ];
    for (field, value, expected) in text {
        let error = refused("gemma4", |config| config["text_config"][field] = value.clone()).to_string();
        assert!(error.contains(expected), "gemma4, {field}: {error}");
    }
}

#[test]
fn layers_of_one_kind_share_a_group() {
    let spec = |case: &str, kv: KvPolicy| {
        let options = LoadOptions { kv, ..options(None) };
        let model = load(&Reference::new(), Checkpoint::open(&fixture(case)).unwrap(), &options).unwrap();
        model.info().spec.clone()
    };
    let layers = |spec: &kvern_state::StateSpec| -> Vec<usize> { spec.groups().iter().map(|g| g.layers).collect() };
    let plain = spec("qwen2-window", KvPolicy::default());
    assert_eq!(layers(&plain), [1, 2]);
    assert_eq!(plain.groups()[1].window.map(|window| (window.size, window.sinks)), Some((50, 0)));
    let half = (Codec::F16, Codec::F16);
    let edges = KvPolicy { edges: Some((1, (Codec::F32, Codec::F32))), codecs: Some(half), start: None };
    assert_eq!(layers(&spec("qwen2-window", edges)), [1, 1, 1], "the first, the middle and the last layer differ");
    let late = spec("llama", KvPolicy { start: Some(100), codecs: Some((Codec::Bf16, Codec::Bf16)), edges: None });
    assert_eq!(late.groups()[0].late.as_ref().map(|late| late.start), Some(100));
    assert_eq!(late.groups()[0].planes[0].codec, Codec::F16, "the weights' own type comes first");
}
