//! What row operations cost: a batch of 64 rows of 8 k tokens, against a cache that keeps each row in one dense block and copies it.
//!
//! `cargo bench -p kvern-state` prints one JSON object; times are medians in microseconds.

use std::hint::black_box;
use std::time::Instant;

use kvern_state::{
    Batch, Codec, Demand, Error, GroupSpec, Identity, Image, Limits, Pool, PrefixIndex, StateSpec, Window,
};

const ROWS: usize = 64;
const TOKENS: usize = 8192;

/// Median of many runs of `run`, each after a fresh `prepare`.
fn median<T>(runs: usize, mut prepare: impl FnMut() -> T, mut run: impl FnMut(T) -> T) -> f64 {
    let times: Vec<f64> = (0..runs)
        .map(|_| {
            let state = prepare();
            let start = Instant::now();
            let state = black_box(run(state));
            let time = start.elapsed().as_secs_f64() * 1e6;
            drop(state);
            time
        })
        .collect();
    middle(times)
}

fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn batch(pool: &Pool, rows: usize, tokens: usize) -> Batch {
    let mut batch = Batch::new(pool);
    let demand = Demand { tokens: tokens + 64, step: 512, round: 8 };
    batch.prepare_admit((0..rows).map(|_| (pool.row(), demand)).collect()).unwrap().commit();
    for _ in 0..tokens / 512 {
        batch.prepare_append(&vec![512; rows]).unwrap().commit();
    }
    batch
}

fn main() {
    // The groups of a hybrid: full attention, windows, recurrent states and a draft head, in the size of SmolLM2's state.
    let attention = |layers| GroupSpec::attention(layers, 3, 64, 64, (Codec::F16, Codec::F16));
    let spec = StateSpec::new(64, vec![attention(30)]).unwrap();
    let hybrid = vec![
        attention(8),
        attention(20).windowed(Window { size: 1024, sinks: 0 }),
        GroupSpec::recurrent(24, &[("tail", 1 << 10), ("state", 1 << 16)]),
        attention(1).companion(1),
    ];
    let hybrid = StateSpec::new(64, hybrid).unwrap();
    let mut report = serde_json::Map::new();
    for (name, spec) in [("full", &spec), ("hybrid", &hybrid)] {
        let pool = Pool::new(spec.clone(), 1 << 50);
        let base = batch(&pool, ROWS, TOKENS);
        let all: Vec<usize> = (0..ROWS).collect();
        let half: Vec<usize> = (0..ROWS).step_by(2).rev().collect();
        let demand = Demand { tokens: TOKENS + 64, step: 1, round: 8 };
        let runs = 301;
        let mut ops = serde_json::Map::new();
        let mut op = |name: &str, time: f64| ops.insert(name.into(), serde_json::json!((time * 100.0).round() / 100.0));
        op("fork", median(runs, || None, |_| Some(base.fork())));
        op(
            "filter and reorder to half",
            median(
                runs,
                || base.fork(),
                |mut batch| {
                    batch.filter(&half).unwrap();
                    batch
                },
            ),
        );
        op(
            "extract",
            median(
                runs,
                || (base.fork(), None),
                |(mut batch, _)| {
                    let row = batch.extract(17).unwrap();
                    (batch, Some(row))
                },
            ),
        );
        op(
            "admit all",
            median(
                runs,
                || {
                    let mut from = base.fork();
                    let rows = all.iter().map(|_| (from.extract(0).unwrap(), demand)).collect();
                    (Batch::new(&pool), Some(rows))
                },
                |(mut batch, rows): (Batch, Option<Vec<_>>)| {
                    batch.prepare_admit(rows.unwrap()).unwrap().commit();
                    (batch, None)
                },
            ),
        );
        let mut running = batch(&pool, ROWS, TOKENS - 512);
        let (mut prepare, mut commit) = (Vec::new(), Vec::new());
        for _ in 0..runs {
            let start = Instant::now();
            let append = running.prepare_append(&[1; ROWS]).unwrap();
            let prepared = Instant::now();
            append.commit();
            prepare.push((prepared - start).as_secs_f64() * 1e6);
            commit.push(prepared.elapsed().as_secs_f64() * 1e6);
        }
        op("prepare a step", middle(prepare));
        op("commit a step", middle(commit));
        let mut running = batch(&pool, ROWS, TOKENS);
        let mut rollback = Vec::new();
        for _ in 0..runs {
            let mut round = running.begin_round();
            round.prepare_append(&[5; ROWS]).unwrap().commit();
            let start = Instant::now();
            round.commit(&[0; ROWS]).map_err(|(_, error)| error).unwrap();
            rollback.push(start.elapsed().as_secs_f64() * 1e6);
        }
        op("roll back a round of 5 tokens", middle(rollback));
        report.insert(name.into(), ops.into());
    }

    // The same with dense rows: extracting, forking or reordering copies columns. One layer of thirty, to fit any machine.
    let row_bytes = spec.row_bytes(TOKENS) as usize / 30;
    let dense: Vec<Vec<u8>> = (0..ROWS).map(|row| vec![row as u8; row_bytes]).collect();
    let fork = 30.0 * median(5, Vec::new, |_| dense.clone());
    let extract = 30.0 * median(5, Vec::new, |_: Vec<u8>| dense[17].clone());
    let dense = serde_json::json!({ "fork": fork.round(), "extract": extract.round() });
    report.insert("dense, thirty times one layer".into(), dense);

    // A prefix of 100 k tokens, found among others.
    let pool = Pool::new(spec.clone(), 1 << 50);
    let mut index = PrefixIndex::new(&spec, Limits { device: u64::MAX, ..Limits::default() }).unwrap();
    let identity = Identity::default();
    let tokens: Vec<u32> = (0..100_352).map(|i| i * 7919 % 49152).collect();
    index.insert(&identity, &tokens, batch(&pool, 1, tokens.len()).extract(0).unwrap());
    for salt in 1..100u32 {
        let other: Vec<u32> = (0..1024).map(|i| (i + salt) * 7919 % 49152).collect();
        index.insert(&identity, &other, batch(&pool, 1, other.len()).extract(0).unwrap());
    }
    let mut wanted = tokens.clone();
    wanted.push(1);
    let lookup = median(301, || None, |_| index.lookup(&identity, &wanted));
    let more = |row: &kvern_state::Row| {
        let mut longer = Batch::new(&pool);
        longer.prepare_admit(vec![(row.fork(), row.len() + 64)]).unwrap().commit();
        longer.prepare_append(&[64]).unwrap().commit();
        longer.extract(0).unwrap()
    };
    let mut row = batch(&pool, 1, tokens.len()).extract(0).unwrap();
    let mut inserts = Vec::new();
    for _ in 0..31 {
        row = more(&row);
        wanted.resize(row.len(), 5);
        let frozen = row.fork();
        let start = Instant::now();
        index.insert(&identity, &wanted, frozen);
        inserts.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let insert = middle(inserts);
    report.insert("prefix of 100 k tokens".into(), serde_json::json!({ "lookup": lookup, "insert": insert }));

    // A frozen row into a file and back, without a backend's part.
    let row = batch(&pool, 1, TOKENS).extract(0).unwrap();
    let fill = |piece: kvern_state::Piece<&mut [u8]>| -> Result<(), Error> {
        piece.bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 31 % 251) as u8);
        Ok(())
    };
    let image = Image::capture(&row, identity, &tokens[..TOKENS], fill).unwrap();
    let path = std::env::temp_dir().join(format!("kvern-bench-{}.kvern", std::process::id()));
    let save = median(3, || 0, |_| image.save(&path).unwrap());
    let load = median(9, || None, |_| Some(Image::load(&path).unwrap()));
    std::fs::remove_file(&path).unwrap();
    let rate = |time: f64| image.bytes() as f64 / time / 1e3;
    let file = serde_json::json!({ "bytes": image.bytes(), "save_gb_s": rate(save), "map_and_check_gb_s": rate(load) });
    report.insert("checkpoint of 8 k tokens".into(), file);
    println!("{:#}", serde_json::Value::Object(report));
}
