//! Rows of a product with a stack of matrices, by matrix: tokens by the experts that they were routed to, heads by head.
//!
//! A row's bits do not depend on the rows that share its matrix, so grouping is invisible.

use crate::matmul::{Pair, Share};
use crate::tensor::Matrix;

/// Rows by matrix.
pub struct Picked {
    pairs: Vec<Pair>,
    /// Matrices that have rows, and where these end.
    ends: Vec<(usize, usize)>,
}

impl Picked {
    /// A row of output for each pick of each token, from its token's row of input or, if `own`, a row of its own. A pick of no matrix below `count` is
    /// the error.
    pub fn experts(picks: Matrix<'_>, count: usize, own: bool) -> Result<Self, usize> {
        let each = picks.width() / 2;
        let mut lists = vec![Vec::new(); count];
        for (row, j) in (0..picks.rows()).flat_map(|row| (0..each).map(move |j| (row, j))) {
            let (matrix, output) = (picks.row(row)[j] as usize, (row * each + j) as u32);
            let input = if own { output } else { row as u32 };
            lists.get_mut(matrix).ok_or(matrix)?.push(Pair { input, output });
        }
        Ok(Self::new(lists))
    }

    /// Run `i` of each of `rows` rows by matrix `i`.
    pub fn heads(rows: usize, heads: usize) -> Self {
        let run = |head: usize| (0..rows).map(move |row| (row * heads + head) as u32);
        let pairs = |head: usize| run(head).map(|index| Pair { input: index, output: index }).collect();
        Self::new((0..heads).map(pairs).collect())
    }

    fn new(lists: Vec<Vec<Pair>>) -> Self {
        let (mut pairs, mut ends) = (Vec::new(), Vec::new());
        for (matrix, list) in lists.into_iter().enumerate().filter(|(_, list)| !list.is_empty()) {
            pairs.extend(list);
            ends.push((matrix, pairs.len()));
        }
        Self { pairs, ends }
    }

    /// The rows of each matrix that has some.
    pub fn shares(&self) -> Vec<Share<'_>> {
        let mut start = 0;
        let share = |&(matrix, end): &(usize, usize)| {
            let pairs = &self.pairs[start..end];
            start = end;
            Share::new(matrix, pairs)
        };
        self.ends.iter().map(share).collect()
    }
}
