// Products of activations and packed weights: out[row, o] = sum over k of x[row, k] * w[o, k].
//
// Weights are packed for the matrix instruction as its first operand, 16 outputs by 64 inputs at a time, so that a lane loads what it needs with whole
// 16-byte reads and no shuffles. Activations are its second operand, prepared in the order of inputs that one instruction takes from one lane.
//
// The sum over inputs is cut into segments of equal length that follow from the weight's shape alone. The instruction adds up a segment; segments are added
// in ascending order. A kernel for few rows gives each warp a segment, one for many rows walks them in turn: the bits are the same.
//
// Codes are multiplied as they are: four bits or a byte at the end of 16 are, read as f16, the code times 2^-24, which the instruction takes exactly. It adds
// up a unit of inputs that share a scale; the unit's sum times the scale, and the sum of its activations times the bias, go to the segment's sum in f32.
//
// Activations are rounded to 16 bits: to bf16 where weights are, and else to f16 after a row's share of each segment was divided by a power of two that brings
// its largest value just below 2^15. Nothing overflows, and 11 bits of each large value are kept.

#define SEGMENTS 8

enum Packing { HALF = 0, BRAIN = 1, CODES4 = 2, CODES8 = 3 };

// One weight matrix of a launch: w = scale * code + bias.
struct Weight {
    const u8 *codes;   // [tile of 16 outputs][64 inputs][lane]: 64, 16 or 32 bytes a lane.
    const u32 *scales; // [tile][group of inputs][16 outputs, 0 8 1 9 ..]: scale and bias in f16.
    const float *bias;
    float *out;
    u32 outputs, width; // Of the tensor that `out` is.
    u32 shift;          // log2 of the inputs of a group.
};
struct Weights {
    Weight of[4];
    u32 tiles[4]; // Ends of each one's tiles in the grid.
    u32 count;
};

// Prepared activations, and how they are multiplied.
struct Inputs {
    const u16 *x;        // [row][64 * blocks]
    const float *scales; // [segment][stride]: of each row, powers of two; all 1 for bf16.
    const float *sums;   // [unit][stride]: of a row's inputs, for codes.
    u32 rows, stride;
    u32 blocks, length; // Blocks of 64 inputs, in all and of a segment.
    u32 unit;           // log2 of the inputs that share a scale, at most 6.
    u32 add;
};

template <int PACKING> struct Pack {
    static const bool CODED = PACKING == CODES4 || PACKING == CODES8;
    static const bool SCALED = PACKING != BRAIN; // Whether activations are.
    static const int RAW = PACKING == BRAIN ? BF16 : F16;
    static const int PIECES = PACKING == CODES4 ? 1 : PACKING == CODES8 ? 2 : 4; // Of 16 bytes: a lane's share of 64 inputs.
};

// The operands of two instructions, 16 inputs each, from a lane's packed pieces, which lie `apart` pieces from each other. Of four bits, those of the upper
// eight outputs are 2^-20 times the code.
template <int PACKING> __device__ __forceinline__ void unpack(const uint4 *packed, u32 apart, int chunk, u32 (&a)[2][4]) {
    uint4 piece = packed[PACKING == CODES4 ? 0 : PACKING == CODES8 ? chunk * apart : chunk * 2 * apart];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32(&out)[4] = a[half];
        if (PACKING == CODES4) {
            u32 word = chunk == 0 ? (half == 0 ? piece.x : piece.y) : (half == 0 ? piece.z : piece.w), next = word >> 8;
            out[0] = word & 0x000f000f, out[1] = word & 0x00f000f0, out[2] = next & 0x000f000f, out[3] = next & 0x00f000f0;
        } else if (PACKING == CODES8) {
            u32 low = half == 0 ? piece.x : piece.z, high = half == 0 ? piece.y : piece.w;
            out[0] = __byte_perm(low, 0, 0x4140), out[1] = __byte_perm(low, 0, 0x4342);
            out[2] = __byte_perm(high, 0, 0x4140), out[3] = __byte_perm(high, 0, 0x4342);
        } else {
            uint4 x = half == 0 ? piece : packed[(chunk * 2 + 1) * apart];
            out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
        }
    }
}

// Adds a unit's products of two outputs, whose scales and biases are given, and two rows, the sums of whose inputs are, or the first of them. Sums are in 2^-24.
template <int PACKING, bool ONE = false>
__device__ __forceinline__ void fold(float (&sum)[4], const float (&products)[4], uint2 scales, float2 inputs) {
    float low = widen_f16((u16)scales.x), high = widen_f16((u16)scales.y) * (PACKING == CODES4 ? 0.0625f : 1.0f);
    float low_bias = widen_f16((u16)(scales.x >> 16)), high_bias = widen_f16((u16)(scales.y >> 16));
    sum[0] = fmaf(low, products[0], fmaf(low_bias, inputs.x, sum[0]));
    sum[2] = fmaf(high, products[2], fmaf(high_bias, inputs.x, sum[2]));
    if (ONE) return;
    sum[1] = fmaf(low, products[1], fmaf(low_bias, inputs.y, sum[1]));
    sum[3] = fmaf(high, products[3], fmaf(high_bias, inputs.y, sum[3]));
}

// Whether a unit ends with instruction `part` of the four of a block, and which of the block's it is.
__device__ __forceinline__ bool ends(u32 unit, int part) { return part == 3 || ((part + 1) * 16 & ((1 << unit) - 1)) == 0; }
__device__ __forceinline__ u32 unit_of(u32 unit, int part) { return part * 16 >> unit; }

// The first of a tile's groups that a block has.
__device__ __forceinline__ u32 group_of(const Weight &weight, u32 block) { return block * 64 >> weight.shift; }

__device__ __forceinline__ const Weight &weight_of(const Weights &weights, u32 &tile) {
    u32 index = 0;
    while (index + 1 < weights.count && tile >= weights.tiles[index]) index++;
    if (index > 0) tile -= weights.tiles[index - 1];
    return weights.of[index];
}

// What becomes of the sum of all segments.
__device__ __forceinline__ void finish(const Weight &weight, u32 row, u32 output, float sum, bool add) {
    if (output >= weight.outputs) return;
    float *out = weight.out + (size_t)row * weight.width + output, y = weight.bias ? sum + weight.bias[output] : sum;
    *out = add ? *out + y : y;
}

// A number that the compiler knows.
template <int N> struct Int {
    static const int VALUE = N;
};

// Up to 8 rows whose activations fit into shared memory: blocks stay, and take one tile of 16 outputs after the other, a warp one segment of its inputs. Each
// warp has a ring of weights that it fills for itself, across tiles, so that memory always has requests; the first ones are made before earlier kernels end.
//
// Shared memory: [warp][DEPTH] stages of codes [block][lane] and their scales; activations [32 inputs][row][32]; sums of units [unit][row]; two turns of sums
// of segments [segment][row][16 outputs].
template <int PACKING, int UNIT, bool ONE> __device__ __forceinline__ void few(const Weights &weights, const Inputs &in) {
    const bool CODED = Pack<PACKING>::CODED;
    // Blocks of inputs that are fetched and multiplied together.
    const int TOGETHER = 4 / Pack<PACKING>::PIECES, DEPTH = CODED ? 2 : 4;
    const int PIECES = Pack<PACKING>::PIECES, BLOCK = PIECES * 512, UNITS = CODED ? 64 >> UNIT : 0, STAGE = TOGETHER * (BLOCK + UNITS * 64);
    extern __shared__ __align__(128) u8 shared[];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 rows = ONE ? 1 : in.rows, blocks = in.blocks, begin = min(warp * in.length, blocks), count = min(in.length, blocks - begin), tiles = weights.tiles[weights.count - 1];
    u8 *ring = shared + warp * DEPTH * STAGE + lane * 16, *inputs = shared + SEGMENTS * DEPTH * STAGE;
    float *sums_of_units = (float *)(inputs + rows * blocks * 128), *partial = sums_of_units + rows * blocks * UNITS;
    // The tile that is fetched from, what is left of this warp's share of it, and where; nothing is left after the last tile.
    u32 ahead = blockIdx.x, left = 0, shift = 0, into = 0, scale_block = 0;
    const u8 *codes = 0, *scales = 0;
    auto next_tile = [&]() {
        if (ahead >= tiles) return;
        u32 tile = ahead;
        ahead += gridDim.x;
        const Weight &weight = weight_of(weights, tile);
        left = count, shift = weight.shift;
        codes = weight.codes + ((size_t)tile * blocks + begin) * BLOCK + lane * 16;
        if constexpr (CODED) {
            scales = (const u8 *)weight.scales + (size_t)tile * group_of(weight, blocks) * 64 + lane % (UNITS * 4) * 16;
            scale_block = begin + lane / (UNITS * 4);
        }
    };
    auto fetch = [&]() {
        if (left > 0) {
            u8 *to = ring + into;
            u32 number = min(left, TOGETHER);
#pragma unroll
            for (int i = 0; i < TOGETHER * PIECES; i++)
                if (i / PIECES < number) copy_async(to + i * 512, codes + i * 512);
            if constexpr (CODED) {
#pragma unroll
                for (int i = 0; i < (TOGETHER * UNITS + 7) / 8; i++)
                    if (lane + i * 32 < number * UNITS * 4) copy_async(to + TOGETHER * BLOCK + i * 512, scales + ((scale_block + i * 8 / UNITS) * 64 >> shift) * 64);
            }
            codes += TOGETHER * BLOCK, scale_block += TOGETHER;
            into = into == (DEPTH - 1) * STAGE ? 0 : into + STAGE;
            left -= number;
            if (left == 0) next_tile();
        }
        copy_commit();
    };
    if (count > 0) next_tile();
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) fetch();
    wait_for_earlier_kernels();
    // Many loads at once: first the activations, then the sums.
    for (u32 first = threadIdx.x, pieces = rows * blocks * 8, all = pieces + rows * blocks * UNITS; first < all; first += 8 * 256) {
        uint4 y[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 i = first + j * 256, sum = i - pieces;
            if (i < pieces) y[j] = load_ahead(in.x + (size_t)i * 8);
            else if (i < all) y[j].x = load_ahead((const u32 *)in.sums + sum / rows * in.stride + sum % rows);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 i = first + j * 256, row = i / (blocks * 8), piece = i % (blocks * 8);
            if (i < pieces) *(uint4 *)(inputs + ((piece / 4 * rows + row) * 4 + piece % 4) * 16) = y[j];
            else if (i < all) ((u32 *)sums_of_units)[i - pieces] = y[j].x;
        }
    }
    float2 row_scales = Pack<PACKING>::SCALED ? *(const float2 *)(in.scales + warp * in.stride + 2 * t) : make_float2(1.0f, 1.0f);
    __syncthreads();
    // Columns of the instruction beyond the last row repeat it.
    const u8 *own = inputs + (begin * 2 * rows + min(g, rows - 1)) * 64 + t * 16;
    const float *own_sums = sums_of_units + begin * UNITS * rows + min(2 * t, rows - 1);
    u32 pair = 2 * t + 1 < rows, slot = 0, round = 0, segments = (blocks + in.length - 1) / in.length;
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x, round++) {
        u32 tile = index;
        const Weight &weight = weight_of(weights, tile);
        // The sum that this thread finishes, and what it is added to; another warp's turn each time.
        u32 finished = (threadIdx.x + round * 32) % 256, row = finished / 16, output = tile * 16 + finished % 16;
        bool finishes = row < rows && output < weight.outputs;
        float *out = weight.out + (size_t)row * weight.width + output, before = finishes && in.add ? *out : 0.0f;
        float sums[4] = {};
        const u8 *at = own;
        const float *unit_sums = own_sums;
        auto multiply = [&](auto number, u32 first) {
            const int BLOCKS = number.VALUE;
            const u8 *from = ring + slot + first * BLOCK;
            const u32 *scale = (const u32 *)(ring + slot + TOGETHER * BLOCK - lane * 16 + g * 8) + first * UNITS * 16;
            uint4 packed[BLOCKS][PIECES], y[BLOCKS][2];
#pragma unroll
            for (int i = 0; i < BLOCKS * PIECES; i++) packed[i / PIECES][i % PIECES] = *(const uint4 *)(from + i * 512);
#pragma unroll
            for (int i = 0; i < BLOCKS * 2; i++) y[i / 2][i % 2] = *(const uint4 *)(at + i * rows * 64);
            at += BLOCKS * rows * 128;
#pragma unroll
            for (int block = 0; block < BLOCKS; block++) {
                float products[4] = {};
#pragma unroll
                for (int part = 0; part < 4; part++) {
                    u32 a[2][4];
                    uint4 b = y[block][part / 2];
                    unpack<PACKING>(packed[block], 1, part / 2, a);
                    mma<Pack<PACKING>::RAW>(CODED ? products : sums, a[part % 2], part % 2 == 0 ? b.x : b.z, part % 2 == 0 ? b.y : b.w);
                    if (!CODED || !ends(UNIT, part)) continue;
                    int unit = block * UNITS + unit_of(UNIT, part);
                    fold<PACKING, ONE>(sums, products, *(const uint2 *)(scale + unit * 16), make_float2(unit_sums[0], ONE ? 0.0f : unit_sums[pair]));
                    unit_sums += rows;
                    products[0] = products[1] = products[2] = products[3] = 0.0f;
                }
            }
        };
#pragma unroll 1
        for (u32 i = 0; i < count; i += TOGETHER) {
            copy_wait<DEPTH - 1>();
            __syncwarp();
            if (i + TOGETHER <= count) multiply(Int<TOGETHER>(), 0);
            else
                for (u32 block = 0; block < count - i; block++) multiply(Int<1>(), block);
            __syncwarp();
            fetch();
            slot = slot == (DEPTH - 1) * STAGE ? 0 : slot + STAGE;
        }
        float *part = partial + round % 2 * SEGMENTS * rows * 16;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (2 * t + i % 2 < rows) part[(warp * rows + 2 * t + i % 2) * 16 + g + i / 2 * 8] = sums[i] * (i % 2 ? row_scales.y : row_scales.x);
        // Whoever is past this barrier has taken the other turn's sums.
        __syncthreads();
        if (!finishes) continue;
        float sum = part[finished];
#pragma unroll
        for (u32 segment = 1; segment < SEGMENTS; segment++)
            if (segment < segments) sum += part[segment * rows * 16 + finished];
        float y = weight.bias ? sum + weight.bias[output] : sum;
        *out = in.add ? before + y : y;
    }
}
template <int PACKING, bool ONE> __device__ __forceinline__ void few_of(const Weights &weights, const Inputs &in) {
    if (!Pack<PACKING>::CODED || in.unit == 6) few<PACKING, 6, ONE>(weights, in);
    else if (in.unit == 5) few<PACKING, 5, ONE>(weights, in);
    else few<PACKING, 4, ONE>(weights, in);
}

// Up to 8 * NT rows: a block has 16 * MT outputs, a warp one segment of their inputs.
template <int PACKING, int MT, int NT> __device__ __forceinline__ void narrow(const Weights &weights, const Inputs &in) {
    const bool CODED = Pack<PACKING>::CODED;
    const int PIECES = Pack<PACKING>::PIECES, STAGE = CODED || MT * NT > 2 ? 1 : 2;
    __shared__ float partial[SEGMENTS][MT * NT][128];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 tile = blockIdx.x * MT, blocks = in.blocks;
    const Weight &weight = weight_of(weights, tile);
    u32 begin = min(warp * in.length, blocks), end = min(begin + in.length, blocks);
    size_t groups = group_of(weight, blocks);
    const uint4 *codes = (const uint4 *)weight.codes + (size_t)tile * blocks * PIECES * 32 + lane;
    const u32 *scales = weight.scales + (size_t)tile * groups * 16 + g * 2;
    const u16 *input = in.x + (size_t)g * blocks * 64 + t * 8;
    float sums[MT][NT][4] = {};
    // Two stages of weights: one is multiplied while the other is on its way; and their scales, where there are registers for them.
    const bool EARLY = CODED && MT * NT <= 2;
    uint4 packed[2][STAGE][MT][PIECES];
    uint2 factors[2][MT][EARLY ? 4 : 1];
    auto factor = [&](u32 block, int m, int part) {
        return load_ahead((const uint2 *)(scales + (m * groups + group_of(weight, block) + unit_of(in.unit, part)) * 16));
    };
    auto fetch = [&](auto count, u32 block, int to) {
        const uint4 *from = codes + (size_t)block * PIECES * 32;
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int u = 0; u < count.VALUE; u++)
#pragma unroll
                for (int i = 0; i < PIECES; i++) packed[to][u][m][i] = load_once(from + ((size_t)m * blocks * PIECES + u * PIECES + i) * 32);
#pragma unroll
            for (int part = 0; part < 4; part++)
                if (EARLY && ends(in.unit, part)) factors[to][m][part % 4] = factor(block, m, part);
        }
    };
    auto multiply = [&](auto count, u32 block, int from) {
        const u16 *at = input + (size_t)block * 64;
        const float *unit_sums = in.sums + (size_t)block * (64 >> in.unit) * in.stride + 2 * t;
        // Activations of several products at once, so that their loads overlap.
        const int AHEAD = NT > 2 ? 1 : count.VALUE * 2;
        uint4 b[AHEAD][NT];
        float products[MT][NT][4] = {};
#pragma unroll
        for (int chunk = 0; chunk < count.VALUE * 2; chunk++) {
            if (chunk % AHEAD == 0) {
#pragma unroll
                for (int next = 0; next < AHEAD; next++)
#pragma unroll
                    for (int n = 0; n < NT; n++) b[next][n] = load_ahead(at + (size_t)n * 8 * blocks * 64 + (chunk + next) * 32);
            }
            u32 a[MT][2][4];
#pragma unroll
            for (int m = 0; m < MT; m++) unpack<PACKING>(packed[from][chunk / 2][m], 1, chunk % 2, a[m]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    uint4 y = b[chunk % AHEAD][n];
#pragma unroll
                    for (int m = 0; m < MT; m++)
                        mma<Pack<PACKING>::RAW>(CODED ? products[m][n] : sums[m][n], a[m][half], half == 0 ? y.x : y.z, half == 0 ? y.y : y.w);
                }
                int part = chunk % 2 * 2 + half;
                if (!CODED || !ends(in.unit, part)) continue;
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    float2 inputs = *(const float2 *)(unit_sums + n * 8);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        float(&c)[4] = products[m][n];
                        fold<PACKING>(sums[m][n], c, EARLY ? factors[from][m][part] : factor(block, m, part), inputs);
                        c[0] = c[1] = c[2] = c[3] = 0.0f;
                    }
                }
                unit_sums += in.stride;
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
            for (int i = 0; i < 4; i++)
                partial[warp][m * NT + n][(2 * t + i % 2) * 16 + g + i / 2 * 8] =
                    sums[m][n][i] * (Pack<PACKING>::SCALED ? in.scales[warp * in.stride + n * 8 + 2 * t + i % 2] : 1.0f);
    __syncthreads();
    u32 segments = (blocks + in.length - 1) / in.length;
    for (u32 i = threadIdx.x; i < MT * NT * 128; i += blockDim.x) {
        u32 part = i / 128, m = part / NT, row = part % NT * 8 + i % 128 / 16, output = (tile + m) * 16 + i % 16;
        if (row >= in.rows) continue;
        float sum = partial[0][part][i % 128];
        for (u32 segment = 1; segment < segments; segment++) sum += partial[segment][part][i % 128];
        finish(weight, row, output, sum, in.add);
    }
}

// Any number of rows: a block has 128 outputs and 128 rows, a warp 16 * WM outputs and 8 * WN rows of them. Inputs come in blocks of 64, four of them on
// their way at a time.
//
// Shared memory: stages of codes [tile][lane], activations [32 inputs][row][32], scales [tile][unit][16 outputs] and sums of units [unit][row]; totals.
#define WIDE_STAGES 4
template <int PACKING, int WM, int WN> __device__ __forceinline__ void wide(const Weights &weights, const Inputs &in) {
    const bool CODED = Pack<PACKING>::CODED;
    const int PIECES = Pack<PACKING>::PIECES, A = 8 * PIECES * 512, B = 128 * 128, ACROSS = 8 / WM;
    extern __shared__ __align__(128) u8 shared[];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 tile = blockIdx.y * 8, first = blockIdx.x * 128, blocks = in.blocks;
    u32 units = 64 >> in.unit, stage = A + B + (CODED ? units * 1024 : 0);
    const Weight &weight = weight_of(weights, tile);
    u32 last = (weight.outputs + 15) / 16 - 1;
    size_t groups = group_of(weight, blocks);
    u32 m0 = warp % ACROSS * WM, n0 = warp / ACROSS * WN;
    wait_for_earlier_kernels();
    auto fetch = [&](u32 block) {
        u8 *to = shared + block % WIDE_STAGES * stage;
        for (u32 i = threadIdx.x; i < 8 * PIECES * 32; i += 256) {
            u32 row = min(tile + i / (PIECES * 32), last);
            copy_async(to + i * 16, weight.codes + (((size_t)row * blocks + block) * PIECES * 32 + i % (PIECES * 32)) * 16);
        }
        // A quarter of a warp reads 128 bytes in a row.
        for (u32 i = threadIdx.x; i < 1024; i += 256) {
            u32 row = i / 8, piece = i % 8;
            copy_async(to + A + piece / 4 * 8192 + row * 64 + piece % 4 * 16, in.x + ((size_t)first + row) * blocks * 64 + block * 64 + piece * 8);
        }
        if (!CODED) return;
        for (u32 i = threadIdx.x; i < units * 64; i += 256) {
            u32 within = i % (units * 32);
            if (i < units * 32) {
                u32 row = min(tile + within / (units * 4), last);
                copy_async(to + A + B + within * 16, weight.scales + (row * groups + group_of(weight, block)) * 16 + within % (units * 4) * 4);
            } else {
                copy_async(to + A + B + i * 16, in.sums + ((size_t)block * units + within / 32) * in.stride + first + within % 32 * 4);
            }
        }
    };
#pragma unroll
    for (u32 stage = 0; stage < WIDE_STAGES - 1; stage++) {
        if (stage < blocks) fetch(stage);
        copy_commit();
    }
    float sums[WM][WN][4] = {}, products[WM][WN][4] = {};
    // Sums of whole segments, out of the way of the registers.
    float4 *totals = (float4 *)(shared + WIDE_STAGES * stage) + threadIdx.x;
    // Operands of 32 inputs at a time, the next ones on their way from shared memory while these are multiplied.
    u32 a[2][WM][2][4];
    uint4 b[2][WN];
    auto take = [&](u32 block, int chunk, int to) {
        const u8 *from = shared + block % WIDE_STAGES * stage;
#pragma unroll
        for (int n = 0; n < WN; n++) b[to][n] = *(const uint4 *)(from + A + chunk * 8192 + ((n0 + n) * 8 + g) * 64 + t * 16);
#pragma unroll
        for (int m = 0; m < WM; m++) unpack<PACKING>((const uint4 *)from + (m0 + m) * PIECES * 32 + lane, 32, chunk, a[to][m]);
    };
    copy_wait<WIDE_STAGES - 2>();
    __syncthreads();
    take(0, 0, 0);
    for (u32 block = 0; block < blocks; block++) {
        const u32 *pairs = (const u32 *)(shared + block % WIDE_STAGES * stage + A + B);
        const float *unit_sums = (const float *)(pairs + units * 128);
#pragma unroll
        for (int chunk = 0; chunk < 2; chunk++) {
            if (chunk == 0) {
                take(block, 1, 1);
                // Everyone has passed the last barrier, and so has taken all of the block before, whose place this one's takes.
                if (block + WIDE_STAGES - 1 < blocks) fetch(block + WIDE_STAGES - 1);
                copy_commit();
            } else if (!CODED) {
                copy_wait<WIDE_STAGES - 2>();
                __syncthreads();
                if (block + 1 < blocks) take(block + 1, 0, 0);
            }
            // Instructions that follow each other add to different sums.
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int m = 0; m < WM; m++)
#pragma unroll
                    for (int n = 0; n < WN; n++)
                        mma<Pack<PACKING>::RAW>(CODED ? products[m][n] : sums[m][n], a[chunk][m][half], half == 0 ? b[chunk][n].x : b[chunk][n].z, half == 0 ? b[chunk][n].y : b[chunk][n].w);
                int part = chunk * 2 + half;
                if (!CODED || !ends(in.unit, part)) continue;
                u32 unit = unit_of(in.unit, part);
#pragma unroll
                for (int n = 0; n < WN; n++) {
                    float2 inputs = *(const float2 *)(unit_sums + unit * 128 + (n0 + n) * 8 + 2 * t);
#pragma unroll
                    for (int m = 0; m < WM; m++) {
                        const uint2 pair = *(const uint2 *)(pairs + ((m0 + m) * units + unit) * 16 + g * 2);
                        float(&c)[4] = products[m][n];
                        fold<PACKING>(sums[m][n], c, pair, inputs);
                        c[0] = c[1] = c[2] = c[3] = 0.0f;
                    }
                }
            }
        }
        if (CODED) {
            copy_wait<WIDE_STAGES - 2>();
            __syncthreads();
            if (block + 1 < blocks) take(block + 1, 0, 0);
        }
        if ((block + 1) % in.length == 0 || block + 1 == blocks) {
            bool start = block < in.length, end = block + 1 == blocks;
            const float *scales = in.scales + block / in.length * in.stride + first + n0 * 8 + 2 * t;
#pragma unroll
            for (int m = 0; m < WM; m++)
#pragma unroll
                for (int n = 0; n < WN; n++) {
                    float(&c)[4] = sums[m][n];
                    float4 *total = totals + (m * WN + n) * 256;
                    if (Pack<PACKING>::SCALED) {
                        float2 scale = *(const float2 *)(scales + n * 8);
                        // Not fused with the sum that follows: no kernel's are.
                        c[0] = __fmul_rn(c[0], scale.x), c[1] = __fmul_rn(c[1], scale.y), c[2] = __fmul_rn(c[2], scale.x), c[3] = __fmul_rn(c[3], scale.y);
                    }
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
                if (row < in.rows) finish(weight, row, output, sums[m][n][i], in.add);
            }
}

#define PRODUCT(NAME, BLOCKS, BODY) \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) NAME(Weights weights, Inputs in) { BODY(weights, in); }
#define COMMA ,
#define PRODUCTS(NAME, PACKING, WM, WN)                      \
    PRODUCT(NAME##_one, 3, few_of<PACKING COMMA true>)              \
    PRODUCT(NAME##_few, 3, few_of<PACKING COMMA false>)             \
    PRODUCT(NAME##_narrow8, 2, narrow<PACKING COMMA 1 COMMA 1>)     \
    PRODUCT(NAME##_narrow16, 2, narrow<PACKING COMMA 1 COMMA 2>)    \
    PRODUCT(NAME##_narrow32, 2, narrow<PACKING COMMA 2 COMMA 4>)    \
    PRODUCT(NAME##_narrow64, 2, narrow<PACKING COMMA 1 COMMA 8>)    \
    PRODUCT(NAME##_wide, 1, wide<PACKING COMMA WM COMMA WN>)

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

// What becomes the activations of a product: x itself, its norm, or activation(x) * up; in 16 bits, in rows of `padded` values, a factor for each row and
// segment, and for codes the sums of units. A block has one segment of a row, or for a norm the whole row, whose segments have one factor.
enum Input { PLAIN = 0, NORMED = 1, GATED = 2 };
extern "C" __global__ void __launch_bounds__(1024) prepare(const float *x, const float *other, int input, int activation, float eps, u32 width, u32 padded, u32 length,
                                                              u32 brain, u32 unit, u16 *to, float *scales, float *sums_of_units, u32 stride) {
    extern __shared__ __align__(16) float share[];
    __shared__ float scratch[64];
    u32 begin = blockIdx.y * length, end = input == NORMED ? padded : min(begin + length, padded), first = begin + threadIdx.x * 4, row = blockIdx.x;
    // A norm's weights are there already.
    bool whole = width % 4 == 0;
    float4 early = input == NORMED && whole && first < width ? *(const float4 *)(other + first) : make_float4(0, 0, 0, 0);
    wait_for_earlier_kernels();
    const float *from = x + (size_t)row * width, *second = input == GATED ? other + (size_t)row * width : other;
    float squares = 0.0f, largest = 0.0f;
    // A thread keeps to its own four values of each round, so that nothing but the sums needs a barrier. Rows are padded to whole rounds.
    for (u32 i = first; i < end; i += blockDim.x * 4) {
        float4 y = make_float4(0, 0, 0, 0), w = y;
        if (whole && i < width) {
            y = *(const float4 *)(from + i);
            if (input != PLAIN) w = input == NORMED && i == first ? early : *(const float4 *)(second + i);
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
        *(float4 *)(share + i - begin) = y;
    }
    block_reduce<Sum, Max>(squares, largest, scratch);
    float factor = input == NORMED ? rsqrtf(squares / width + eps) : 1.0f, scale = 1.0f;
    if (!brain) {
        largest *= factor;
        // The exponent that brings the largest value into 2^14 .. 2^15; nothing for zeros, and what is not finite stays so.
        int exponent = (int)(__float_as_uint(largest) >> 23) - 127 - 14;
        exponent = largest > 0.0f && largest < INFINITY ? max(exponent, -100) : 0;
        scale = __uint_as_float((u32)(127 + exponent) << 23), factor *= __uint_as_float((u32)(127 - exponent) << 23);
    }
    for (u32 i = first; i < end; i += blockDim.x * 4) {
        float4 y = *(const float4 *)(share + i - begin);
        uint2 z = brain ? make_uint2(narrow2<BF16>(y.x * factor, y.y * factor), narrow2<BF16>(y.z * factor, y.w * factor))
                        : make_uint2(narrow2<F16>(y.x * factor, y.y * factor), narrow2<F16>(y.z * factor, y.w * factor));
        *(uint2 *)(to + (size_t)row * padded + i / 32 * 32 + i % 16 / 4 * 8 + i % 32 / 16 * 4) = z;
        if (unit == 0) continue;
        // In 2^-24, as the products of codes are; the 4 to 16 threads of a unit are neighbours.
        float sum = (widen_f16((u16)z.x) + widen_f16((u16)(z.x >> 16))) + (widen_f16((u16)z.y) + widen_f16((u16)(z.y >> 16)));
        for (u32 step = 1; step < unit / 4; step *= 2) sum += __shfl_xor_sync(0xffffu << (threadIdx.x & 16), sum, step);
        if (i % unit == 0) sums_of_units[(size_t)(i / unit) * stride + row] = sum * exp2f(-24.0f);
    }
    if (threadIdx.x < (input == NORMED ? SEGMENTS : 1)) scales[(blockIdx.y + threadIdx.x) * stride + row] = unit == 0 ? scale : scale * exp2f(24.0f);
}

// Packs raw weights [outputs, inputs] of 16 bits: a thread has one lane's bytes of 64 inputs.
extern "C" __global__ void pack_raw(const u16 *weight, u32 outputs, u32 inputs, u32 blocks, u16 *to) {
    wait_for_earlier_kernels();
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 block = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, tile = blockIdx.y;
    if (block >= blocks) return;
    for (u32 i = 0; i < 32; i++) {
        u32 step = i / 8, reg = i % 8 / 2, row = tile * 16 + g + reg % 2 * 8;
        u32 k = block * 64 + step * 16 + t * 4 + reg / 2 * 2 + i % 2;
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
            u32 k = block * 64 + step * 16 + t * 4 + reg / 2 * 2 + i % 2;
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

// Packs scales and biases [outputs, groups] of f32 as pairs of f16, for scale * code + bias: what the code of nothing comes to goes into the bias, which no
// format has beside such a code. Groups beyond the inputs, and outputs beyond the last, decode to zero.
extern "C" __global__ void pack_scales(const float *scales, const float *biases, float zero, u32 outputs, u32 groups, u32 padded, u32 *to) {
    wait_for_earlier_kernels();
    u32 at = blockIdx.x * blockDim.x + threadIdx.x, tile = blockIdx.y;
    if (at >= padded * 16) return;
    u32 row = tile * 16 + at % 16 / 2 + at % 2 * 8, group = at / 16;
    bool real = row < outputs && group < groups;
    size_t from = (size_t)row * groups + group;
    u16 scale = real ? narrow_f16(scales[from]) : 0;
    to[(size_t)tile * padded * 16 + at] = real ? narrow2<F16>(widen_f16(scale), fmaf(-zero, widen_f16(scale), biases[from])) : 0;
}

// One weight of a packed matrix, as products see it.
__device__ float weight_at(const Weight &weight, int packing, u32 blocks, u32 row, u32 k) {
    u32 tile = row / 16, g = row % 8, high = row % 16 / 8, block = k / 64, step = k % 64 / 16, t = k % 16 / 4;
    u32 lane = g * 4 + t, reg = k % 4 / 2 * 2 + high, at = reg * 2 + k % 2;
    size_t base = (size_t)tile * blocks + block;
    if (packing == HALF || packing == BRAIN) {
        u16 x = ((const u16 *)weight.codes)[((base * 4 + step) * 32 + lane) * 8 + at];
        return packing == HALF ? widen_f16(x) : widen_bf16(x);
    }
    u32 code;
    if (packing == CODES4) code = ((const u32 *)weight.codes)[(base * 32 + lane) * 4 + step] >> (4 * (reg + k % 2 * 4)) & 15;
    else code = weight.codes[((base * 2 + step / 2) * 32 + lane) * 16 + step % 2 * 8 + at];
    u32 pair = weight.scales[((size_t)tile * group_of(weight, blocks) + (k >> weight.shift)) * 16 + row % 8 * 2 + row % 16 / 8];
    return fmaf((float)code, widen_f16((u16)pair), widen_f16((u16)(pair >> 16)));
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
