//! Attention against the reference backend, and its bits under every way of computing it.

mod common;
#[path = "../../../tests/support/subjects.rs"]
mod subjects;

use common::{difference, tensor, values};
use kvern_backend::{Attention, Backend, Reference, Slot, freeze};
use kvern_cpu::KernelSet;
use kvern_state::{Batch, Codec, GroupSpec, Identity, Kind, Pool, StateSpec, StepPlan, View, Window};
use subjects::{Set, cpu, on, sets};

/// One case: the state, what attention computes, and the length of each row.
#[derive(Clone)]
struct Case {
    group: GroupSpec,
    heads: usize,
    softcap: Option<f32>,
    sinks: bool,
    page: usize,
    rows: Vec<usize>,
    /// Attend in steps of one token alone, where only the last one of a long row matters.
    quiet: bool,
}

impl Case {
    fn of(heads: usize, group: GroupSpec, rows: &[usize]) -> Self {
        Self { group, heads, softcap: None, sinks: false, page: 64, rows: rows.to_vec(), quiet: false }
    }

    fn new(heads: usize, kv_heads: usize, dim: usize, rows: &[usize]) -> Self {
        Self::of(heads, attention(kv_heads, dim, dim, HALF), rows)
    }

    fn windowed(mut self, size: usize, sinks: usize) -> Self {
        self.group = self.group.windowed(Window { size, sinks });
        self
    }

    fn spec(&self) -> StateSpec {
        StateSpec::new(self.page, vec![self.group.clone()]).unwrap()
    }
}

const HALF: (Codec, Codec) = (Codec::F16, Codec::F16);
const SINGLE: (Codec, Codec) = (Codec::F32, Codec::F32);

/// Two layers.
fn attention(kv_heads: usize, k_dim: usize, v_dim: usize, codecs: (Codec, Codec)) -> GroupSpec {
    GroupSpec::attention(2, kv_heads, k_dim, v_dim, codecs)
}

/// Runs all rows, `chunk` tokens of each row a step, and gives each row's outputs at all positions and the hash of its state.
fn run<B: Backend>(backend: &B, case: &Case, chunk: usize) -> Vec<(Vec<f32>, String)> {
    let (spec, group) = (case.spec(), &case.group);
    let pool = Pool::new(spec.clone(), 1 << 32);
    let mut pages = backend.pages(&spec).unwrap();
    let mut batch = Batch::new(&pool);
    batch.prepare_admit(case.rows.iter().map(|&len| (pool.row(), len)).collect()).unwrap().commit();
    let slot = Slot { group: 0, layer: 1 };
    let (q_width, out_width) = (case.heads * group.key_dim(), case.heads * group.value_dim());
    let scale = 1.7 / (group.key_dim() as f32).sqrt();
    let attention = Attention { slot, heads: case.heads, scale, softcap: case.softcap };
    let sinks = case.sinks.then(|| backend.vector(&values(9, case.heads)).unwrap());
    let mut outs = vec![Vec::new(); case.rows.len()];
    // A row's inputs depend on its length and the position alone, so that it can be found again in another batch.
    let inputs = |widths: usize, salt: u64, batch: &Batch, counts: &[usize]| -> Vec<f32> {
        let row = |(row, &count): (usize, &usize)| {
            let start = batch.rows()[row].len();
            let at = move |position| values(salt + ((case.rows[row] as u64) << 32) + position as u64, widths);
            (start..start + count).flat_map(at).collect::<Vec<f32>>()
        };
        counts.iter().enumerate().flat_map(row).collect()
    };
    loop {
        let counts: Vec<usize> =
            case.rows.iter().zip(batch.rows()).map(|(&len, row)| chunk.min(len - row.len()).min(row.room())).collect();
        let tokens: usize = counts.iter().sum();
        if tokens == 0 {
            break;
        }
        let q = inputs(q_width, 1 << 20, &batch, &counts);
        let planes = |(index, plane): (u64, &kvern_state::Plane)| {
            let values = inputs(plane.width(), (2 + index) << 20, &batch, &counts);
            // The other layer's columns differ, so that a mistaken layer shows.
            let other: Vec<f32> = values.iter().map(|x| -x).collect();
            [values, other].map(|values| tensor(backend, &values, plane.width()))
        };
        let planes: Vec<[B::Tensor; 2]> = (0..).zip(&group.planes).map(planes).collect();
        let append = batch.prepare_append(&counts).unwrap();
        let step = backend.begin(append.plan(&vec![0; tokens], &[]).unwrap(), &mut pages).unwrap();
        for (layer, which) in [(0, 1), (1, 0)] {
            let planes: Vec<&B::Tensor> = planes.iter().map(|plane| &plane[which]).collect();
            backend.append(&step, &mut pages, Slot { group: 0, layer }, &planes).unwrap();
        }
        if case.quiet && tokens > 1 {
            append.commit();
            continue;
        }
        let q = tensor(backend, &q, q_width);
        let mut out = tensor(backend, &vec![f32::NAN; tokens * out_width], out_width);
        backend.attend(&step, &pages, attention, sinks.as_ref(), &q, &mut out).unwrap();
        let out = backend.download(&out).unwrap();
        append.commit();
        let mut rest = out.as_slice();
        for (row, &count) in counts.iter().enumerate() {
            let (own, others) = rest.split_at(count * out_width);
            outs[row].extend_from_slice(own);
            rest = others;
        }
    }
    let hash = |row: usize| {
        let tokens = vec![0; case.rows[row]];
        freeze(backend, &pages, &batch.rows()[row], Identity::default(), &tokens).unwrap().state_hash()
    };
    outs.into_iter().enumerate().map(|(row, out)| (out, hash(row))).collect()
}

/// Every codec with codes, which only CPUs have; rotations that are not usual among them.
fn codings() -> Vec<Codec> {
    let names = "q8 q4 turbo8 turbo6 turbo5 turbo4 turbo3 turbo2 q8-rotated q4-rotated turbo4-unrotated";
    let codecs = names.split(' ').map(|name| Codec::from_name(name).unwrap());
    codecs.filter(|_| sets().iter().all(|set| matches!(set, Set::Cpu(_)))).collect()
}

/// How far an output may be from exact arithmetic; values are in -1..1.
fn bound(set: Set, case: &Case) -> f32 {
    // Queries, and weights times scales, are rounded to 16 bits for a page's largest.
    if [false, true].into_iter().flat_map(|late| case.group.planes(late)).any(|plane| plane.codec.coding().is_some()) {
        return 1e-4;
    }
    let [keys, values] = case.group.planes.as_slice() else { return 5e-6 };
    let alike = keys.codec == values.codec && keys.dim == values.dim && case.group.late.is_none();
    // Matrix instructions round queries and weights to the type of keys and values: 11 bits of mantissa, or 8.
    match keys.codec {
        Codec::F16 if matches!(set, Set::Cuda) && alike && case.page == 64 && matches!(keys.dim, 64 | 128) => 2e-3,
        Codec::Bf16 if matches!(set, Set::Cuda) && alike && case.page == 64 && matches!(keys.dim, 64 | 128) => 1.6e-2,
        _ => 5e-6,
    }
}

fn agrees(case: &Case) {
    let want = run(&Reference::new(), case, 1000);
    for set in sets() {
        let got = on!(set, 2, false, |backend| run(backend, case, 1000));
        for (got, want) in got.iter().zip(&want) {
            assert!(got.1 == want.1, "{}: the stored columns are the reference's", set.name());
            let error = difference(&got.0, &want.0);
            assert!(error < bound(set, case), "{}: {error}", set.name());
        }
    }
}

#[test]
fn agrees_with_the_reference_around_every_border() {
    let around = [1, 2, 15, 16, 17, 63, 64, 65, 127, 129];
    agrees(&Case::new(6, 2, 32, &around));
    agrees(&Case { page: 16, ..Case::new(6, 2, 32, &around) });
    agrees(&Case::new(3, 1, 16, &[511, 512, 513, 1025]));
    agrees(&Case::new(6, 2, 64, &around));
    agrees(&Case::new(8, 2, 128, &[511, 512, 513, 1025]));
}

#[test]
fn agrees_with_the_reference_for_all_head_shapes() {
    for ratio in [1, 2, 3, 4, 5, 8, 16, 20] {
        agrees(&Case::new(2 * ratio, 2, 32, &[70]));
        agrees(&Case::new(2 * ratio, 2, 64, &[70]));
    }
    for dim in [16, 64, 80, 96, 128, 192, 256, 512] {
        agrees(&Case::new(3, 1, dim, &[70]));
        agrees(&Case { softcap: Some(3.0), sinks: true, ..Case::new(3, 1, dim, &[70]).windowed(20, 2) });
    }
    agrees(&Case::of(4, attention(2, 192, 128, HALF), &[70]));
    agrees(&Case::of(4, attention(2, 20, 48, HALF), &[70]).windowed(33, 0));
}

#[test]
fn agrees_with_the_reference_on_all_codecs() {
    for k in [Codec::F32, Codec::F16, Codec::Bf16] {
        for v in [Codec::F32, Codec::F16, Codec::Bf16] {
            agrees(&Case::of(4, attention(2, 64, 64, (k, v)), &[90, 5]));
            let case = Case::of(4, attention(2, 32, 32, (k, v)), &[90, 5]);
            agrees(&case);
            agrees(&Case { softcap: Some(2.0), sinks: true, ..case.clone().windowed(17, 3) });
            // From 40 columns on, everything is stored as the other codec says.
            let late = Case { group: case.group.clone().late(40, vec![v, k]), ..case };
            agrees(&late);
            agrees(&late.windowed(30, 1));
        }
    }
}

#[test]
fn encoded_state_agrees_with_the_reference() {
    for (index, &codec) in codings().iter().enumerate() {
        // The other side has another codec each time.
        let other = codings()[(index + 3) % codings().len()];
        for (k, v) in [(codec, codec), (codec, Codec::F16), (Codec::Bf16, other)] {
            let case = Case::of(6, attention(2, 32, 32, (k, v)), &[1, 15, 17, 64, 129]);
            agrees(&case);
            agrees(&Case { page: 16, softcap: Some(2.0), sinks: true, ..case.clone().windowed(17, 3) });
            let late = Case { group: attention(2, 32, 32, (Codec::F16, Codec::Bf16)).late(40, vec![k, v]), ..case };
            agrees(&late);
            agrees(&late.windowed(30, 1));
        }
        for ratio in [1, 4, 5, 8, 16] {
            agrees(&Case::of(ratio, attention(1, 64, 64, (codec, codec)), &[70]));
        }
        agrees(&Case::of(3, attention(1, 64, 64, (codec, codec)), &[600]));
        for dim in [16, 80, 96, 128, 192, 256, 512] {
            agrees(&Case { sinks: true, ..Case::of(3, attention(1, dim, dim, (codec, codec)), &[70]).windowed(50, 2) });
        }
        agrees(&Case::of(4, attention(2, 192, 128, (codec, other)), &[70]));
        agrees(&Case::of(4, attention(2, 64, 64, (codec, codec)).companion(1), &[1, 2, 70]));
    }
}

#[test]
fn a_value_without_a_code_is_refused_by_name_and_others_go_on() {
    fn check<B: Backend>(backend: &B, codec: Codec, late: bool) {
        let coded = attention(1, 32, 32, (codec, codec));
        let group = if late { attention(1, 32, 32, SINGLE).late(4, vec![codec, codec]) } else { coded };
        let slots = [0, 1].map(|layer| Slot { group: 0, layer });
        let spec = StateSpec::new(16, vec![group]).unwrap();
        let pool = Pool::new(spec.clone(), 1 << 30);
        let mut pages = backend.pages(&spec).unwrap();
        let mut batch = Batch::new(&pool);
        batch.prepare_admit(vec![(pool.row(), 60), (pool.row(), 60)]).unwrap().commit();
        let mut put = |batch: &mut Batch, counts: [usize; 2], bad: Option<usize>| -> Result<(), kvern_backend::Error> {
            let count = counts[0] + counts[1];
            let append = batch.prepare_append(&counts).unwrap();
            let step = backend.begin(append.plan(&vec![0; count], &[]).unwrap(), &mut pages)?;
            for slot in slots {
                let mut all = values(3, 32 * count);
                if let (Some(token), 1) = (bad, slot.layer) {
                    all[token * 32 + 9] = f32::NAN;
                }
                let plane = tensor(backend, &all, 32);
                backend.append(&step, &mut pages, slot, &[&plane, &plane])?;
            }
            append.commit();
            Ok(())
        };
        put(&mut batch, [3, 3], late.then_some(4)).unwrap();
        put(&mut batch, [1, 1], None).unwrap();
        // Late encoding finds what was stored before.
        let refused = put(&mut batch, [5, 20], (!late).then_some(15)).unwrap_err();
        let want = if late { 1 } else { 14 };
        let found =
            matches!(refused, kvern_backend::Error::NotFinite { row: 1, group: 0, layer: 1, column } if column == want);
        assert!(found, "{refused}");
        assert_eq!((batch.rows()[0].len(), batch.rows()[1].len()), (4, 4));
        batch.filter(&[0]).unwrap();
        let mut put_one = || {
            let append = batch.prepare_append(&[5]).unwrap();
            let step = backend.begin(append.plan(&[0; 5], &[]).unwrap(), &mut pages).unwrap();
            let plane = tensor(backend, &values(4, 32 * 5), 32);
            slots.iter().for_each(|slot| backend.append(&step, &mut pages, *slot, &[&plane, &plane]).unwrap());
            append.commit();
        };
        put_one();
    }
    for codec in codings() {
        for late in [false, true] {
            check(&Reference::new(), codec, late);
            for set in sets() {
                on!(set, 2, false, |backend| check(backend, codec, late));
            }
        }
    }
}

#[test]
fn a_window_is_exact_at_every_border() {
    for (window, sinks) in [(1, 0), (2, 0), (16, 0), (63, 0), (64, 0), (65, 0), (65, 4), (100, 64), (700, 0), (700, 70)]
    {
        let around = [window - 1, window, window + 1, window + 64, 3 * window + 40].map(|len| len.max(1));
        agrees(&Case::new(6, 2, 16, &around).windowed(window, sinks));
        agrees(&Case::new(6, 2, 64, &around).windowed(window, sinks));
        agrees(&Case { page: 16, ..Case::new(3, 1, 16, &around).windowed(window, sinks) });
    }
    // A window that has left whole strides behind, with and without what it keeps.
    agrees(&Case::new(2, 1, 16, &[1700]).windowed(40, 0));
    agrees(&Case::new(2, 1, 16, &[1700]).windowed(600, 20));
}

#[test]
fn capped_scores_and_sinks_agree_with_the_reference() {
    for cap in [0.5, 5.0, 50.0] {
        agrees(&Case { softcap: Some(cap), ..Case::new(6, 2, 32, &[1, 70, 600]) });
        agrees(&Case { softcap: Some(cap), sinks: true, ..Case::new(6, 2, 32, &[1, 70, 600]).windowed(50, 0) });
    }
    agrees(&Case { sinks: true, ..Case::new(6, 2, 32, &[1, 70, 600]) });
    agrees(&Case { softcap: Some(5.0), sinks: true, ..Case::new(6, 2, 128, &[1, 70, 600]).windowed(50, 3) });
}

#[test]
fn latents_agree_with_the_reference() {
    for codec in [Codec::F32, Codec::F16, Codec::Bf16] {
        agrees(&Case::of(5, GroupSpec::latent(2, 64, 16, None, codec), &[1, 63, 64, 130]));
        agrees(&Case::of(9, GroupSpec::latent(2, 32, 32, Some(16), codec), &[600]).windowed(100, 3));
        let late = GroupSpec::latent(2, 48, 16, None, Codec::F32).late(33, vec![codec, codec]);
        agrees(&Case { softcap: Some(4.0), ..Case::of(3, late, &[90]) });
    }
}

#[test]
fn bits_do_not_depend_on_chunks_company_or_threads() {
    // Long enough for several strides; 40 and 7 are company.
    let rows = [1100, 40, 7];
    let latent = GroupSpec::latent(2, 32, 16, None, Codec::F16);
    let cases = [
        Case::new(6, 2, 32, &rows),
        Case { softcap: Some(5.0), sinks: true, ..Case::new(6, 2, 32, &rows).windowed(90, 4) },
        Case::of(6, attention(2, 32, 32, SINGLE).late(37, vec![Codec::F16, Codec::Bf16]), &rows).windowed(600, 0),
        Case::of(6, latent, &rows),
        Case::new(6, 2, 64, &rows),
        Case::of(8, attention(2, 128, 128, (Codec::Bf16, Codec::Bf16)), &rows),
        Case { softcap: Some(5.0), sinks: true, ..Case::new(6, 2, 128, &rows).windowed(300, 70) },
    ];
    let coded = codings().into_iter().map(|codec| Case::of(6, attention(2, 32, 32, (codec, codec)), &[530, 40, 7]));
    let cases: Vec<Case> = cases.into_iter().chain(coded).collect();
    for (case, set) in cases.iter().flat_map(|case| sets().into_iter().map(move |set| (case, set))) {
        let want = on!(set, 1, false, |backend| run(backend, case, 2000));
        for (threads, chunk) in [(1, 1), (2, 7), (5, 64), (2, 512), (3, 2000)] {
            assert!(
                on!(set, threads, false, |backend| run(backend, case, chunk)) == want,
                "{}, {threads} threads, chunks of {chunk}",
                set.name()
            );
        }
        for (row, want) in want.iter().enumerate() {
            let alone = Case { rows: vec![case.rows[row]], ..case.clone() };
            let alone = on!(set, 2, false, |backend| run(backend, &alone, 100));
            assert!(alone[0] == *want, "{}: row {row} alone", set.name());
        }
    }
}

/// A draft head's columns lag behind its row's tokens; a token without a column of its own sees those before it, and nothing gives zeros.
#[test]
fn companions_agree_with_the_reference() {
    for lag in 1..3 {
        agrees(&Case::of(4, attention(2, 32, 32, HALF).companion(lag), &[1, 2, 3, 70]));
        agrees(&Case::of(4, attention(2, 32, 32, HALF).companion(lag), &[70]).windowed(20, 1));
        let case = Case::of(3, GroupSpec::latent(2, 32, 16, None, Codec::F16).companion(lag), &[3, 70]);
        let whole = run(&Reference::new(), &case, 100);
        for set in sets() {
            let run = |threads, chunk| on!(set, threads, false, |backend| run(backend, &case, chunk));
            assert!(run(2, 100) == run(1, 3), "{}", set.name());
            assert_eq!(run(1, 7)[0].1, whole[0].1);
        }
        assert!(whole[0].0[..case.heads * 32 * lag].iter().all(|&x| x == 0.0));
    }
}

#[test]
fn accuracy_does_not_decay_with_length() {
    // The last token of a long row, against the reference's f64 sums.
    for set in sets() {
        let error = |len: usize| {
            let case = Case { quiet: true, ..Case::of(1, attention(1, 16, 16, SINGLE), &[len]) };
            // A multiple and one: the last step has one token.
            assert_eq!(len % 1000, 1);
            let got = on!(set, 2, false, |backend| run(backend, &case, 1000));
            difference(&got[0].0, &run(&Reference::new(), &case, 1000)[0].0)
        };
        // Values are in -1..1, so one rounding step of the output is 6e-8.
        for len in [1001, 8001, 128_001] {
            assert!(error(len) < 4e-7, "{}, {len}", set.name());
        }
    }
}

/// With queries of zero every visible column weighs the same: an output is the mean of the visible values, which name their row and position.
#[test]
fn queries_of_zero_see_exactly_the_visible_columns() {
    for (window, sinks) in [(None, 0), (Some(1), 0), (Some(20), 0), (Some(20), 3), (Some(64), 0)] {
        let mut group = attention(1, 16, 16, SINGLE);
        group.window = window.map(|size| Window { size, sinks });
        let spec = StateSpec::new(16, vec![group]).unwrap();
        fn check<B: Backend>(backend: &B, spec: &StateSpec, window: Option<usize>, sinks: usize) {
            let pool = Pool::new(spec.clone(), 1 << 24);
            let mut pages = backend.pages(spec).unwrap();
            let mut batch = Batch::new(&pool);
            batch.prepare_admit(vec![(pool.row(), 200), (pool.row(), 200)]).unwrap().commit();
            let tag = |row: usize, position: usize| (row * 1000 + position) as f32;
            // Drafts of wrong columns in between, which nothing may show of.
            for (count, drafts) in [(5, 0), (1, 3), (17, 0), (2, 40), (30, 1), (1, 0), (64, 7), (3, 0)] {
                let mut step = |batch: &mut kvern_state::Round<'_>, count: usize, wrong: f32| {
                    let starts: Vec<usize> = batch.rows().iter().map(|row| row.len()).collect();
                    let at = starts
                        .iter()
                        .enumerate()
                        .flat_map(|(row, &start)| (start..start + count).map(move |p| (row, p)));
                    let v: Vec<f32> = at.clone().flat_map(|(row, p)| [tag(row, p) + wrong; 16]).collect();
                    let append = batch.prepare_append(&[count, count]).unwrap();
                    let step = backend.begin(append.plan(&vec![0; 2 * count], &[]).unwrap(), &mut pages).unwrap();
                    let slot = Slot { group: 0, layer: 0 };
                    let zeros = tensor(backend, &vec![0.0; v.len()], 16);
                    backend.append(&step, &mut pages, slot, &[&zeros, &tensor(backend, &v, 16)]).unwrap();
                    let mut out = tensor(backend, &vec![f32::NAN; v.len()], 16);
                    let attention = Attention { slot, heads: 1, scale: 1.0, softcap: None };
                    backend.attend(&step, &pages, attention, None, &zeros, &mut out).unwrap();
                    append.commit();
                    if wrong > 0.0 {
                        return;
                    }
                    for ((row, p), out) in at.zip(backend.download(&out).unwrap().chunks(16)) {
                        let start = window.map_or(0, |size: usize| (p + 1).saturating_sub(size));
                        let seen: Vec<usize> = (0..sinks.min(start)).chain(start..=p).collect();
                        let mean = seen.iter().map(|&p| f64::from(tag(row, p))).sum::<f64>() / seen.len() as f64;
                        assert!((f64::from(out[0]) - mean).abs() < 1e-3, "row {row}, position {p}: {} {mean}", out[0]);
                    }
                };
                let mut round = batch.begin_round();
                step(&mut round, drafts, 5e5);
                drop(round);
                let mut round = batch.begin_round();
                step(&mut round, count, 0.0);
                round.commit(&[count, count]).map_err(|(_, error)| error).unwrap();
            }
        }
        for set in sets() {
            on!(set, 2, false, |backend| check(backend, &spec, window, sinks));
        }
    }
}

/// A read outlives the row's later steps and its end, and another model attends it from any position.
#[test]
fn a_read_is_attended_after_its_row_has_gone() {
    let group = attention(2, 32, 32, HALF).windowed(Window { size: 40, sinks: 0 });
    let spec = StateSpec::new(16, vec![group]).unwrap();
    let slot = Slot { group: 0, layer: 0 };
    let attention = Attention { slot, heads: 4, scale: 0.3, softcap: None };
    let q = values(3, 128);
    fn outputs<B: Backend>(backend: &B, spec: &StateSpec, attention: Attention, q: &[f32]) -> [Vec<f32>; 3] {
        let pool = Pool::new(spec.clone(), 1 << 24);
        let mut pages = backend.pages(spec).unwrap();
        let mut batch = Batch::new(&pool);
        batch.prepare_admit(vec![(pool.row(), 200)]).unwrap().commit();
        let grow = |batch: &mut Batch, pages: &mut B::Pages, count: usize, seed: u64| {
            let append = batch.prepare_append(&[count]).unwrap();
            let step = backend.begin(append.plan(&vec![0; count], &[]).unwrap(), pages).unwrap();
            let k = tensor(backend, &values(seed, count * 64), 64);
            backend.append(&step, pages, attention.slot, &[&k, &k]).unwrap();
            append.commit();
        };
        grow(&mut batch, &mut pages, 75, 1);
        let read = batch.rows()[0].read(0).unwrap();
        let look = |pages: &mut B::Pages, position: u32| {
            let view = View { reads: vec![read.clone()], tokens: vec![0], positions: vec![position] };
            let step = backend.begin(StepPlan::over(vec![view]).unwrap(), pages).unwrap();
            let mut out = tensor(backend, &[f32::NAN; 128], 128);
            backend.attend(&step, pages, attention, None, &tensor(backend, q, 128), &mut out).unwrap();
            backend.download(&out).unwrap()
        };
        let fresh = look(&mut pages, 75);
        grow(&mut batch, &mut pages, 100, 2);
        drop(batch);
        let mut other = Batch::new(&pool);
        other.prepare_admit(vec![(pool.row(), 200)]).unwrap().commit();
        grow(&mut other, &mut pages, 150, 3);
        [fresh, look(&mut pages, 75), look(&mut pages, 80)]
    }
    let [want, _, far] = outputs(&Reference::new(), &spec, attention, &q);
    for set in sets() {
        let [fresh, late, shifted] = on!(set, 2, false, |backend| outputs(backend, &spec, attention, &q));
        assert_eq!(fresh, late, "later steps do not touch a read");
        assert!(difference(&fresh, &want) < 5e-6 && difference(&shifted, &far) < 5e-6);
        assert!(difference(&fresh, &shifted) > 1e-3, "the window goes with the query");
    }
}

#[test]
fn pages_that_the_cpu_cannot_lay_out_are_refused() {
    let backend = cpu(KernelSet::available()[0], 1, false);
    for case in [Case { page: 8, ..Case::new(1, 1, 16, &[]) }, Case { page: 1024, ..Case::new(1, 1, 16, &[]) }] {
        assert!(backend.pages(&case.spec()).is_err());
    }
    assert!(backend.pages(&Case::of(1, attention(1, 16, 24, HALF), &[]).spec()).is_err());
    assert!(backend.pages(&Case::of(1, GroupSpec::latent(1, 24, 16, None, Codec::F16), &[]).spec()).is_err());
    for codec in codings() {
        assert!(backend.pages(&Case::of(1, attention(1, 24, 32, (codec, codec)), &[]).spec()).is_err());
        assert!(backend.pages(&Case::of(1, GroupSpec::latent(1, 32, 16, None, codec), &[]).spec()).is_err());
        assert!(
            backend.pages(&Case::of(1, attention(1, 32, 24, HALF).late(3, vec![codec, codec]), &[]).spec()).is_err()
        );
    }
}

#[test]
fn verbs_on_a_group_of_another_kind_are_refused() {
    let spec = StateSpec::new(16, vec![attention(1, 16, 16, HALF), GroupSpec::recurrent(1, &[("state", 16)])]).unwrap();
    assert_eq!(spec.groups()[1].kind, Kind::Recurrent);
    fn check<B: Backend>(backend: &B, spec: &StateSpec) {
        let mut pages = backend.pages(spec).unwrap();
        let pool = Pool::new(spec.clone(), 1 << 20);
        let mut batch = Batch::new(&pool);
        batch.prepare_admit(vec![(pool.row(), 20)]).unwrap().commit();
        let append = batch.prepare_append(&[1]).unwrap();
        let step = backend.begin(append.plan(&[0], &[]).unwrap(), &mut pages).unwrap();
        let x = tensor(backend, &[0.0; 16], 16);
        let mut out = tensor(backend, &[0.0; 16], 16);
        let recurrent = Slot { group: 1, layer: 0 };
        let attention = Attention { slot: recurrent, heads: 1, scale: 1.0, softcap: None };
        assert!(backend.attend(&step, &pages, attention, None, &x, &mut out).is_err());
        assert!(backend.append(&step, &mut pages, recurrent, &[&x, &x]).is_err());
        let kernel = backend.vector(&[1.0; 32]).unwrap();
        let columns = Slot { group: 0, layer: 0 };
        assert!(backend.convolve(&step, &mut pages, (columns, 0), &kernel, &x, &mut out).is_err());
        assert!(backend.convolve(&step, &mut pages, (recurrent, 0), &kernel, &x, &mut out).is_ok());
    }
    for set in sets() {
        on!(set, 1, false, |backend| check(backend, &spec));
    }
}
