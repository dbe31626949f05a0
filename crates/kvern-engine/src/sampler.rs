//! Sampling: logits to a token, as a pure function.
//!
//! Order: `logit_bias`, repetition, presence and frequency penalty; then, on the probabilities at temperature 1, `top_p`, `min_p`, `top_k`;
//! then the draw at `temperature` from what is left. Temperature 0 takes the largest logit, the lowest id among equals.
//!
//! The draw inverts the cumulative distribution, in order of ids, at one number that is a function of the seed and the token's absolute
//! position. No stream is shared, so neither company nor drafts nor a restart change a row's draws.

use kvern_state::Draw;
use serde::{Deserialize, Serialize};

use crate::Error;

/// Sampling parameters; the default is greedy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the most probable ids; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of most probable ids whose mass reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop ids less probable than this share of the most probable; 0 drops none.
    pub min_p: f32,
    /// Divide positive and multiply negative logits of seen ids; 1 is off.
    pub repetition_penalty: f32,
    /// Subtract once for each seen id.
    pub presence_penalty: f32,
    /// Subtract for each occurrence.
    pub frequency_penalty: f32,
    /// How many of the row's last tokens count as seen; 0 is all of them, prompt included.
    pub penalty_window: usize,
    /// Added to the logits of ids.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws.
    pub seed: u64,
    /// How many most probable alternatives to report with each token; `None` reports no probabilities at all.
    pub logprobs: Option<usize>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: 0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
        }
    }
}

impl Sampling {
    /// Checks every range.
    ///
    /// # Errors
    /// [`Error::Parameter`] naming the first one that is out of range.
    pub fn check(&self) -> Result<(), Error> {
        let checks = [
            ("temperature", "finite and at least 0", self.temperature, self.temperature >= 0.0),
            ("top_p", "above 0 and at most 1", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0),
            ("min_p", "in 0..=1", self.min_p, (0.0..=1.0).contains(&self.min_p)),
            ("repetition_penalty", "finite and above 0", self.repetition_penalty, self.repetition_penalty > 0.0),
            ("presence_penalty", "finite", self.presence_penalty, true),
            ("frequency_penalty", "finite", self.frequency_penalty, true),
        ];
        for (name, expected, found, in_range) in checks {
            if !in_range || !found.is_finite() {
                return Err(Error::Parameter { name, expected, found });
            }
        }
        match self.logit_bias.iter().find(|(_, bias)| bias.is_nan()) {
            Some(&(_, found)) => Err(Error::Parameter { name: "logit_bias", expected: "a number", found }),
            None => Ok(()),
        }
    }
}

impl Sampling {
    /// The draw of the token at `position`, for a backend that draws by itself; none where it takes more than the logits, or more than the token is
    /// wanted.
    pub fn draw(&self, position: u64) -> Option<Draw> {
        let plain = !self.penalizes() && self.logit_bias.is_empty() && self.logprobs.is_none();
        plain.then(|| Draw {
            temperature: self.temperature,
            top_p: self.top_p,
            min_p: self.min_p,
            top_k: u32::try_from(self.top_k).unwrap_or(u32::MAX),
            uniform: uniform(self.seed, position),
        })
    }

    fn penalizes(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// A sampled token.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sampled {
    /// The id.
    pub id: u32,
    /// Its log-probability at temperature 1, after penalties and before filters, if asked for.
    pub logprob: Option<f32>,
    /// The most probable ids with their log-probabilities, best first.
    pub top: Vec<(u32, f32)>,
}

/// Draws the token at absolute position `position` of a row that holds `tokens`. `logits` is used up.
pub fn sample(sampling: &Sampling, logits: &mut [f32], tokens: &[u32], position: u64) -> Sampled {
    penalize(sampling, logits, tokens);
    let greedy = sampling.temperature == 0.0;
    let (best, max) = largest(logits);
    if greedy && sampling.logprobs.is_none() {
        return Sampled { id: best, logprob: None, top: Vec::new() };
    }
    let total: f64 = logits.iter().map(|&logit| f64::from((logit - max).exp())).sum();
    let log_total = max + total.ln() as f32;
    let id = if greedy { best } else { draw(sampling, logits, max, total, position) };
    let top = match sampling.logprobs {
        Some(count) if count > 0 => {
            let mut ids = by_probability(logits, count);
            ids.truncate(count);
            ids.into_iter().map(|id| (id, logits[id as usize] - log_total)).collect()
        }
        _ => Vec::new(),
    };
    Sampled { id, logprob: sampling.logprobs.map(|_| logits[id as usize] - log_total), top }
}

/// Log-probabilities of logits, in place; the sum is taken in `f64`.
pub fn log_softmax(logits: &mut [f32]) {
    let (_, max) = largest(logits);
    let total: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    let shift = f64::from(max) + total.ln();
    logits.iter_mut().for_each(|logit| *logit = (f64::from(*logit) - shift) as f32);
}

/// The largest logit; the lowest id among equals.
fn largest(logits: &[f32]) -> (u32, f32) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    (logits.iter().position(|&logit| logit == max).unwrap_or(0) as u32, max)
}

fn penalize(sampling: &Sampling, logits: &mut [f32], tokens: &[u32]) {
    for &(id, bias) in &sampling.logit_bias {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit += bias;
        }
    }
    let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = *sampling;
    if !sampling.penalizes() {
        return;
    }
    let window = if sampling.penalty_window == 0 { tokens.len() } else { sampling.penalty_window.min(tokens.len()) };
    let mut seen = tokens[tokens.len() - window..].to_vec();
    seen.sort_unstable();
    for run in seen.chunk_by(|a, b| a == b) {
        if let Some(logit) = logits.get_mut(run[0] as usize) {
            *logit = if *logit < 0.0 { *logit * repetition_penalty } else { *logit / repetition_penalty };
            *logit -= presence_penalty + frequency_penalty * run.len() as f32;
        }
    }
}

/// At least the `count` most probable ids (all of equal ones at the border are not promised), best first, lower ids first among equals.
fn by_probability(logits: &[f32], count: usize) -> Vec<u32> {
    let order = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    if count < ids.len() {
        ids.select_nth_unstable_by(count, order);
        ids.truncate(count);
    }
    ids.sort_unstable_by(order);
    ids
}

fn draw(sampling: &Sampling, logits: &[f32], max: f32, total: f64, position: u64) -> u32 {
    let probability = |id: u32| f64::from((logits[id as usize] - max).exp());
    let mut ids = if sampling.top_p < 1.0 {
        nucleus(logits, f64::from(sampling.top_p) * total, probability)
    } else if sampling.top_k > 0 {
        by_probability(logits, sampling.top_k)
    } else {
        (0..logits.len() as u32).collect()
    };
    if sampling.min_p > 0.0 {
        let least = max + sampling.min_p.ln();
        ids.retain(|&id| logits[id as usize] >= least);
    }
    if sampling.top_k > 0 {
        // Where ids are not all of them, they are sorted by probability.
        ids.truncate(sampling.top_k);
    }
    ids.sort_unstable();
    let heat = 1.0 / sampling.temperature;
    let weights: Vec<f64> = ids.iter().map(|&id| f64::from(((logits[id as usize] - max) * heat).exp())).collect();
    let mut left = uniform(sampling.seed, position) * weights.iter().sum::<f64>();
    let mut chosen = ids[0];
    for (&id, &weight) in ids.iter().zip(&weights) {
        if weight > 0.0 {
            chosen = id;
            if left < weight {
                break;
            }
        }
        left -= weight;
    }
    chosen
}

/// The smallest set of most probable ids whose mass reaches `wanted`, best first.
fn nucleus(logits: &[f32], wanted: f64, probability: impl Fn(u32) -> f64) -> Vec<u32> {
    // Mostly a few ids hold the mass; sorting all of a large vocabulary is the exception.
    let mut count = 256;
    loop {
        let mut ids = by_probability(logits, count);
        let mut mass = 0.0;
        let reached = ids.iter().position(|&id| {
            mass += probability(id);
            mass >= wanted
        });
        if let Some(last) = reached {
            ids.truncate(last + 1);
            return ids;
        }
        if ids.len() == logits.len() {
            return ids;
        }
        count *= 16;
    }
}

/// A number in `0..1` from a seed and a position: two rounds of the SplitMix64 finalizer (Steele, Lea and Flood 2014).
fn uniform(seed: u64, position: u64) -> f64 {
    let mix = |mut x: u64| {
        x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    };
    (mix(mix(seed) ^ position) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(sampling: &Sampling, logits: &[f32], tokens: &[u32]) -> Vec<u32> {
        let draws = (0..4000).map(|position| sample(sampling, &mut logits.to_vec(), tokens, position).id);
        draws.collect()
    }

    fn share(ids: &[u32], id: u32) -> f64 {
        ids.iter().filter(|&&found| found == id).count() as f64 / ids.len() as f64
    }

    fn sampling() -> Sampling {
        Sampling { temperature: 1.0, seed: 7, ..Sampling::default() }
    }

    const LOGITS: [f32; 5] = [1.0, 3.0, -2.0, 2.0, 3.0];

    #[test]
    fn greedy_takes_the_lowest_of_equal_ids() {
        assert_eq!(sample(&Sampling::default(), &mut LOGITS.to_vec(), &[], 0).id, 1);
    }

    #[test]
    fn draws_follow_the_distribution_at_the_temperature() {
        for temperature in [0.5, 1.0, 2.0] {
            let drawn = ids(&Sampling { temperature, ..sampling() }, &LOGITS, &[]);
            let weights = LOGITS.map(|x| f64::from(x / temperature).exp());
            let total: f64 = weights.iter().sum();
            for (id, weight) in weights.iter().enumerate() {
                // Four standard deviations of a share of 4000 draws.
                assert!((share(&drawn, id as u32) - weight / total).abs() < 0.032, "{id} at {temperature}");
            }
        }
    }

    #[test]
    fn filters_keep_what_they_say() {
        let only = |sampling: Sampling| {
            let mut seen = ids(&sampling, &LOGITS, &[]);
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        assert_eq!(only(sampling()).len(), 5);
        assert_eq!(only(Sampling { top_k: 3, ..sampling() }), [1, 3, 4]);
        assert_eq!(only(Sampling { top_k: 1, ..sampling() }), [1]);
        assert_eq!(only(Sampling { min_p: 0.3, ..sampling() }), [1, 3, 4]);
        assert_eq!(only(Sampling { top_p: 0.5, ..sampling() }), [1, 4]);
        assert_eq!(only(Sampling { top_p: 1e-6, ..sampling() }), [1]);
        assert_eq!(only(Sampling { top_p: 0.9, top_k: 2, ..sampling() }), [1, 4]);
    }

    #[test]
    fn penalties_act_once_per_id_or_per_occurrence() {
        let with = |sampling: Sampling| {
            let mut logits = LOGITS.to_vec();
            penalize(&sampling, &mut logits, &[2, 1, 1]);
            logits
        };
        assert_eq!(with(Sampling { repetition_penalty: 2.0, ..sampling() }), [1.0, 1.5, -4.0, 2.0, 3.0]);
        assert_eq!(with(Sampling { presence_penalty: 0.5, ..sampling() }), [1.0, 2.5, -2.5, 2.0, 3.0]);
        assert_eq!(with(Sampling { frequency_penalty: 0.5, ..sampling() }), [1.0, 2.0, -2.5, 2.0, 3.0]);
        assert_eq!(
            with(Sampling { frequency_penalty: 0.5, penalty_window: 1, ..sampling() }),
            [1.0, 2.5, -2.0, 2.0, 3.0]
        );
        assert_eq!(with(Sampling { logit_bias: vec![(3, 4.0), (99, 1.0)], ..sampling() })[3], 6.0);
    }

    #[test]
    fn draws_depend_on_seed_and_position_alone() {
        let sampling = sampling();
        let at =
            |seed, position| sample(&Sampling { seed, ..sampling.clone() }, &mut LOGITS.to_vec(), &[], position).id;
        assert_eq!((0..50).map(|p| at(1, p)).collect::<Vec<_>>(), (0..50).map(|p| at(1, p)).collect::<Vec<_>>());
        assert_ne!((0..50).map(|p| at(1, p)).collect::<Vec<_>>(), (0..50).map(|p| at(2, p)).collect::<Vec<_>>());
    }

    #[test]
    fn probabilities_are_those_before_the_filters() {
        let sampled = sample(&Sampling { logprobs: Some(2), ..Sampling::default() }, &mut LOGITS.to_vec(), &[], 0);
        let total: f32 = LOGITS.iter().map(|x| x.exp()).sum();
        assert!((sampled.logprob.unwrap() - (3.0f32.exp() / total).ln()).abs() < 1e-6);
        assert_eq!(sampled.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 4]);
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        let bad = Sampling { top_p: 0.0, ..sampling() };
        assert!(matches!(bad.check(), Err(Error::Parameter { name: "top_p", .. })));
        assert!(Sampling { temperature: f32::NAN, ..sampling() }.check().is_err());
        assert!(sampling().check().is_ok());
    }
}
