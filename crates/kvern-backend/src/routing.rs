//! Which experts see a token, and how much each of them counts.
//!
//! ```
//! use kvern_backend::{Routing, Score};
//! let routing = Routing { score: Score::Softmax, normalize: true, scale: 1.0, groups: None };
//! let mut picks = [0.0; 4];
//! routing.pick(&[0.0, 2.0, 1.0, 2.0], None, None, &mut picks);
//! // Experts 1 and 3, of equal weight.
//! assert_eq!(picks, [1.0, 3.0, 0.5, 0.5]);
//! ```

use crate::Error;

/// What a router makes of its logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Score {
    /// A softmax over all experts.
    Softmax,
    /// A sigmoid of each logit.
    Sigmoid,
}

/// A router: the experts of the largest scores, each with a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// What logits become.
    pub score: Score,
    /// Whether the weights of a token's experts are brought to a sum of 1.
    pub normalize: bool,
    /// Factor on every weight.
    pub scale: f32,
    /// (groups, kept): experts stand in so many groups of one size, and only the `kept` groups whose two largest scores have the largest sum can be
    /// picked from (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    pub groups: Option<(usize, usize)>,
}

impl Routing {
    /// Checks the shapes, (rows, width), of logits and picks, and the numbers of values of bias and factors.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn check(&self, logits: (usize, usize), sides: [Option<usize>; 2], picks: (usize, usize)) -> Result<(), Error> {
        let experts = logits.1;
        Error::check("route", "rows of the picks", logits.0, picks.0)?;
        Error::check("route", "remainder of the picks", 0, picks.1 % 2)?;
        Error::check("route", "picks of a token", (picks.1 / 2).clamp(1, experts), picks.1 / 2)?;
        Error::check("route", "values of the bias", experts, sides[0].unwrap_or(experts))?;
        Error::check("route", "values of the factors", experts, sides[1].unwrap_or(experts))?;
        let Some((groups, kept)) = self.groups else { return Ok(()) };
        Error::check("route", "remainder of the experts", 0, experts % groups.max(1))?;
        Error::check("route", "groups that are kept", kept.clamp(1, groups.max(1)), kept)?;
        let enough = kept * (experts / groups.max(1)) >= picks.1 / 2;
        Error::check("route", "experts enough in the groups that are kept", 1, usize::from(enough))
    }

    /// Routes one token: `picks` gets its experts in the order of their scores (the lower number first among equals), and then their weights. `bias` is
    /// added to scores where experts are picked and not where they are weighed; `factors` are factors on the weights.
    pub fn pick(&self, logits: &[f32], bias: Option<&[f32]>, factors: Option<&[f32]>, picks: &mut [f32]) {
        let scores: Vec<f64> = match self.score {
            Score::Sigmoid => logits.iter().map(|&x| 1.0 / (1.0 + (-f64::from(x)).exp())).collect(),
            Score::Softmax => {
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let powers: Vec<f64> = logits.iter().map(|&x| f64::from(x - max).exp()).collect();
                let sum: f64 = powers.iter().sum();
                powers.into_iter().map(|x| x / sum).collect()
            }
        };
        let mut choice: Vec<f64> =
            scores.iter().enumerate().map(|(i, s)| s + bias.map_or(0.0, |b| f64::from(b[i]))).collect();
        if let Some((groups, kept)) = self.groups.filter(|(groups, kept)| kept < groups) {
            let size = choice.len() / groups;
            let value = |group: usize| {
                let mut two = [f64::NEG_INFINITY; 2];
                for &x in &choice[group * size..][..size] {
                    two = if x > two[0] { [x, two[0]] } else { [two[0], two[1].max(x)] };
                }
                if size > 1 { two[0] + two[1] } else { two[0] }
            };
            let values: Vec<f64> = (0..groups).map(value).collect();
            let mut order: Vec<usize> = (0..groups).collect();
            order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
            for &group in &order[kept..] {
                choice[group * size..][..size].fill(f64::NEG_INFINITY);
            }
        }
        let count = picks.len() / 2;
        let (experts, weights) = picks.split_at_mut(count);
        let mut order: Vec<usize> = (0..choice.len()).collect();
        // Stable, so that the lower number comes first among equals.
        order.sort_by(|&a, &b| choice[b].total_cmp(&choice[a]));
        let sum: f64 = if self.normalize { order[..count].iter().map(|&expert| scores[expert]).sum() } else { 1.0 };
        for ((expert, weight), &picked) in experts.iter_mut().zip(weights).zip(&order) {
            let factor = f64::from(self.scale) * factors.map_or(1.0, |factors| f64::from(factors[picked]));
            *expert = picked as f32;
            *weight = (scores[picked] / (sum + f64::MIN_POSITIVE) * factor) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Routing, Score};

    #[test]
    fn a_bias_picks_and_does_not_weigh() {
        let routing = Routing { score: Score::Sigmoid, normalize: false, scale: 2.0, groups: None };
        let mut picks = [0.0; 2];
        routing.pick(&[0.0, 4.0], Some(&[1.0, 0.0]), None, &mut picks);
        assert_eq!(picks, [0.0, 1.0]);
        routing.pick(&[0.0, 4.0], Some(&[1.0, 0.0]), Some(&[0.25, 7.0]), &mut picks);
        assert_eq!(picks, [0.0, 0.25]);
    }

    #[test]
    fn groups_are_kept_by_the_sum_of_their_two_largest_scores() {
        let routing = Routing { score: Score::Sigmoid, normalize: true, scale: 1.0, groups: Some((2, 1)) };
        let mut picks = [0.0; 4];
        // The largest logit stands alone in its group.
        routing.pick(&[5.0, -5.0, 1.0, 1.0], None, None, &mut picks);
        assert_eq!(picks, [2.0, 3.0, 0.5, 0.5]);
        assert!(routing.check((1, 4), [None; 2], (1, 4)).is_ok());
        assert!(routing.check((1, 5), [None; 2], (1, 4)).is_err(), "five experts do not make two groups");
        assert!(routing.check((1, 4), [None; 2], (1, 6)).is_err(), "a group of two has no three experts");
    }

    #[test]
    fn experts_of_nan_scores_are_picked_all_the_same() {
        let routing = Routing { score: Score::Softmax, normalize: true, scale: 1.0, groups: None };
        let mut picks = [9.0; 4];
        routing.pick(&[f32::NAN; 3], None, None, &mut picks);
        assert!(picks[..2].iter().all(|&expert| expert < 3.0));
    }
}
