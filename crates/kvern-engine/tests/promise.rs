//! The promise: a row's tokens do not depend, to a bit, on what the engine does beside or below it.

mod failing;
#[path = "../../../tests/support/subjects.rs"]
mod subjects;

use std::fs;
use std::path::PathBuf;

use kvern_backend::{Backend, freeze};
use kvern_engine::{Engine, EngineOptions, Error, Event, Finish, Request, RequestId, Sampling};
use kvern_models::{KvPolicy, LoadOptions, load};
use kvern_state::{Batch, Codec, Demand, Identity, Limits, Pool, Preset, Tier};
use kvern_weights::Checkpoint;
use subjects::{Set, on, sets_of_fixtures as sets};

/// Full attention, with quantized weights too, windows of two pages and a bit in all layers, both, with capped scores, and recurrent layers.
const DENSE: [&str; 8] =
    ["llama", "llama-mlx", "qwen2", "qwen3", "mistral-window", "qwen2-window", "gemma2", "qwen3_5"];
/// Layers that share state; latents with an indexer, and experts; sinks.
const OTHERS: [&str; 3] = ["gemma4", "glm_moe_dsa", "gpt_oss"];

/// The models that this device has kernels for.
fn models() -> Vec<&'static str> {
    let cpu = sets().iter().all(|set| matches!(set, Set::Cpu(_)));
    DENSE.into_iter().chain(OTHERS.into_iter().filter(|&name| cpu || name == "gemma4")).collect()
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(name)
}

#[derive(Clone, Copy)]
struct Setup {
    model: &'static str,
    set: Set,
    threads: usize,
    kv: KvPolicy,
    /// Tokens of a step: how prompts are cut.
    step: usize,
}

impl Setup {
    /// The best instruction set and two threads.
    fn new(model: &'static str) -> Self {
        let set = *sets().last().unwrap();
        Self { model, set, threads: 2, kv: KvPolicy::default(), step: 64 }
    }
}

/// Every kernel set, or the best one for graphs that are new only above the kernels.
fn sets_for(model: &str) -> Vec<Set> {
    let all = sets();
    if OTHERS.contains(&model) { all[all.len() - 1..].to_vec() } else { all }
}

/// The model's own codec, others, one that begins late, and one that spares the first and the last layer.
fn policies(model: &str) -> Vec<KvPolicy> {
    let all = |codec| KvPolicy { codecs: Some((codec, codec)), ..KvPolicy::default() };
    let edges = Some((1, (Codec::F32, Codec::F16)));
    let late = KvPolicy { start: Some(41), ..all(Codec::Bf16) };
    if OTHERS.contains(&model) {
        // It is graphs that differ here; how state is stored is tried on those above.
        return vec![KvPolicy::default(), late];
    }
    let raw = [KvPolicy::default(), all(Codec::Bf16), all(Codec::F32), late, KvPolicy { edges, ..all(Codec::Bf16) }];
    raw.into_iter().chain(coded_policies(model)).collect()
}

/// Codes of every number of bits, with each policy; a model has a share of them, and only CPUs have any.
fn coded_policies(model: &str) -> Option<KvPolicy> {
    // Latents have no codes.
    let at = DENSE.iter().position(|name| *name == model)?;
    let names = ["k8v4", "k4v3", "q8", "k5v4", "turbo6/turbo2", "k8v3", "q4-rotated/turbo8", "q4"];
    let codecs = Preset::codecs(names[at]);
    let coded = match at % 3 {
        0 => KvPolicy { codecs, start: Some(41), edges: None },
        1 => KvPolicy { codecs, start: None, edges: Some((1, (Codec::F16, Codec::Bf16))) },
        _ => KvPolicy { codecs, start: None, edges: None },
    };
    Some(coded).filter(|_| sets().iter().all(|set| matches!(set, Set::Cpu(_))))
}

#[test]
fn a_request_whose_state_has_no_code_ends_and_others_do_not_notice() {
    // The embedding of one token becomes infinite.
    const BAD: u32 = 77;
    let directory = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture("llama")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, directory.path().join(path.file_name().unwrap())).unwrap();
    }
    let file = directory.path().join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = String::from_utf8(bytes[8..8 + header].to_vec()).unwrap();
    let table = &text[text.find("\"model.embed_tokens.weight\"").unwrap()..];
    let number = |after: &str| -> usize {
        let rest = &table[table.find(after).unwrap() + after.len()..];
        rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap()].parse().unwrap()
    };
    assert!(table[..60].contains("\"F16\""), "{}", &table[..60]);
    let width = table[table.find("\"shape\":[").unwrap()..].split([',', ']']).nth(1).unwrap().parse::<usize>().unwrap();
    let row = 8 + header + number("\"data_offsets\":[") + BAD as usize * width * 2;
    // Infinity in f16.
    bytes[row..row + 2].copy_from_slice(&0x7C00u16.to_le_bytes());
    fs::write(&file, bytes).unwrap();

    for (name, set) in ["q8", "k4v3"].into_iter().flat_map(|name| sets().into_iter().map(move |set| (name, set))) {
        let Set::Cpu(set) = set else { continue };
        let options = LoadOptions {
            kv: KvPolicy { codecs: Preset::codecs(name), ..KvPolicy::default() },
            page: 16,
            ..LoadOptions::default()
        };
        let engine = || {
            let backend = subjects::cpu(set, 2, false);
            let model = load(&backend, Checkpoint::open(directory.path()).unwrap(), &options).unwrap();
            Engine::new(backend, model, EngineOptions { max_rows: 4, ..EngineOptions::default() }).unwrap()
        };
        let good = |at: u32| Request::new((0..30).map(|i| (i * 5 + at) % 70).collect(), 12);
        let bad = Request::new((0..20).map(|i| if i == 13 { BAD } else { i }).collect(), 12);
        let want = run(&mut engine(), vec![good(1), good(2)]);
        let mut mixed = engine();
        let got = run(&mut mixed, vec![good(1), bad, good(2)]);
        let end = Finish::NotFinite { group: 0, layer: 0, column: 13 };
        assert_eq!(got[1].iter().map(|event| event.finish).collect::<Vec<_>>(), [Some(end)], "{name}");
        assert_eq!((bits(&got[0]), bits(&got[2])), (bits(&want[0]), bits(&want[1])));
        assert_eq!(residue(&mut mixed), (0, 0));
    }
}

fn engine(setup: &Setup, state_memory: u64) -> Engine {
    engine_keeping(setup, state_memory, EngineOptions::default().prefixes)
}

fn engine_keeping(setup: &Setup, state_memory: u64, prefixes: Limits) -> Engine {
    match setup.set {
        Set::Cpu(set) => engine_on(subjects::cpu(set, setup.threads, false), setup, state_memory, prefixes),
        // What is recorded gives the bits of what is not.
        Set::Cuda => engine_on(subjects::gpu(false, setup.threads == 1), setup, state_memory, prefixes),
    }
}

fn engine_on<B: Backend>(backend: B, setup: &Setup, state_memory: u64, prefixes: Limits) -> Engine {
    let options = LoadOptions { kv: setup.kv, max_tokens: 512, max_outputs: 64, page: 16, ..LoadOptions::default() };
    let model = load(&backend, Checkpoint::open(&fixture(setup.model)).unwrap(), &options).unwrap();
    let options = EngineOptions {
        max_rows: 64,
        max_tokens: setup.step,
        state_memory: Some(state_memory),
        prefixes,
        snapshot_stride: 48,
        ..EngineOptions::default()
    };
    Engine::new(backend, model, options).unwrap()
}

/// What is in use once nothing is kept.
fn residue(engine: &mut Engine) -> (u64, u64) {
    engine.prefixes().clear();
    (engine.usage().used, engine.usage().promised)
}

/// Requests of all kinds; the first is the one that is watched.
fn requests(count: usize) -> Vec<Request> {
    requests_drawn(count, false)
}

/// The same, of which those with even numbers want nothing that keeps a backend from drawing their tokens by itself, if it can.
fn requests_drawn(count: usize, plain: bool) -> Vec<Request> {
    let request = |index: usize| {
        let plain = plain && index.is_multiple_of(2);
        let length = [70, 3, 33, 1, 120, 16, 17][index % 7];
        let prompt = (0..length).map(|i| ((i * (index + 3) + index * index) % 96) as u32).collect();
        let sampling = Sampling {
            temperature: [0.8, 0.0, 1.5][index % 3],
            top_k: [0, 20][index % 2],
            top_p: [0.95, 1.0, 0.7][index % 3],
            min_p: [0.0, 0.02][index / 2 % 2],
            repetition_penalty: if plain { 1.0 } else { 1.1 },
            seed: index as u64,
            logprobs: (!plain).then_some(2),
            ..Sampling::default()
        };
        Request { sampling, ..Request::new(prompt, 24 + index % 5) }
    };
    (0..count).map(request).collect()
}

/// Runs everything and gives the events of each request, log-probabilities included.
fn run(engine: &mut Engine, requests: Vec<Request>) -> Vec<Vec<Event>> {
    let ids: Vec<RequestId> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut events = vec![Vec::new(); ids.len()];
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            events[ids.iter().position(|id| *id == event.id).unwrap()].push(event);
        }
    }
    events
}

/// What must be equal: id and bits of the log-probability of each token, and the end.
type Bits = (Option<(u32, Option<u32>)>, Option<Finish>);

/// Events without the names of their requests.
fn bits(events: &[Event]) -> Vec<Bits> {
    let token = |event: &Event| event.token.as_ref().map(|token| (token.id, token.logprob.map(f32::to_bits)));
    events.iter().map(|event| (token(event), event.finish)).collect()
}

#[test]
fn tokens_depend_on_the_request_alone() {
    for model in models() {
        for set in sets_for(model) {
            // Where the backend draws no tokens, both are the same.
            let plain = [false, true].into_iter().take(1 + usize::from(matches!(set, Set::Cuda)));
            for (kv, plain) in policies(model).into_iter().flat_map(|kv| plain.clone().map(move |plain| (kv, plain))) {
                let alone = Setup { model, set, threads: 1, kv, step: 512 };
                let want = bits(&run(&mut engine(&alone, 1 << 30), requests_drawn(1, plain))[0]);
                // The slower sets make do with fewer rows.
                let many = if set.name() == sets().last().unwrap().name() { 64 } else { 20 };
                for (company, threads, step) in
                    [(1, 2, 1), (2, 1, 7), (7, 2, 64), (many, 5, 512), (many / 2 + 1, 1, 33)]
                {
                    let setup = Setup { threads, step: step.max(company), ..alone };
                    let got = bits(&run(&mut engine(&setup, 1 << 30), requests_drawn(company, plain))[0]);
                    let how = format!("{model}, {}, {kv:?}, {company} rows, {threads} threads, {step}", set.name());
                    assert!(got == want, "{how}");
                }
            }
        }
    }
}

#[test]
fn tokens_do_not_depend_on_waiting_for_memory() {
    for model in models() {
        let setup = Setup::new(model);
        let mut roomy = engine(&setup, 1 << 30);
        let want: Vec<_> = run(&mut roomy, requests(10)).iter().map(|events| bits(events)).collect();
        // Room for the largest request, and little else; what is kept must give way all the time.
        let tight = roomy.info().spec.peak_bytes(Demand { tokens: 160, step: setup.step, round: 0 }) + 100;
        let mut engine = engine(&setup, tight);
        for _ in 0..2 {
            let got: Vec<_> = run(&mut engine, requests(10)).iter().map(|events| bits(events)).collect();
            assert!(got == want, "{model}");
        }
        assert_eq!(residue(&mut engine), (0, 0));
    }
}

#[test]
fn forks_and_rolled_back_drafts_leave_no_trace() {
    fn check<B: Backend>(backend: &B, model: &str, set: Set) {
        let options = LoadOptions { max_tokens: 128, page: 16, ..LoadOptions::default() };
        let mut model = load(backend, Checkpoint::open(&fixture(model)).unwrap(), &options).unwrap();
        let pool = Pool::new(model.info().spec.clone(), 1 << 24);
        let mut pages = backend.pages(pool.spec()).unwrap();
        let tokens: Vec<u32> = (0..100).map(|i| i * 7 % 96).collect();
        // Appends tokens to the only row of a batch or round; gives the logits of the last one.
        macro_rules! append {
            ($batch:expr, $tokens:expr) => {{
                let append = $batch.prepare_append(&[$tokens.len()]).unwrap();
                let plan = append.plan($tokens, &[$tokens.len() as u32 - 1]).unwrap();
                let step = backend.begin(plan, &mut pages).unwrap();
                let logits = model.forward(backend, &step, &mut pages).unwrap();
                let logits = backend.download(logits).unwrap();
                append.commit();
                logits
            }};
        }
        let start = || {
            let mut batch = Batch::new(&pool);
            batch.prepare_admit(vec![(pool.row(), 128)]).unwrap().commit();
            batch
        };
        let mut plain = start();
        append!(plain, &tokens[..40]);
        let want = append!(plain, &tokens[40..60]);
        for draft in 1..=20 {
            for keep in 0..=draft.min(4) {
                let mut batch = start();
                append!(batch, &tokens[..40]);
                // The draft begins with the true tokens and goes on with others.
                let drafted: Vec<u32> = (0..draft).map(|i| if i < keep { tokens[40 + i] } else { 5 }).collect();
                let mut round = batch.begin_round();
                append!(round, &drafted);
                round.commit(&[keep]).map_err(|(_, error)| error).unwrap();
                let mut fork = batch.fork();
                append!(fork, &[9; 3]);
                let got = append!(batch, &tokens[40 + keep..60]);
                assert!(got == want, "{}: {draft} drafted, {keep} kept", set.name());
                let state = |batch: &Batch| {
                    let row = &batch.rows()[0];
                    freeze(backend, &pages, row, Identity::default(), &tokens[..60]).unwrap().state_hash()
                };
                assert_eq!(state(&batch), state(&plain), "the state is that of a row that never drafted");
            }
        }
    }
    for model in models() {
        for set in sets_for(model) {
            on!(set, 2, false, |backend| check(backend, model, set));
        }
    }
}

#[test]
fn requests_that_cannot_run_are_refused_at_once() {
    let setup = Setup::new("llama");
    let mut engine = engine(&setup, 100_000);
    let submit = |engine: &mut Engine, request: Request| engine.submit(request).unwrap_err();
    assert!(matches!(submit(&mut engine, Request::new(vec![], 1)), Error::EmptyPrompt));
    assert!(matches!(submit(&mut engine, Request::new(vec![96], 1)), Error::Token { token: 96, vocab: 96 }));
    assert!(matches!(submit(&mut engine, Request::new(vec![1; 512], 1)), Error::Context { tokens: 512, context: 512 }));
    assert!(matches!(submit(&mut engine, Request::new(vec![1; 400], 100)), Error::Memory { tokens: 500, .. }));
    let sampling = Sampling { top_p: 2.0, ..Sampling::default() };
    let request = Request { sampling, ..Request::new(vec![1], 1) };
    assert!(matches!(submit(&mut engine, request), Error::Parameter { name: "top_p", .. }));
    assert!(engine.is_idle());
}

#[test]
fn generations_end_for_the_right_reason() {
    let setup = Setup::new("llama");
    let mut engine = engine(&setup, 1 << 30);
    let finish = |events: &[Event]| events.last().unwrap().finish;
    let limited = run(&mut engine, vec![Request::new(vec![1, 2, 3], 9)]).remove(0);
    assert_eq!((limited.len(), finish(&limited)), (9, Some(Finish::Length)));
    let third = limited[2].token.as_ref().unwrap().id;
    let first = limited.iter().position(|event| event.token.as_ref().unwrap().id == third).unwrap();
    let stopped = Request { stops: [third].into(), ..Request::new(vec![1, 2, 3], 9) };
    let stopped = run(&mut engine, vec![stopped]).remove(0);
    assert_eq!((stopped.len(), finish(&stopped)), (first + 1, Some(Finish::Stop)));
    assert_eq!(stopped.last().unwrap().token, None, "the stop token is no part of the answer");
    let full = run(&mut engine, vec![Request::new(vec![1; 500], 1000)]).remove(0);
    assert_eq!((full.len(), finish(&full)), (12, Some(Finish::Length)), "the context holds 512");
    let nothing = run(&mut engine, vec![Request::new(vec![1], 0)]).remove(0);
    assert_eq!((nothing.len(), finish(&nothing)), (1, Some(Finish::Length)));
}

#[test]
fn a_cancelled_request_is_gone_and_the_others_do_not_notice() {
    let setup = Setup::new("llama");
    let mut engine = engine(&setup, 1 << 30);
    let want: Vec<_> = run(&mut engine, requests(4)).iter().map(|events| bits(events)).collect();
    let ids: Vec<RequestId> = requests(4).into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut events = vec![Vec::new(); 4];
    for step in 0.. {
        if engine.is_idle() {
            break;
        }
        for event in engine.step().unwrap() {
            events[ids.iter().position(|id| *id == event.id).unwrap()].push(event);
        }
        if step == 5 {
            engine.cancel(ids[1]);
        }
    }
    for row in [0, 2, 3] {
        assert!(bits(&events[row]) == want[row], "row {row}");
    }
    assert!(events[1].len() < want[1].len());
    assert_eq!(residue(&mut engine), (0, 0));
}

/// The same prompts again, and prompts that part from them: nothing but the time changes, and the engine says how much it did not compute.
#[test]
fn kept_prefixes_change_no_bit() {
    for (model, kv) in models().into_iter().flat_map(|model| policies(model).into_iter().map(move |kv| (model, kv))) {
        let setup = Setup { kv, ..Setup::new(model) };
        let follow_up = |events: &[Event], base: &Request| {
            let answer = events.iter().filter_map(|event| event.token.as_ref().map(|token| token.id));
            let prompt: Vec<u32> = base.prompt.iter().copied().chain(answer).chain([5, 6, 7]).collect();
            Request { prompt, ..base.clone() }
        };
        let mut cold = engine_keeping(&setup, 1 << 30, Limits::default());
        let first = requests(7);
        let answers = run(&mut cold, first.clone());
        let second: Vec<Request> = answers.iter().zip(&first).map(|(events, base)| follow_up(events, base)).collect();
        let want: Vec<_> =
            [answers, run(&mut cold, second.clone())].map(|all| all.iter().map(|e| bits(e)).collect::<Vec<_>>()).into();
        let directory = tempfile::tempdir().unwrap();
        let on_disk = Limits { disk: 1 << 30, directory: Some(directory.path().into()), ..Limits::default() };
        // In pages, in the host's memory, in files, and in the files that another process left.
        let tiers = [
            ("pages", Limits { device: u64::MAX, ..Limits::default() }),
            ("host", Limits { host: u64::MAX, ..Limits::default() }),
            ("disk", on_disk.clone()),
            ("disk, again", on_disk),
        ];
        for (tier, limits) in tiers {
            let how = format!("{model}, {kv:?}, {tier}");
            let mut warm = engine_keeping(&setup, 1 << 30, limits);
            for round in 0..2 {
                for (requests, want) in [&first, &second].into_iter().zip(&want) {
                    let got = run(&mut warm, requests.clone());
                    for (row, (got, want)) in got.iter().zip(want).enumerate() {
                        assert!(bits(got) == *want, "{how}: request {row} of round {round}");
                        let (cached, prompt) = (got[0].cached, requests[row].prompt.len());
                        assert!(cached < prompt, "one token at least is computed");
                        // The second time, all but a page of it is there, whatever the length.
                        assert!(
                            round == 0 || cached + 16 >= prompt.min(kv.start.map_or(prompt, |_| 0)),
                            "{how}: {cached} of {prompt}"
                        );
                    }
                    warm.flush().unwrap();
                }
            }
            assert!(warm.prefixes().failures().is_empty());
            if tier.starts_with("disk") {
                assert!(warm.prefixes().bytes(Tier::Disk) > 0 && warm.prefixes().bytes(Tier::Device) == 0);
            } else {
                assert_eq!(residue(&mut warm), (0, 0));
            }
        }
    }
}

#[test]
fn a_fixed_beginning_is_found_by_its_second_use_whatever_follows() {
    for model in models() {
        let setup = Setup::new(model);
        let mut engine = engine(&setup, 1 << 30);
        let system: Vec<u32> = (0..77).map(|i| i * 11 % 96).collect();
        let request = |tail: u32| {
            let prompt = [system.clone(), (0..30).map(|i| (i * tail + 1) % 96).collect()].concat();
            Request { boundaries: vec![77], ..Request::new(prompt, 3) }
        };
        let cached: Vec<usize> = (1..4).map(|tail| run(&mut engine, vec![request(tail)])[0][0].cached).collect();
        assert!(cached[0] == 0 && cached[1] >= 77 && cached[2] >= 77, "{model}: {cached:?}");
        // Another salt shares nothing.
        let apart = Request { salt: "apart".into(), ..request(1) };
        assert_eq!(run(&mut engine, vec![apart])[0][0].cached, 0);
    }
}

/// A step fails in the middle of a layer: everything is as before, and the next attempt gives the same bits.
#[test]
fn a_failed_step_leaves_no_trace() {
    for model in models() {
        // What fails is a CPU.
        let set = Set::Cpu(*kvern_cpu::KernelSet::available().last().unwrap());
        let setup = Setup { set, ..Setup::new(model) };
        let want: Vec<_> = run(&mut engine(&setup, 1 << 30), requests(5)).iter().map(|events| bits(events)).collect();
        // Each step first fails at its first verb, then at its second, and so on through all layers.
        let (mut engine, left) = failing::engine(&fixture(model));
        let ids: Vec<RequestId> = requests(5).into_iter().map(|request| engine.submit(request).unwrap()).collect();
        let mut events = vec![Vec::new(); 5];
        let mut failed = 0;
        while !engine.is_idle() {
            for fuse in 0.. {
                left.store(fuse, std::sync::atomic::Ordering::Relaxed);
                match engine.step() {
                    Err(_) => failed += 1,
                    Ok(step) => {
                        for event in step {
                            events[ids.iter().position(|id| *id == event.id).unwrap()].push(event);
                        }
                        break;
                    }
                }
            }
        }
        let got: Vec<_> = events.iter().map(|events| bits(events)).collect();
        assert!(got == want && failed > 50, "{model}: {failed} failures");
    }
}
