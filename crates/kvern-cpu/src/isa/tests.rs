//! Every set against the portable one, operation by operation.

use super::*;

/// Runs `f` for every set of this CPU.
macro_rules! each_set {
    ($name:ident, $isa:ident, $body:block) => {
        #[test]
        fn $name() {
            struct Case;
            impl Kernel for Case {
                #[inline(always)]
                fn run<S: Isa>(self, $isa: S) {
                    $body
                }
            }
            for set in KernelSet::available() {
                set.run(Case);
            }
        }
    };
}

fn ramp() -> [f32; LANES] {
    std::array::from_fn(|i| i as f32 * 1.25 - 9.5)
}

fn lanes<S: Isa>(isa: S, value: S::F) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    isa.store(value, &mut out);
    out
}

each_set!(arithmetic_is_per_lane, isa, {
    let (a, b) = (ramp(), ramp().map(|x| 3.0 - x * 0.5));
    let (va, vb) = (isa.load(&a), isa.load(&b));
    let s = Scalar::new();
    assert_eq!(lanes(isa, isa.add(va, vb)), s.add(a, b));
    assert_eq!(lanes(isa, isa.mul(va, vb)), s.mul(a, b));
    assert_eq!(lanes(isa, isa.div(va, vb)), s.div(a, b));
    assert_eq!(lanes(isa, isa.max(va, vb)), s.max(a, b));
    assert_eq!(lanes(isa, isa.min(va, vb)), s.min(a, b));
    assert_eq!(lanes(isa, isa.abs(va)), s.abs(a));
    assert_eq!(lanes(isa, isa.round(va)), s.round(a));
    assert_eq!(lanes(isa, isa.floor(va)), s.floor(a));
    assert_eq!(lanes(isa, isa.to_f32(isa.times_256(isa.add_i(isa.splat_i(-3), isa.splat_i(1))))), [-512.0; LANES]);
    assert_eq!(lanes(isa, isa.fma(va, vb, va)), s.fma(a, b, a), "these products are exact");
    assert_eq!(isa.sum(va), s.sum(a));
    assert_eq!(isa.max_lane(va), 9.25);
});

each_set!(halves_widen_exactly, isa, {
    let values = ramp();
    assert_eq!(lanes(isa, isa.load_f16(&values.map(f16::from_f32))), values);
    assert_eq!(lanes(isa, isa.load_bf16(&values.map(bf16::from_f32))), values);
    let thirds = values.map(|x| x / 3.0);
    let (mut half, mut brain) = ([f16::ZERO; LANES], [bf16::ZERO; LANES]);
    f16::store(isa, isa.load(&thirds), &mut half);
    bf16::store(isa, isa.load(&thirds), &mut brain);
    assert_eq!(half, thirds.map(f16::from_f32));
    assert_eq!(brain, thirds.map(bf16::from_f32));
});

each_set!(exp_is_within_bound, isa, {
    for step in -1050..=890 {
        let x = step as f32 * 0.1 + 0.013;
        let got = lanes(isa, isa.exp(isa.splat(x)))[7];
        let want = f64::from(x).exp();
        if want > f64::from(f32::MIN_POSITIVE) && want < f64::from(f32::MAX) {
            assert!((f64::from(got) / want - 1.0).abs() < 3e-7, "exp({x}) = {got}, not {want}");
        }
    }
    assert_eq!(lanes(isa, isa.exp(isa.splat(f32::NEG_INFINITY)))[0], 0.0);
    assert_eq!(lanes(isa, isa.exp(isa.splat(0.0)))[0], 1.0);
    assert_eq!(lanes(isa, isa.exp(isa.splat(200.0)))[0], f32::INFINITY);
    assert!(lanes(isa, isa.exp(isa.splat(f32::NAN)))[0].is_nan());
});

each_set!(bytes_split_and_dot_exactly, isa, {
    let packed: [u8; 64] = std::array::from_fn(|i| (i * 37 + 11) as u8);
    let mask = 0x9234_5678_0fed_cba9u64;
    let s = Scalar::new();
    for x in [[127, -127, 1, -3], [-127; 4], [0, 5, -128, 127]] {
        let acc = isa.splat_i(-17);
        let v = isa.bytes(&packed);
        let sum = |value: S::I| lanes(isa, isa.to_f32(value));
        let want = |codes: [u8; 64]| s.to_f32(s.dot::<8>([-17; LANES], codes, x));
        assert_eq!(sum(isa.dot::<8>(acc, v, x)), want(packed));
        assert_eq!(sum(isa.dot::<4>(acc, isa.low(v), x)), want(s.low(packed)));
        assert_eq!(sum(isa.dot::<4>(acc, isa.high(v), x)), want(s.high(packed)));
        let planes = isa.with_bit(isa.with_bit(isa.no_bytes(), mask, 32), !mask, 16);
        let wanted = s.with_bit(s.with_bit([0; 64], mask, 32), !mask, 16);
        assert_eq!(sum(isa.dot::<6>(acc, planes, x)), want(wanted));
        let table = std::array::from_fn(|i| (250 - i * 7) as u8);
        let entries = isa.lookup(isa.table(&table), isa.low(v));
        assert_eq!(sum(isa.dot::<8>(acc, entries, x)), want(s.low(packed).map(|code| table[usize::from(code)])));
        let chosen = isa.select(mask, v, isa.low(v));
        assert_eq!(sum(isa.dot::<8>(acc, chosen, x)), want(s.select(mask, packed, s.low(packed))));
        for bit in [1, 8, 128] {
            assert_eq!(isa.bit(v, bit), s.bit(packed, bit));
        }
    }
});

each_set!(bytes_round_to_even, isa, {
    let values: [f32; LANES] = std::array::from_fn(|i| i as f32 * 16.5 - 126.5);
    let mut out = [0; LANES];
    isa.store_i8(isa.load(&values.map(|x| x.clamp(-127.0, 127.0))), &mut out);
    assert_eq!(out, values.map(|x| x.clamp(-127.0, 127.0).round_ties_even() as i8));
});
