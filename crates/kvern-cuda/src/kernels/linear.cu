// Products of activations and packed weights: out[row, o] = sum over k of x[row, k] * w[o, k].
//
// Weights are packed for the matrix instruction as its first operand, 16 outputs by 64 inputs at a time, so that a lane loads what it needs with whole
// 16-byte reads and no shuffles. Activations are its second operand. Within 32 inputs, lane t of a quad owns the inputs 8 t .. 8 t + 8: an order of
// inputs inside the instruction that both operands share.
//
// The sum over inputs is cut into segments of equal length that follow from the weight's shape alone. The instruction adds up a segment; segments are added
// in ascending order. A kernel for few rows gives each warp a segment, one for many rows walks them in turn: the bits are the same.
//
// Activations are rounded to 16 bits: to bf16 where weights are, and else to f16 after each row was divided by a power of two that brings its largest value
// just below 2^15. No row overflows, and 11 bits of each large value are kept.

#define SEGMENTS 8

enum Packing { HALF = 0, BRAIN = 1, CODES4 = 2, CODES8 = 3 };

// One weight matrix of a launch.
struct Weight {
    const u8 *codes;   // [tile of 16 outputs][64 inputs][lane]: 64, 16 or 32 bytes a lane.
    const u32 *scales; // [tile][group of inputs][16 outputs]: scale and bias in f16.
    const float *bias;
    float *out;
    u32 outputs, width; // Of the tensor that `out` is.
    u32 shift;          // log2 of the inputs of a group; 31 without groups.
    u32 zero;           // 1024 + the code of nothing, as f16, twice.
};
struct Weights {
    Weight of[4];
    u32 tiles[4]; // Ends of each one's tiles in the grid.
    u32 count;
};

template <int PACKING> struct Pack {
    static const int RAW = PACKING == BRAIN ? BF16 : F16;
    static const int BYTES = PACKING == CODES4 ? 16 : PACKING == CODES8 ? 32 : 64; // A lane's, of 64 inputs.
};

// (x - zero) * scale + bias of two codes, rounded once. A code is the mantissa of 1024 + code; or, four bits higher, of 1024 + 16 code, which is divided first:
// both differences are exact.
__device__ __forceinline__ u32 decode2(u32 x, u32 zero, u32 scale, u32 bias) {
    u32 y;
    asm("{ .reg .b32 d; sub.rn.f16x2 d, %1, %2; fma.rn.f16x2 %0, d, %3, %4; }" : "=r"(y) : "r"(x), "r"(zero), "r"(scale), "r"(bias));
    return y;
}
__device__ __forceinline__ u32 decode2_high(u32 x, u32 zero, u32 scale, u32 bias) {
    u32 y, sixteenth = 0x2c002c00;
    asm("{ .reg .b32 d; fma.rn.f16x2 d, %1, %2, %3; fma.rn.f16x2 %0, d, %4, %5; }" : "=r"(y) : "r"(x), "r"(sixteenth), "r"(zero), "r"(scale), "r"(bias));
    return y;
}

// The code of nothing, as each of the two takes it: 1024 + zero, and -(64 + zero).
struct Zero {
    u32 low, high;
};
__device__ __forceinline__ Zero zeros(u32 zero) {
    u32 high, from = 0x63806380; // 960, twice.
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(from), "r"(zero));
    return {zero, high};
}

// The scales and biases of a lane's two outputs for its 8 of 32 inputs from `k` on. `scales` points at the tile's first group.
__device__ __forceinline__ uint2 scales_of(const Weight &weight, const u32 *scales, u32 k, u32 lane) {
    const u32 *from = scales + ((k + lane % 4 * 8) >> weight.shift) * 16 + lane / 4;
    return make_uint2(load_ahead(from), load_ahead(from + 8));
}

// The two instruction operands of 32 inputs, of the 64 whose packed pieces lie `apart` pieces from each other.
template <int PACKING>
__device__ __forceinline__ void unpack(const uint4 *packed, u32 apart, int chunk, Zero zero, uint2 scales, u32 (&a)[2][4]) {
    if (PACKING == HALF || PACKING == BRAIN) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 piece = packed[(chunk * 2 + half) * apart];
            a[half][0] = piece.x, a[half][1] = piece.y, a[half][2] = piece.z, a[half][3] = piece.w;
        }
        return;
    }
    uint4 piece = packed[PACKING == CODES4 ? 0 : chunk * apart];
    u32 scale[2] = {__byte_perm(scales.x, 0, 0x1010), __byte_perm(scales.y, 0, 0x1010)};
    u32 bias[2] = {__byte_perm(scales.x, 0, 0x3232), __byte_perm(scales.y, 0, 0x3232)};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32(&out)[4] = a[half];
        if (PACKING == CODES4) {
            u32 word = chunk == 0 ? (half == 0 ? piece.x : piece.y) : (half == 0 ? piece.z : piece.w), next = word >> 8;
            out[0] = (word & 0x000f000f) | 0x64006400, out[1] = (word & 0x00f000f0) | 0x64006400;
            out[2] = (next & 0x000f000f) | 0x64006400, out[3] = (next & 0x00f000f0) | 0x64006400;
        } else {
            u32 low = half == 0 ? piece.x : piece.z, high = half == 0 ? piece.y : piece.w;
            out[0] = __byte_perm(low, 0x64646464, 0x4140), out[1] = __byte_perm(low, 0x64646464, 0x4342);
            out[2] = __byte_perm(high, 0x64646464, 0x4140), out[3] = __byte_perm(high, 0x64646464, 0x4342);
        }
#pragma unroll
        for (int r = 0; r < 4; r++)
            out[r] = PACKING == CODES4 && r % 2 == 1 ? decode2_high(out[r], zero.high, scale[1], bias[1]) : decode2(out[r], zero.low, scale[r % 2], bias[r % 2]);
    }
}

__device__ __forceinline__ const Weight &weight_of(const Weights &weights, u32 &tile) {
    u32 index = 0;
    while (index + 1 < weights.count && tile >= weights.tiles[index]) index++;
    if (index > 0) tile -= weights.tiles[index - 1];
    return weights.of[index];
}

__device__ __forceinline__ void finish(const Weight &weight, u32 row, u32 output, float sum, float scale, bool add) {
    if (output >= weight.outputs) return;
    float *out = weight.out + (size_t)row * weight.width + output;
    float y = sum * scale;
    if (weight.bias) y += weight.bias[output];
    *out = add ? *out + y : y;
}

// A number that the compiler knows.
template <int N> struct Int {
    static const int VALUE = N;
};

// Up to 8 * NT rows: a block has 16 * MT outputs, a warp one segment of their inputs. `x` is [rows, inputs] in 16 bits, rows and inputs padded; inputs are
// counted in blocks of 64.
template <int PACKING, int MT, int NT>
__device__ __forceinline__ void narrow(const Weights &weights, const u16 *x, const float *row_scales, u32 rows, u32 blocks, u32 length, bool add) {
    const bool CODED = PACKING == CODES4 || PACKING == CODES8;
    const int PIECES = Pack<PACKING>::BYTES / 16, STAGE = MT * NT > 2 ? 1 : 2;
    __shared__ float partial[SEGMENTS][MT * NT][128];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 tile = blockIdx.x * MT;
    const Weight &weight = weight_of(weights, tile);
    u32 begin = min(warp * length, blocks), end = min(begin + length, blocks);
    size_t groups = (u64)blocks * 64 >> weight.shift;
    Zero zero = zeros(weight.zero);
    const uint4 *codes = (const uint4 *)weight.codes + (size_t)tile * blocks * PIECES * 32 + lane;
    const u32 *scales = weight.scales + (size_t)tile * groups * 16;
    const u16 *input = x + (size_t)g * blocks * 64 + t * 8;
    float sums[MT][NT][4] = {};
    // Two stages of weights: one is multiplied while the other is on its way.
    uint4 packed[2][STAGE][MT][PIECES];
    uint2 factors[2][STAGE][MT][2];
    auto fetch = [&](auto count, u32 block, int to) {
        const uint4 *from = codes + (size_t)block * PIECES * 32;
#pragma unroll
        for (int u = 0; u < count.VALUE; u++)
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int i = 0; i < PIECES; i++) packed[to][u][m][i] = load_once(from + ((size_t)m * blocks * PIECES + u * PIECES + i) * 32);
                if (!CODED) continue;
                factors[to][u][m][0] = scales_of(weight, scales + m * groups * 16, (block + u) * 64, lane);
                // Groups of 64 inputs and more have one scale for both halves.
                if (weight.shift < 6) factors[to][u][m][1] = scales_of(weight, scales + m * groups * 16, (block + u) * 64 + 32, lane);
                else factors[to][u][m][1] = factors[to][u][m][0];
            }
    };
    auto multiply = [&](auto count, u32 block, int from) {
        const u16 *at = input + (size_t)block * 64;
        // Activations of several products at once, so that their loads overlap.
        const int AHEAD = NT > 2 ? 1 : count.VALUE * 2;
        uint4 b[AHEAD][NT];
#pragma unroll
        for (int part = 0; part < count.VALUE * 2; part++) {
            if (part % AHEAD == 0) {
#pragma unroll
                for (int next = 0; next < AHEAD; next++)
#pragma unroll
                    for (int n = 0; n < NT; n++) b[next][n] = load_ahead(at + (size_t)n * 8 * blocks * 64 + (part + next) * 32);
            }
            u32 a[MT][2][4];
#pragma unroll
            for (int m = 0; m < MT; m++) unpack<PACKING>(packed[from][part / 2][m], 1, part % 2, zero, factors[from][part / 2][m][part % 2], a[m]);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    uint4 y = b[part % AHEAD][n];
#pragma unroll
                    for (int m = 0; m < MT; m++)
                        mma<Pack<PACKING>::RAW>(sums[m][n], a[m][half], half == 0 ? y.x : y.z, half == 0 ? y.y : y.w);
                }
        }
    };
    // Whole stages, then what is left of the segment, block by block. Weights are there already; activations may still be on their way.
    const Int<STAGE> all;
    const Int<1> one;
    u32 whole = begin + (end - begin) / STAGE * STAGE;
    if (begin < whole) fetch(all, begin, 0);
    else if (begin < end) fetch(one, begin, 0);
    wait_for_earlier_kernels();
    for (u32 block = begin; block < whole; block += 2 * STAGE) {
        if (block + STAGE < whole) fetch(all, block + STAGE, 1);
        multiply(all, block, 0);
        if (block + STAGE >= whole) break;
        if (block + 2 * STAGE < whole) fetch(all, block + 2 * STAGE, 0);
        multiply(all, block + STAGE, 1);
    }
    for (u32 block = whole; block < end; block++) {
        if (block > begin) fetch(one, block, 0);
        multiply(one, block, 0);
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) partial[warp][m * NT + n][(2 * t + i % 2) * 16 + g + i / 2 * 8] = sums[m][n][i];
    __syncthreads();
    u32 segments = (blocks + length - 1) / length;
    for (u32 i = threadIdx.x; i < MT * NT * 128; i += blockDim.x) {
        u32 part = i / 128, m = part / NT, row = part % NT * 8 + i % 128 / 16, output = (tile + m) * 16 + i % 16;
        if (row >= rows) continue;
        float sum = partial[0][part][i % 128];
        for (u32 segment = 1; segment < segments; segment++) sum += partial[segment][part][i % 128];
        finish(weight, row, output, sum, row_scales[row], add);
    }
}

// Any number of rows: a block has 128 outputs and 128 rows, a warp 16 * WM outputs and 8 * WN rows of them. Inputs come in blocks of 64, four of them on
// their way at a time.
#define WIDE_STAGES 4
template <int PACKING, int WM, int WN>
__device__ __forceinline__ void wide(const Weights &weights, const u16 *x, const float *row_scales, u32 rows, u32 blocks, u32 length, bool add) {
    const bool CODED = PACKING == CODES4 || PACKING == CODES8;
    const int PIECES = Pack<PACKING>::BYTES / 16, A = 8 * PIECES * 512, B = 128 * 128, ACROSS = 8 / WM;
    extern __shared__ __align__(128) u8 shared[];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 tile = blockIdx.y * 8, first = blockIdx.x * 128;
    const Weight &weight = weight_of(weights, tile);
    u32 last = (weight.outputs + 15) / 16 - 1;
    size_t groups = (u64)blocks * 64 >> weight.shift;
    Zero zero = zeros(weight.zero);
    u32 m0 = warp % ACROSS * WM, n0 = warp / ACROSS * WN;
    wait_for_earlier_kernels();
    auto fetch = [&](u32 block) {
        u8 *to = shared + block % WIDE_STAGES * (A + B);
        for (u32 i = threadIdx.x; i < 8 * PIECES * 32; i += 256) {
            u32 row = min(tile + i / (PIECES * 32), last);
            copy_async(to + i * 16, weight.codes + (((size_t)row * blocks + block) * PIECES * 32 + i % (PIECES * 32)) * 16);
        }
        // [half][row][32 inputs], so that a quarter of a warp reads 128 bytes in a row.
        for (u32 i = threadIdx.x; i < 1024; i += 256) {
            u32 row = i / 8, piece = i % 8;
            copy_async(to + A + piece / 4 * 8192 + row * 64 + piece % 4 * 16, x + ((size_t)first + row) * blocks * 64 + block * 64 + piece * 8);
        }
    };
#pragma unroll
    for (u32 stage = 0; stage < WIDE_STAGES - 1; stage++) {
        if (stage < blocks) fetch(stage);
        copy_commit();
    }
    float sums[WM][WN][4] = {};
    // Sums of whole segments, out of the way of the registers.
    float4 *totals = (float4 *)(shared + WIDE_STAGES * (A + B)) + threadIdx.x;
    // Operands of 32 inputs at a time, the next ones on their way from shared memory while these are multiplied.
    u32 a[2][WM][2][4];
    uint4 b[2][WN];
    auto take = [&](u32 block, int chunk, int to) {
        const u8 *from = shared + block % WIDE_STAGES * (A + B);
#pragma unroll
        for (int n = 0; n < WN; n++) b[to][n] = *(const uint4 *)(from + A + chunk * 8192 + ((n0 + n) * 8 + g) * 64 + t * 16);
#pragma unroll
        for (int m = 0; m < WM; m++) {
            const uint4 *packed = (const uint4 *)from + (m0 + m) * PIECES * 32 + lane;
            const u32 *scales = weight.scales + (size_t)min(tile + m0 + m, last) * groups * 16;
            uint2 factors = CODED ? scales_of(weight, scales, block * 64 + chunk * 32, lane) : make_uint2(0, 0);
            unpack<PACKING>(packed, 32, chunk, zero, factors, a[to][m]);
        }
    };
    copy_wait<WIDE_STAGES - 2>();
    __syncthreads();
    take(0, 0, 0);
    for (u32 block = 0; block < blocks; block++) {
#pragma unroll
        for (int chunk = 0; chunk < 2; chunk++) {
            if (chunk == 0) {
                take(block, 1, 1);
                // Everyone has passed the last barrier, and so has taken all of the block before, whose place this one's takes.
                if (block + WIDE_STAGES - 1 < blocks) fetch(block + WIDE_STAGES - 1);
                copy_commit();
            } else {
                copy_wait<WIDE_STAGES - 2>();
                __syncthreads();
                if (block + 1 < blocks) take(block + 1, 0, 0);
            }
            // Instructions that follow each other add to different sums.
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int m = 0; m < WM; m++)
#pragma unroll
                    for (int n = 0; n < WN; n++)
                        mma<Pack<PACKING>::RAW>(sums[m][n], a[chunk][m][half], half == 0 ? b[chunk][n].x : b[chunk][n].z, half == 0 ? b[chunk][n].y : b[chunk][n].w);
        }
        if ((block + 1) % length == 0 || block + 1 == blocks) {
            bool start = block < length, end = block + 1 == blocks;
#pragma unroll
            for (int m = 0; m < WM; m++)
#pragma unroll
                for (int n = 0; n < WN; n++) {
                    float(&c)[4] = sums[m][n];
                    float4 *total = totals + (m * WN + n) * 256;
                    if (!start) {
                        float4 x = *total;
                        c[0] = x.x + c[0], c[1] = x.y + c[1], c[2] = x.z + c[2], c[3] = x.w + c[3];
                    }
                    if (end) continue;
                    *total = make_float4(c[0], c[1], c[2], c[3]);
                    c[0] = c[1] = c[2] = c[3] = 0.0f;
                }
        }
    }
#pragma unroll
    for (int m = 0; m < WM; m++)
#pragma unroll
        for (int n = 0; n < WN; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 row = first + (n0 + n) * 8 + 2 * t + i % 2, output = (tile + m0 + m) * 16 + g + i / 2 * 8;
                if (row < rows) finish(weight, row, output, sums[m][n][i], row_scales[row], add);
            }
}

#define NARROW(NAME, PACKING, MT, NT, BLOCKS)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) NAME(Weights weights, const u16 *x, const float *scales, u32 rows, u32 blocks, \
                                                              u32 length, u32 add) {                                                    \
        narrow<PACKING, MT, NT>(weights, x, scales, rows, blocks, length, add);                                                         \
    }
#define WIDE(NAME, PACKING, WM, WN)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 1) NAME(Weights weights, const u16 *x, const float *scales, u32 rows, u32 blocks, \
                                                              u32 length, u32 add) {                                                    \
        wide<PACKING, WM, WN>(weights, x, scales, rows, blocks, length, add);                                                           \
    }
#define PRODUCTS(NAME, PACKING, WM, WN)  \
    NARROW(NAME##_narrow8, PACKING, 1, 1, PACKING == CODES4 ? 3 : 2) \
    NARROW(NAME##_narrow16, PACKING, 1, 2, 2) \
    NARROW(NAME##_narrow32, PACKING, 2, 4, 2) \
    NARROW(NAME##_narrow64, PACKING, 1, 8, 2) \
    WIDE(NAME##_wide, PACKING, WM, WN)

PRODUCTS(half, HALF, 4, 4)
PRODUCTS(brain, BRAIN, 4, 4)
PRODUCTS(codes4, CODES4, 2, 8)
PRODUCTS(codes8, CODES8, 2, 8)

// Weights in f32, for comparisons: [outputs, inputs] as they are. A warp has one output and four rows at a time; lanes take every 32nd input.
extern "C" __global__ void __launch_bounds__(256) exact(const float *weight, const float *bias, const float *x, float *out, u32 outputs, u32 inputs, u32 rows, u32 add) {
    wait_for_earlier_kernels();
    u32 output = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * 4;
    if (output >= outputs) return;
    const float *w = weight + (size_t)output * inputs;
    float sums[4] = {};
    for (u32 k = lane; k < inputs; k += 32)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first + i < rows) sums[i] = fmaf(w[k], x[(size_t)(first + i) * inputs + k], sums[i]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float sum = warp_reduce<Sum>(sums[i]);
        if (lane == 0 && first + i < rows) {
            float *to = out + (size_t)(first + i) * outputs + output;
            float y = bias ? sum + bias[output] : sum;
            *to = add ? *to + y : y;
        }
    }
}

// What becomes the activations of a product: x itself, its norm, or activation(x) * up; in 16 bits, in rows of `padded` values, and a factor for each row.
// The row is kept in shared memory. Also writes f32 where `out` is given.
enum Input { PLAIN = 0, NORMED = 1, GATED = 2 };
extern "C" __global__ void __launch_bounds__(1024) prepare(const float *x, const float *other, int input, int activation, float eps, u32 width, u32 padded, u32 brain,
                                    u16 *to, float *scales) {
    extern __shared__ __align__(16) float row[];
    __shared__ float sums[32], maxima[32];
    // A norm's weights are there already.
    bool whole = width % 4 == 0;
    float4 early = input == NORMED && whole && threadIdx.x * 4 < width ? *(const float4 *)(other + threadIdx.x * 4) : make_float4(0, 0, 0, 0);
    wait_for_earlier_kernels();
    const float *from = x + (size_t)blockIdx.x * width, *second = input == GATED ? other + (size_t)blockIdx.x * width : other;
    u16 *out = to + (size_t)blockIdx.x * padded;
    float squares = 0.0f, largest = 0.0f;
    // A thread keeps to its own four values of each round, so that nothing but the sums needs a barrier. Rows are padded to whole rounds.
    for (u32 i = threadIdx.x * 4; i < padded; i += blockDim.x * 4) {
        float4 y = make_float4(0, 0, 0, 0), w = y;
        if (whole && i < width) {
            y = *(const float4 *)(from + i);
            if (input != PLAIN) w = input == NORMED && i == threadIdx.x * 4 ? early : *(const float4 *)(second + i);
        } else {
            for (int j = 0; j < 4; j++)
                if (i + j < width) (&y.x)[j] = from[i + j], (&w.x)[j] = input != PLAIN ? second[i + j] : 0.0f;
        }
        if (input == GATED) {
            y.x = activated(activation, y.x) * w.x, y.y = activated(activation, y.y) * w.y;
            y.z = activated(activation, y.z) * w.z, y.w = activated(activation, y.w) * w.w;
        } else if (input == NORMED) {
            squares = fmaf(y.x, y.x, squares), squares = fmaf(y.y, y.y, squares), squares = fmaf(y.z, y.z, squares), squares = fmaf(y.w, y.w, squares);
            y.x *= w.x, y.y *= w.y, y.z *= w.z, y.w *= w.w;
        }
        largest = fmaxf(fmaxf(fmaxf(largest, fabsf(y.x)), fmaxf(fabsf(y.y), fabsf(y.z))), fabsf(y.w));
        *(float4 *)(row + i) = y;
    }
    float factor = 1.0f, scale = 1.0f;
    if (input == NORMED) factor = rsqrtf(block_reduce<Sum>(squares, sums) / width + eps);
    if (!brain) {
        largest = block_reduce<Max>(largest, maxima) * factor;
        // The exponent that brings the largest value into 2^14 .. 2^15; nothing for zeros, and what is not finite stays so.
        int exponent = (int)(__float_as_uint(largest) >> 23) - 127 - 14;
        exponent = largest > 0.0f && largest < INFINITY ? max(exponent, -100) : 0;
        scale = exp2f((float)exponent);
    }
    factor *= 1.0f / scale;
    for (u32 i = threadIdx.x * 4; i < padded; i += blockDim.x * 4) {
        float4 y = *(const float4 *)(row + i);
        uint2 z = brain ? make_uint2(narrow2<BF16>(y.x * factor, y.y * factor), narrow2<BF16>(y.z * factor, y.w * factor))
                        : make_uint2(narrow2<F16>(y.x * factor, y.y * factor), narrow2<F16>(y.z * factor, y.w * factor));
        *(uint2 *)(out + i) = z;
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

// Packs raw weights [outputs, inputs] of 16 bits: a thread has one lane's bytes of 64 inputs.
extern "C" __global__ void pack_raw(const u16 *weight, u32 outputs, u32 inputs, u32 blocks, u16 *to) {
    wait_for_earlier_kernels();
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 block = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, tile = blockIdx.y;
    if (block >= blocks) return;
    for (u32 i = 0; i < 32; i++) {
        u32 step = i / 8, reg = i % 8 / 2, row = tile * 16 + g + reg % 2 * 8;
        u32 k = block * 64 + step / 2 * 32 + t * 8 + step % 2 * 4 + reg / 2 * 2 + i % 2;
        u16 x = row < outputs && k < inputs ? weight[(size_t)row * inputs + k] : 0;
        to[((((size_t)tile * blocks + block) * 4 + step) * 32 + lane) * 8 + i % 8] = x;
    }
}

// Packs codes [outputs, inputs] of a byte each.
extern "C" __global__ void pack_codes(const u8 *codes, u32 outputs, u32 inputs, u32 blocks, u32 bits, u8 *to) {
    wait_for_earlier_kernels();
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 block = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, tile = blockIdx.y;
    if (block >= blocks) return;
    for (u32 step = 0; step < 4; step++) {
        u32 words[2] = {};
        for (u32 i = 0; i < 8; i++) {
            u32 reg = i / 2, row = tile * 16 + g + reg % 2 * 8;
            u32 k = block * 64 + step / 2 * 32 + t * 8 + step % 2 * 4 + reg / 2 * 2 + i % 2;
            u32 code = row < outputs && k < inputs ? codes[(size_t)row * inputs + k] : 0;
            if (bits == 4) words[0] |= code << (4 * (reg + i % 2 * 4));
            else words[i / 4] |= code << (8 * (i % 4));
        }
        if (bits == 4) {
            ((u32 *)to)[(((size_t)tile * blocks + block) * 32 + lane) * 4 + step] = words[0];
        } else {
            u32 *out = (u32 *)to + ((((size_t)tile * blocks + block) * 2 + step / 2) * 32 + lane) * 4 + step % 2 * 2;
            out[0] = words[0], out[1] = words[1];
        }
    }
}

// Packs scales and biases [outputs, groups] of f32 as pairs of f16. Groups beyond the inputs, and outputs beyond the last, decode to zero.
extern "C" __global__ void pack_scales(const float *scales, const float *biases, u32 outputs, u32 groups, u32 padded, u32 *to) {
    wait_for_earlier_kernels();
    u32 at = blockIdx.x * blockDim.x + threadIdx.x, tile = blockIdx.y;
    if (at >= padded * 16) return;
    u32 row = tile * 16 + at % 16, group = at / 16;
    bool real = row < outputs && group < groups;
    size_t from = (size_t)row * groups + group;
    to[(size_t)tile * padded * 16 + at] = real ? narrow2<F16>(scales[from], biases[from]) : 0;
}

// One weight of a packed matrix, as products see it.
__device__ float weight_at(const Weight &weight, int packing, u32 blocks, u32 row, u32 k) {
    u32 tile = row / 16, g = row % 8, high = row % 16 / 8, block = k / 64, step = k % 64 / 32 * 2 + k % 8 / 4, t = k % 32 / 8;
    u32 lane = g * 4 + t, reg = k % 4 / 2 * 2 + high, at = reg * 2 + k % 2;
    size_t base = (size_t)tile * blocks + block;
    if (packing == HALF || packing == BRAIN) {
        u16 x = ((const u16 *)weight.codes)[((base * 4 + step) * 32 + lane) * 8 + at];
        return packing == HALF ? widen_f16(x) : widen_bf16(x);
    }
    u32 code;
    if (packing == CODES4) code = ((const u32 *)weight.codes)[(base * 32 + lane) * 4 + step] >> (4 * (reg + k % 2 * 4)) & 15;
    else code = weight.codes[((base * 2 + step / 2) * 32 + lane) * 16 + step % 2 * 8 + at];
    u32 pair = weight.scales[((size_t)tile * (blocks * 64 >> weight.shift) + (k >> weight.shift)) * 16 + row % 16];
    float zero = widen_f16((u16)weight.zero);
    return widen_f16(narrow_f16(fmaf(1024.0f + code - zero, widen_f16((u16)pair), widen_f16((u16)(pair >> 16)))));
}

// out[t] = scale * row token[t] of a packed matrix; packing 4 is f32.
extern "C" __global__ void embed(Weight weight, int packing, u32 blocks, const u32 *tokens, float scale, float *out, u32 width) {
    wait_for_earlier_kernels();
    u32 row = tokens[blockIdx.x];
    for (u32 k = threadIdx.x; k < width; k += blockDim.x) {
        float x = packing == 4 ? ((const float *)weight.codes)[(size_t)row * width + k] : weight_at(weight, packing, blocks, row, k);
        out[(size_t)blockIdx.x * width + k] = scale * x;
    }
}
