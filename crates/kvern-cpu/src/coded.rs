//! Encoded keys and values: where codes lie in a page, and attention over them.
//!
//! **Layout.** Codes come in units of 16 columns by 16 dimensions: four chunks of 64 codes, each a lane by four. Lanes are what a product leaves apart, and
//! fours are what a byte dot product adds up: lanes are columns of keys, and dimensions of values.
//!
//! ```text
//! keys:   [panel of 16 columns][16 dimensions] units | [panel][group] 16 scales | [panel][group] 16 zeros
//! values: [16 dimensions][16 columns] units          | [group][column] scales   | [group][column] zeros
//!
//! unit:   8 bits: 64 bytes for each chunk              2 bits: 64 bytes, of which each has a code of all four chunks
//!         4 bits: 64 bytes for two chunks, low and high half        1 bit: 8 bytes for each chunk
//!         3, 5 and 6 bits are 2 + 1, 4 + 1 and 4 + 2 bits, one after the other
//! ```
//!
//! **Arithmetic.** A code stands for a byte, looked up in registers. The other side of a product, a query or the weights of a page times their columns'
//! scales, becomes 16-bit integers in two planes of bytes ([`crate::quantize`]); sums of integers are exact. So a query's scores and outputs do not depend on
//! which queries share its tile. Against `f32` this costs 2^-16 of the largest weight of a page.

use std::marker::PhantomData;

use bytemuck::{cast_slice, cast_slice_mut};
use kvern_base::f16;
use kvern_state::{Coding, MIDDLE, Scale};

use crate::attention::TILE;
use crate::isa::{Isa, Kernel, LANES};
use crate::quantize::{Planes, scale, split};

/// One head's plane of a page.
#[derive(Debug, Clone, Copy)]
pub struct Coded {
    /// How codes are found.
    pub coding: Coding,
    /// Values of a column.
    pub dim: usize,
    /// Columns of a page.
    pub columns: usize,
    /// Whether lanes are columns.
    pub keys: bool,
}

/// Bits that lie together, and the bits of a code that they are: (bits, first).
fn parts(bits: u32) -> &'static [(usize, u32)] {
    match bits {
        2 => &[(2, 0)],
        3 => &[(2, 0), (1, 2)],
        4 => &[(4, 0)],
        5 => &[(4, 0), (1, 4)],
        6 => &[(4, 0), (2, 4)],
        _ => &[(8, 0)],
    }
}

/// Byte and shift of a part of `bits` bits, of a code that is the `index`th of a chunk.
#[inline(always)]
fn within_unit(bits: usize, chunk: usize, index: usize) -> (usize, usize) {
    match bits {
        1 => (chunk * 8 + index / 8, index % 8),
        _ => (chunk * bits / 8 * 64 + index, chunk * bits % 8),
    }
}

impl Coded {
    fn unit_bytes(self) -> usize {
        32 * self.coding.bits() as usize
    }

    fn groups(self) -> usize {
        self.coding.groups(self.dim)
    }

    /// Bytes before the scales, and before the zeros.
    fn offsets(self) -> (usize, usize) {
        let scales = self.columns * self.dim / 256 * self.unit_bytes();
        (scales, scales + 2 * self.columns * self.groups())
    }

    /// Scales and zeros, 16 at a time.
    #[inline(always)]
    fn scales(self, bytes: &[u8]) -> (&[[f16; LANES]], &[[f16; LANES]]) {
        let (scales, zeros) = self.offsets();
        (
            cast_slice::<u8, f16>(&bytes[scales..zeros]).as_chunks().0,
            cast_slice::<u8, f16>(&bytes[zeros..]).as_chunks().0,
        )
    }

    /// Calls `visit(code, byte, shift, bits, first)` for each part of each code of a column: it is bits `first..` of the code, and lies at `shift` of a byte.
    #[inline(always)]
    fn places(self, column: usize, mut visit: impl FnMut(usize, usize, usize, usize, u32)) {
        let (block, within) = (column / LANES, column % LANES);
        for group in 0..self.dim / LANES {
            let blocks = self.columns / LANES;
            let unit = if self.keys { block * (self.dim / LANES) + group } else { group * blocks + block };
            let mut at = unit * self.unit_bytes();
            for &(bits, first) in parts(self.coding.bits()) {
                for i in 0..LANES {
                    let (lane, other) = if self.keys { (within, i) } else { (i, within) };
                    let (byte, shift) = within_unit(bits, other / 4, lane * 4 + other % 4);
                    visit(group * LANES + i, at + byte, shift, bits, first);
                }
                at += 32 * bits;
            }
        }
    }

    fn scale_at(self, column: usize, group: usize) -> usize {
        if self.keys {
            (column / LANES * self.groups() + group) * LANES + column % LANES
        } else {
            group * self.columns + column
        }
    }

    /// Stores one column in a head's bytes.
    pub fn write(self, bytes: &mut [u8], column: usize, codes: &[u8], scales: &[Scale]) {
        self.places(column, |i, byte, shift, bits, first| {
            let mask = (0xFFu8 >> (8 - bits)) << shift;
            bytes[byte] = bytes[byte] & !mask | (codes[i] >> first) << shift & mask;
        });
        let (first, zeros) = self.offsets();
        let (before, zero_bytes) = bytes.split_at_mut(zeros);
        let stored: &mut [f16] = cast_slice_mut(&mut before[first..]);
        for (group, scale) in scales.iter().enumerate() {
            stored[self.scale_at(column, group)] = scale.scale;
        }
        let stored: &mut [f16] = cast_slice_mut(zero_bytes);
        for (group, scale) in scales.iter().enumerate().filter(|_| self.coding.has_zeros()) {
            stored[self.scale_at(column, group)] = scale.zero;
        }
    }

    /// The inverse of [`Self::write`].
    pub fn read(self, bytes: &[u8], column: usize, codes: &mut [u8], scales: &mut [Scale]) {
        codes.fill(0);
        self.places(column, |i, byte, shift, bits, first| {
            codes[i] |= (bytes[byte] >> shift & 0xFFu8 >> (8 - bits)) << first;
        });
        let (stored, zeros) = self.scales(bytes);
        for (group, scale) in scales.iter_mut().enumerate() {
            let at = self.scale_at(column, group);
            let zero = if self.coding.has_zeros() { zeros.as_flattened()[at] } else { f16::ZERO };
            *scale = Scale { scale: stored.as_flattened()[at], zero };
        }
    }
}

/// A coding that the compiler knows.
trait Form {
    /// Bits of a code.
    const BITS: u32;
    /// Whether groups have zeros. A code is then its own level.
    const ZEROS: bool;
    /// Bits of a level.
    const LEVEL_BITS: u32;
    /// What levels are counted from, so that they are as small as can be.
    const MIDDLE: i32;
}

struct Of<const BITS: u32, const ZEROS: bool>;

impl<const BITS: u32, const ZEROS: bool> Form for Of<BITS, ZEROS> {
    const BITS: u32 = BITS;
    const ZEROS: bool = ZEROS;
    const LEVEL_BITS: u32 = if ZEROS { BITS } else { 8 };
    const MIDDLE: i32 = if ZEROS { 1 << (BITS - 1) } else { MIDDLE };
}

/// Runs an expression with `$F` as the [`Form`] of a coding.
macro_rules! with_form {
    ($coding:expr, $F:ident => $run:expr) => {
        with_form!($coding, $F => $run; (true, 4), (true, 8), (false, 2), (false, 3), (false, 4), (false, 5), (false, 6), (false, 8))
    };
    ($coding:expr, $F:ident => $run:expr; $(($zeros:literal, $bits:literal)),*) => {
        match ($coding.has_zeros(), $coding.bits()) {
            $(($zeros, $bits) => {
                type $F = Of<$bits, $zeros>;
                $run
            })*
            _ => unreachable!("a coding has one of these forms"),
        }
    };
}

/// Levels by what the low or high half of a byte holds.
#[inline(always)]
fn tables<S: Isa, F: Form>(isa: S, levels: &[u8]) -> [S::B; 4] {
    let table = |of: &dyn Fn(usize) -> usize| {
        let entries: [u8; 16] = std::array::from_fn(|x| levels.get(of(x)).copied().unwrap_or(0));
        isa.table(&entries)
    };
    match F::BITS {
        // A half holds the low two bits of two chunks.
        2 | 3 => [table(&|x| x & 3), table(&|x| 4 + (x & 3)), table(&|x| x >> 2), table(&|x| 4 + (x >> 2))],
        _ => [table(&|x| x), table(&|x| 16 + x), table(&|x| 32 + x), table(&|x| 48 + x)],
    }
}

/// The levels of a chunk of a unit. Loops over chunks are unrolled, so what chunks share is loaded once.
#[inline(always)]
fn levels<S: Isa, F: Form>(isa: S, tables: &[S::B; 4], unit: &[u8], chunk: usize) -> S::B {
    let pieces = unit.as_chunks::<64>().0;
    let masks = unit.as_chunks::<8>().0;
    if F::BITS == 8 {
        return isa.bytes(&pieces[chunk]);
    }
    if F::BITS < 4 {
        let piece = isa.bytes(&pieces[0]);
        let (half, table) = (if chunk < 2 { isa.low(piece) } else { isa.high(piece) }, chunk % 2 * 2);
        let level = isa.lookup(tables[table], half);
        if F::BITS == 2 {
            return level;
        }
        return isa.select(u64::from_le_bytes(masks[8 + chunk]), level, isa.lookup(tables[table + 1], half));
    }
    let piece = isa.bytes(&pieces[chunk / 2]);
    let low = if chunk.is_multiple_of(2) { isa.low(piece) } else { isa.high(piece) };
    if F::ZEROS {
        return low;
    }
    let level = isa.lookup(tables[0], low);
    match F::BITS {
        4 => level,
        5 => isa.select(u64::from_le_bytes(masks[16 + chunk]), level, isa.lookup(tables[1], low)),
        _ => {
            let upper = isa.bytes(&pieces[2]);
            let (one, two) = (isa.bit(upper, 1 << (2 * chunk)), isa.bit(upper, 2 << (2 * chunk)));
            let below = isa.select(one, level, isa.lookup(tables[1], low));
            let above = isa.select(one, isa.lookup(tables[2], low), isa.lookup(tables[3], low));
            isa.select(two, below, above)
        }
    }
}

/// Numbers as integers of 16 bits in two planes, for the queries of a tile: the queries themselves, or the weights of a page.
#[derive(Default)]
pub struct Integers {
    /// `[query][blocks of 16]`
    planes: Vec<Planes>,
    /// What the integers of each query, or of each of its groups of dimensions, are multiplied with.
    scales: [f32; TILE],
    /// Sums of high and low bytes, of each query and group.
    sums: Vec<[i32; 2]>,
    /// Sums of what the integers stand for, likewise.
    totals: Vec<f32>,
    /// Weights of a page times their scales, and times their zeros.
    products: Vec<f32>,
    zeros: Vec<f32>,
}

/// The sum of integers of two planes, times 256 and as they are, in a lane.
#[inline(always)]
fn combined<S: Isa>(isa: S, high: S::I, low: S::I) -> S::F {
    isa.fma(isa.to_f32(high), isa.splat(256.0), isa.to_f32(low))
}

impl Integers {
    /// Rounds `count` queries `[query][dim]`.
    #[inline(always)]
    pub fn set_queries<S: Isa>(&mut self, isa: S, keys: Coded, queries: &[f32], count: usize) {
        let (units, group) = (keys.dim / LANES, keys.coding.group(keys.dim).div_ceil(LANES));
        self.planes.clear();
        self.planes.resize(count * units, Planes::default());
        self.sums.clear();
        self.totals.clear();
        for (i, query) in queries.chunks_exact(keys.dim).enumerate().take(count) {
            let query = query.as_chunks::<LANES>().0;
            let mut largest = isa.splat(0.0);
            for x in query {
                largest = isa.max(largest, isa.abs(isa.load(x)));
            }
            let (inverse, scale) = scale(isa.max_lane(largest));
            self.scales[i] = scale;
            let planes = &mut self.planes[i * units..][..units];
            for (planes, query) in planes.chunks_mut(group).zip(query.chunks(group)) {
                let [high, low] = sums(isa, planes, query, inverse);
                self.sums.push([high, low]);
                self.totals.push(scale * (256 * high + low) as f32);
            }
        }
    }

    /// Rounds the weights of a page times the scales of one group, up to each query's end; gives the sum of weights times zeros of each.
    #[inline(always)]
    fn set_weights<S: Isa, F: Form>(
        &mut self,
        isa: S,
        (scales, zeros): (&[[f16; LANES]], &[[f16; LANES]]),
        weights: &[f32],
        ends: &[usize],
    ) -> [f32; TILE] {
        let blocks = scales.len();
        self.planes.resize(ends.len() * blocks, Planes::default());
        self.products.resize(blocks * LANES, 0.0);
        self.zeros.resize(blocks * LANES, 0.0);
        self.sums.clear();
        let mut offsets = [0.0; TILE];
        for (i, (&end, weights)) in ends.iter().zip(weights.chunks_exact(blocks * LANES)).enumerate() {
            let own = end.div_ceil(LANES);
            let weights = weights.as_chunks::<LANES>().0;
            let products = &mut self.products.as_chunks_mut::<LANES>().0[..own];
            let offset = &mut self.zeros.as_chunks_mut::<LANES>().0[..own];
            for block in 0..own {
                let weight = isa.load(&weights[block]);
                isa.store(isa.mul(weight, isa.load_f16(&scales[block])), &mut products[block]);
                if F::ZEROS {
                    isa.store(isa.mul(weight, isa.load_f16(&zeros[block])), &mut offset[block]);
                }
            }
            // Columns beyond the end weigh nothing; what their scales are is no number of this row.
            products.as_flattened_mut()[end..].fill(0.0);
            offset.as_flattened_mut()[end..].fill(0.0);
            let (mut largest, mut sum) = (isa.splat(0.0), isa.splat(0.0));
            for block in 0..own {
                let product = isa.load(&products[block]);
                largest = isa.max(largest, product);
                // The middle level is part of the zero.
                sum = isa.add(sum, isa.fma(product, isa.splat(F::MIDDLE as f32), isa.load(&offset[block])));
            }
            if F::ZEROS {
                offsets[i] = isa.sum(sum);
            }
            let (inverse, scale) = scale(isa.max_lane(largest));
            self.scales[i] = scale;
            let planes = &mut self.planes[i * blocks..][..blocks];
            self.sums.push(sums(isa, &mut planes[..own], products, inverse));
            planes[own..].fill(Planes::default());
        }
        offsets
    }
}

/// Rounds values to integers in planes; gives the sums of both.
#[inline(always)]
fn sums<S: Isa>(isa: S, planes: &mut [Planes], values: &[[f32; LANES]], inverse: f32) -> [i32; 2] {
    let inverse = isa.splat(inverse);
    let (mut highs, mut lows) = (isa.splat(0.0), isa.splat(0.0));
    for (planes, values) in planes.iter_mut().zip(values) {
        let [high, low] = split(isa, isa.mul(isa.load(values), inverse), planes);
        (highs, lows) = (isa.add(highs, high), isa.add(lows, low));
    }
    [isa.sum(highs) as i32, isa.sum(lows) as i32]
}

/// Runs `$group` for as many queries at a time as there are accumulators for.
macro_rules! in_groups {
    ($group:ident, $count:expr, $first:ident) => {
        in_groups!(@ $group, $count, $first, 4, 3, 1);
    };
    (@ $group:ident, $count:expr, $first:ident, $($n:literal),*) => {
        $(while $count - $first >= $n {
            $group!($n);
            $first += $n;
        })*
    };
}

/// The scores of a page: `scores[i][t] = query i · key t` for the panels of 16 columns that hold the first `columns`.
///
/// A function of its own for each form, so that what calls it is compiled once.
pub struct Scores<'a> {
    /// The keys' layout, and one head's bytes of a page.
    pub keys: (Coded, &'a [u8]),
    /// The queries, and how many.
    pub queries: (&'a Integers, usize),
    /// Columns.
    pub columns: usize,
    /// `[query][columns of a page]`
    pub scores: &'a mut [f32],
}

impl Scores<'_> {
    /// Computes them.
    #[inline(always)]
    pub fn compute<S: Isa>(self, isa: S) {
        with_form!(self.keys.0.coding, F => isa.go(Formed::<Self, F>(self, PhantomData)));
    }
}

/// A kernel for one form.
struct Formed<T, F>(T, PhantomData<F>);

impl<F: Form> Kernel for Formed<Scores<'_>, F> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Scores { keys: (keys, bytes), queries: (queries, count), columns, scores } = self.0;
        let (units, unit_bytes, groups) = (keys.dim / LANES, keys.unit_bytes(), keys.groups());
        let per_group = keys.coding.group(keys.dim).div_ceil(LANES);
        let tables = tables::<S, F>(isa, keys.coding.levels());
        let (scales, zeros) = keys.scales(bytes);
        for panel in 0..columns.div_ceil(LANES) {
            let codes = &bytes[panel * units * unit_bytes..][..units * unit_bytes];
            let mut first = 0;
            macro_rules! group {
                ($n:literal) => {
                    let mut total = [isa.splat(0.0); $n];
                    for group in 0..groups {
                        let (mut high, mut low) = ([isa.splat_i(0); $n], [isa.splat_i(0); $n]);
                        for i in 0..$n {
                            let [a, b] = queries.sums[(first + i) * groups + group];
                            (high[i], low[i]) = (isa.splat_i(-F::MIDDLE * a), isa.splat_i(-F::MIDDLE * b));
                        }
                        let of_group = group * per_group..units.min((group + 1) * per_group);
                        for unit in of_group {
                            let codes = &codes[unit * unit_bytes..][..unit_bytes];
                            for j in 0..4 {
                                let levels = levels::<S, F>(isa, &tables, codes, j);
                                for i in 0..$n {
                                    let planes = &queries.planes[(first + i) * units + unit];
                                    high[i] = isa.dot_levels::<F>(high[i], levels, planes[0][j]);
                                    low[i] = isa.dot_levels::<F>(low[i], levels, planes[1][j]);
                                }
                            }
                        }
                        let scale = isa.load_f16(&scales[panel * groups + group]);
                        let middle = if F::ZEROS {
                            isa.fma(scale, isa.splat(F::MIDDLE as f32), isa.load_f16(&zeros[panel * groups + group]))
                        } else {
                            scale
                        };
                        for i in 0..$n {
                            let sum = isa.mul(combined(isa, high[i], low[i]), isa.splat(queries.scales[first + i]));
                            total[i] = isa.fma(sum, scale, total[i]);
                            if F::ZEROS {
                                let sum = isa.splat(queries.totals[(first + i) * groups + group]);
                                total[i] = isa.fma(middle, sum, total[i]);
                            }
                        }
                    }
                    for i in 0..$n {
                        isa.store(
                            total[i],
                            &mut scores[(first + i) * keys.columns..][..keys.columns].as_chunks_mut().0[panel],
                        );
                    }
                };
            }
            in_groups!(group, count, first);
        }
    }
}

/// Adds the values of a page: `out[i] += Σ_t weights[i][t] * value t` over the first `ends[i]` columns.
pub struct Values<'a> {
    /// The values' layout, and one head's bytes of a page.
    pub values: (Coded, &'a [u8]),
    /// `[query][columns of a page]`
    pub weights: &'a [f32],
    /// Of each query.
    pub ends: &'a [usize],
    /// Memory for weights.
    pub integers: &'a mut Integers,
    /// `[query][dim]`
    pub out: &'a mut [f32],
}

impl Values<'_> {
    /// Adds them.
    #[inline(always)]
    pub fn compute<S: Isa>(self, isa: S) {
        with_form!(self.values.0.coding, F => isa.go(Formed::<Self, F>(self, PhantomData)));
    }
}

impl<F: Form> Kernel for Formed<Values<'_>, F> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Values { values: (values, bytes), weights, ends, integers, out } = self.0;
        let (units, unit_bytes, blocks) = (values.dim / LANES, values.unit_bytes(), values.columns / LANES);
        let per_group = values.coding.group(values.dim).div_ceil(LANES);
        let tables = tables::<S, F>(isa, values.coding.levels());
        let (scales, zeros) = values.scales(bytes);
        let out = out.as_chunks_mut::<LANES>().0;
        for group in 0..values.groups() {
            let scales = &scales[group * blocks..][..blocks];
            let zeros = if F::ZEROS { &zeros[group * blocks..][..blocks] } else { scales };
            let offsets = integers.set_weights::<S, F>(isa, (scales, zeros), weights, ends);
            for unit in group * per_group..units.min((group + 1) * per_group) {
                let codes = &bytes[unit * blocks * unit_bytes..][..blocks * unit_bytes];
                let mut first = 0;
                macro_rules! group {
                    ($n:literal) => {
                        let (mut high, mut low) = ([isa.splat_i(0); $n], [isa.splat_i(0); $n]);
                        let mut end = 0;
                        for i in 0..$n {
                            end = end.max(ends[first + i]);
                            let [a, b] = integers.sums[first + i];
                            (high[i], low[i]) = (isa.splat_i(-F::MIDDLE * a), isa.splat_i(-F::MIDDLE * b));
                        }
                        for block in 0..end.div_ceil(LANES) {
                            let codes = &codes[block * unit_bytes..][..unit_bytes];
                            for j in 0..4 {
                                let levels = levels::<S, F>(isa, &tables, codes, j);
                                for i in 0..$n {
                                    let planes = &integers.planes[(first + i) * blocks + block];
                                    high[i] = isa.dot_levels::<F>(high[i], levels, planes[0][j]);
                                    low[i] = isa.dot_levels::<F>(low[i], levels, planes[1][j]);
                                }
                            }
                        }
                        for i in 0..$n {
                            // A query that sees nothing here is not touched.
                            if ends[first + i] == 0 {
                                continue;
                            }
                            let out = &mut out[(first + i) * units + unit];
                            let scale = isa.splat(integers.scales[first + i]);
                            let mut sum = isa.fma(combined(isa, high[i], low[i]), scale, isa.load(out));
                            if F::ZEROS {
                                sum = isa.add(sum, isa.splat(offsets[first + i]));
                            }
                            isa.store(sum, out);
                        }
                    };
                }
                in_groups!(group, ends.len(), first);
            }
        }
    }
}

/// A dot product with levels of a form.
trait DotLevels: Isa {
    fn dot_levels<F: Form>(self, acc: Self::I, levels: Self::B, x: [i8; 4]) -> Self::I;
}

impl<S: Isa> DotLevels for S {
    #[inline(always)]
    fn dot_levels<F: Form>(self, acc: Self::I, levels: Self::B, x: [i8; 4]) -> Self::I {
        if F::LEVEL_BITS == 4 { self.dot::<4>(acc, levels, x) } else { self.dot::<8>(acc, levels, x) }
    }
}

#[cfg(test)]
mod tests {
    use kvern_state::Codec;

    use super::*;

    #[test]
    fn columns_are_read_as_they_were_written() {
        for bits in [2, 3, 4, 5, 6, 8] {
            for keys in [false, true] {
                let coding = Codec::from_name(&format!("turbo{bits}")).unwrap().coding().unwrap();
                let coded = Coded { coding, dim: 48, columns: 32, keys };
                let mut bytes = vec![0xA5; coded.offsets().1];
                let codes = |column: usize| -> Vec<u8> {
                    (0..48).map(|i| ((column * 31 + i * 7 + column * i) % (1 << bits)) as u8).collect()
                };
                let scale = |column: usize| Scale { scale: f16::from_f32(column as f32), zero: f16::ZERO };
                for column in 0..32 {
                    coded.write(&mut bytes, column, &codes(column), &[scale(column)]);
                }
                for column in 0..32 {
                    let (mut back, mut scales) = ([0; 48], [Scale::default()]);
                    coded.read(&bytes, column, &mut back, &mut scales);
                    assert_eq!((back.to_vec(), scales), (codes(column), [scale(column)]), "{bits} bits");
                }
            }
        }
    }
}
