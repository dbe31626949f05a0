// Attention over pages.
//
// One query's sequence, whatever else is computed beside it: pages are folded in ascending order with one step of the online softmax each (Milakov and
// Gimelshein 2018), the fold starts afresh at every STRIDE columns, and the partial results (max, sum, out) are merged in ascending order.

#define STRIDE 512
#define NOTHING (-1e30f) // A largest score that no score has: exp2 of a difference to it is 0 or, of it to itself, 1.

struct Attention {
    Plan plan;
    const Pages *classes;
    const Plane *planes; // Of the layer: `plane_count` for each class.
    const float *q, *sinks;
    float *out;
    float scale, softcap; // 0 for no cap.
    u32 heads, kv_heads, key_dim, value_dim, plane_count, latent;
};

__device__ __forceinline__ float capped(float score, float softcap) { return softcap > 0.0f ? softcap * tanhf(score / softcap) : score; }

// Merges a partial result into a total: both are (max, mass, out) with the factor for what was, and for what comes.
__device__ __forceinline__ void merging(float total, float part, float &max, float &old, float &add) {
    max = fmaxf(total, part);
    old = exp2_fast(total - max);
    add = exp2_fast(part - max);
}
__device__ __forceinline__ float merged(float total, float old, float part, float add) { return fmaf(total, old, __fmul_rn(part, add)); }

// What outputs are multiplied with after the last column: a head's sink adds to its mass, and to nothing else.
__device__ __forceinline__ float divided(const Attention &a, u32 head, float max, float mass) {
    float factor = 1.0f;
    if (a.sinks) {
        float sink = a.sinks[head] * LOG2E, now = fmaxf(max, sink);
        factor = exp2_fast(max - now);
        mass = merged(mass, factor, exp2_fast(sink - now), 1.0f);
    }
    return mass > 0.0f ? factor / mass : 0.0f;
}

// Any codec, dimension and kind, one query and head for each block: the definition, in f32. Columns of a page lie at any distance from each other, and
// those of `latent` groups are keys and values at once.
extern "C" __global__ void __launch_bounds__(128) attend_any(Attention a) {
    wait_for_earlier_kernels();
    __shared__ float scores[512], query[1024], scratch[32];
    u32 token = blockIdx.y, head = blockIdx.x, owner = a.plan.owners[token], tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    if (owner == NONE) return;
    Segment segment = a.plan.segments[owner];
    Span span = a.plan.spans[owner];
    Visible view = visible(a.plan, segment, span, token);
    Pages pages = a.classes[span.cls];
    const Plane *planes = a.planes + span.cls * a.plane_count;
    Plane keys = planes[0], ropes = planes[1], values = planes[a.latent ? 0 : 1];
    u32 kv = head / (a.heads / a.kv_heads);
    for (u32 i = tid; i < a.key_dim; i += 128) query[i] = a.q[((size_t)token * a.heads + head) * a.key_dim + i];
    __syncthreads();
    float total[8] = {}, sum[8] = {}, max_total = NOTHING, max_part = NOTHING, mass_total = 0.0f, mass_part = 0.0f;
    auto merge = [&]() {
        float max, old, add;
        merging(max_total, max_part, max, old, add);
        for (int i = 0; i < 8; i++) {
            total[i] = merged(total[i], old, sum[i], add);
            sum[i] = 0.0f;
        }
        mass_total = merged(mass_total, old, mass_part, add);
        max_total = max, max_part = NOTHING, mass_part = 0.0f;
    };
    u32 first = (view.sinks > 0 ? 0 : view.start) / pages.columns, last_stride = first * pages.columns / STRIDE;
    for (u32 index = first; index * pages.columns < view.end; index++) {
        u32 from = index * pages.columns, to = min(from + pages.columns, view.end);
        // Pages between the sinks and the window are not held.
        if (from >= view.sinks && to <= view.start) continue;
        if (from / STRIDE != last_stride) {
            merge();
            last_stride = from / STRIDE;
        }
        const u8 *base = page(pages, table(a.plan, span, index));
        for (u32 column = from + warp; column < to; column += 4) {
            float dot = 0.0f;
            if (column < view.sinks || column >= view.start) {
                u32 within = column - from;
                for (u32 i = lane; i < keys.dim; i += 32) dot = fmaf(query[i], load(base + keys.offset, keys.raw, element(keys, kv, within, i)), dot);
                if (a.latent)
                    for (u32 i = lane; i < ropes.dim; i += 32)
                        dot = fmaf(query[keys.dim + i], load(base + ropes.offset, ropes.raw, element(ropes, 0, within, i)), dot);
                dot = capped(warp_reduce<Sum>(dot) * a.scale, a.softcap) * LOG2E;
            } else {
                dot = -INFINITY;
            }
            if (lane == 0) scores[column - from] = dot;
        }
        __syncthreads();
        float largest = NOTHING;
        for (u32 i = tid; i < to - from; i += 128) largest = fmaxf(largest, scores[i]);
        largest = block_reduce<Max>(largest, scratch);
        float max = fmaxf(max_part, largest), old = exp2_fast(max_part - max);
        for (u32 i = tid; i < to - from; i += 128) scores[i] = exp2_fast(scores[i] - max);
        __syncthreads();
        mass_part *= old;
        for (u32 i = 0; i < to - from; i++) mass_part += scores[i];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 i = tid + j * 128;
            if (i >= a.value_dim) break;
            float x = sum[j] * old;
            for (u32 column = 0; column < to - from; column++)
                if (scores[column] != 0.0f) x = fmaf(scores[column], load(base + values.offset, values.raw, element(values, kv, column, i)), x);
            sum[j] = x;
        }
        max_part = max;
        __syncthreads();
    }
    merge();
    float factor = view.end > 0 ? divided(a, head, max_total, mass_total) : 0.0f;
    for (int j = 0; j < 8; j++) {
        u32 i = tid + j * 128;
        if (i < a.value_dim) a.out[((size_t)token * a.heads + head) * a.value_dim + i] = total[j] * factor;
    }
}

// ---- Keys and values of one 16-bit type, in pages of 64 columns, of heads of DIM values, by matrix instructions.
//
// Queries are the first operand, 16 rows of them: (token, query head) pairs that share a key/value head. Scores and weights of columns have the same
// order of columns as values have inside the instruction, so that what comes out of one product goes into the next.

#define PAGE 64
#define FEW 4 // Tokens of a segment that are decoded each on its own; the host lists them in `singles`.

// Rows g and g + 8 of 16 queries, rounded: for each 32 dimensions, two instructions.
template <int RAW, int DIM> __device__ __forceinline__ void load_queries(const float *low, const float *high, u32 t, u32 (&q)[DIM / 16][4]) {
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        u32 at = i / 2 * 32 + t * 8 + i % 2 * 4;
        float4 x = low ? *(const float4 *)(low + at) : make_float4(0, 0, 0, 0), y = high ? *(const float4 *)(high + at) : make_float4(0, 0, 0, 0);
        q[i][0] = narrow2<RAW>(x.x, x.y), q[i][2] = narrow2<RAW>(x.z, x.w);
        q[i][1] = narrow2<RAW>(y.x, y.y), q[i][3] = narrow2<RAW>(y.z, y.w);
    }
}

// Where the columns of 8 scores are: column n of part `part` (0..4) of a chunk of 32.
__device__ __forceinline__ u32 column_of(u32 part, u32 n) { return n / 2 * 8 + part * 2 + n % 2; }

struct Scale {
    float scale, softcap;
};
__device__ __forceinline__ float scaled(float score, Scale how) {
    float x = score * how.scale;
    return (how.softcap > 0.0f ? how.softcap * tanhf(x / how.softcap) : x) * LOG2E;
}
__device__ __forceinline__ bool seen(u32 column, Visible view) { return (column >= view.start && column < view.end) || column < view.sinks; }

// Decode: a block has one token, one key/value head and one stride; its four warps share the columns of a page for scores, and the dimensions for outputs.
// Partial results go to `parts`: [single][head][stride][DIM + 2]; a stride that is the only one is the result.
template <int RAW, int DIM> __device__ __forceinline__ void decode(const Attention &a, float *parts, u32 strides) {
    __shared__ __align__(16) u16 weights[2][16][PAGE + 8];
    __shared__ float maxima[2][4][16];
    __shared__ __align__(16) uint4 shared_queries[DIM / 16][32];
    u32 token = a.plan.singles[blockIdx.z], kv = blockIdx.y, stride = blockIdx.x;
    // Whoever has nothing to do waits all the same: a kernel that has ended must mean that all before it have.
    if (token == NONE) return wait_for_earlier_kernels();
    u32 owner = a.plan.owners[token];
    Segment segment = a.plan.segments[owner];
    Span span = a.plan.spans[owner];
    Visible view = visible(a.plan, segment, span, token);
    u32 from = stride * STRIDE, to = min(from + STRIDE, view.end);
    if (strides > 1 && (from >= view.end || (from >= view.sinks && from + STRIDE <= view.start))) return wait_for_earlier_kernels();
    Pages pages = a.classes[span.cls];
    Plane keys = a.planes[span.cls * 2], values = a.planes[span.cls * 2 + 1];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, share = a.heads / a.kv_heads;
    const int TILES = DIM / 32; // Of 8 dimensions, for each warp.
    float out[TILES][4] = {}, mass[4] = {}, top[2] = {NOTHING, NOTHING};
    Scale how = {a.scale, a.softcap};
    u32 ones = narrow2<RAW>(1.0f, 1.0f);
    u32 begin = from / PAGE, end = (to + PAGE - 1) / PAGE;
    if (view.sinks <= from) begin = max(begin, view.start / PAGE);
    // The keys of a page for this warp: 16 columns, those of part `warp` of both chunks.
    uint4 k[2][DIM / 32];
    auto fetch = [&](u32 index) {
        const u16 *at = (const u16 *)(page(pages, table(a.plan, span, index)) + keys.offset) + (size_t)kv * PAGE * DIM;
#pragma unroll
        for (int chunk = 0; chunk < 2; chunk++)
#pragma unroll
            for (int i = 0; i < DIM / 32; i++) k[chunk][i] = load_page(at + (chunk * 32 + column_of(warp, g)) * DIM + i * 32 + t * 8);
    };
    auto held = [&](u32 index) { return index * PAGE < view.sinks || (index + 1) * PAGE > view.start; };
    while (begin < end && !held(begin)) begin++;
    // Pages that this step adds nothing to are there already.
    bool early = begin < end && (begin + 1) * PAGE <= span.past;
    if (early) fetch(begin);
    wait_for_earlier_kernels();
    const float *queries = a.q + ((size_t)token * a.heads + kv * share) * DIM;
    {
        u32 q[DIM / 16][4];
        load_queries<RAW, DIM>(g < share ? queries + g * DIM : 0, g + 8 < share ? queries + (g + 8) * DIM : 0, t, q);
#pragma unroll
        for (int i = 0; i < DIM / 16; i++)
            if (i % 4 == warp) shared_queries[i][lane] = make_uint4(q[i][0], q[i][1], q[i][2], q[i][3]);
    }
    if (begin < end && !early) fetch(begin);
    __syncthreads();
    for (u32 index = begin; index < end;) {
        u32 next = index + 1;
        while (next < end && !held(next)) next++;
        u32 turn = index & 1;
        const u16 *at = (const u16 *)(page(pages, table(a.plan, span, index)) + values.offset) + (size_t)kv * PAGE * DIM;
        uint4 v[TILES][2];
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int chunk = 0; chunk < 2; chunk++) v[i][chunk] = load_page(at + ((warp * TILES + i) * 8 + g) * PAGE + chunk * 32 + t * 8);
        float s[2][4] = {};
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            uint4 x = shared_queries[i][lane];
            u32 q[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int chunk = 0; chunk < 2; chunk++)
                mma<RAW>(s[chunk], q, i % 2 == 0 ? k[chunk][i / 2].x : k[chunk][i / 2].z, i % 2 == 0 ? k[chunk][i / 2].y : k[chunk][i / 2].w);
        }
        if (next < end) fetch(next);
        float largest[2] = {NOTHING, NOTHING};
#pragma unroll
        for (int chunk = 0; chunk < 2; chunk++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 column = index * PAGE + chunk * 32 + column_of(warp, 2 * t + i % 2);
                s[chunk][i] = seen(column, view) ? scaled(s[chunk][i], how) : -INFINITY;
                largest[i / 2] = fmaxf(largest[i / 2], s[chunk][i]);
            }
#pragma unroll
        for (int row = 0; row < 2; row++) {
            largest[row] = fmaxf(largest[row], __shfl_xor_sync(0xffffffff, largest[row], 1));
            largest[row] = fmaxf(largest[row], __shfl_xor_sync(0xffffffff, largest[row], 2));
            if (t == 0) maxima[turn][warp][g + 8 * row] = largest[row];
        }
        __syncthreads();
        float old[2];
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float now = top[row];
#pragma unroll
            for (int i = 0; i < 4; i++) now = fmaxf(now, maxima[turn][i][g + 8 * row]);
            old[row] = exp2_fast(top[row] - now);
            top[row] = now;
        }
#pragma unroll
        for (int chunk = 0; chunk < 2; chunk++)
#pragma unroll
            for (int row = 0; row < 2; row++)
                *(u32 *)&weights[turn][g + 8 * row][chunk * 32 + column_of(warp, 2 * t)] =
                    narrow2<RAW>(exp2_fast(s[chunk][2 * row] - top[row]), exp2_fast(s[chunk][2 * row + 1] - top[row]));
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            mass[i] *= old[i / 2];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) out[tile][i] *= old[i / 2];
        }
#pragma unroll
        for (int chunk = 0; chunk < 2; chunk++) {
            uint4 low = *(const uint4 *)&weights[turn][g][chunk * 32 + t * 8], high = *(const uint4 *)&weights[turn][g + 8][chunk * 32 + t * 8];
            u32 p[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                mma<RAW>(mass, p[half], ones, ones);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    mma<RAW>(out[tile], p[half], half == 0 ? v[tile][chunk].x : v[tile][chunk].z, half == 0 ? v[tile][chunk].y : v[tile][chunk].w);
            }
        }
        index = next;
    }
#pragma unroll
    for (int row = 0; row < 2; row++) {
        if (g + 8 * row >= share) continue;
        u32 head = kv * share + g + 8 * row;
        // As merged into nothing: no zero stays negative.
        bool only = strides == 1;
        float factor = only ? divided(a, head, top[row], mass[2 * row]) : 1.0f;
        float *to = only ? a.out + ((size_t)token * a.heads + head) * DIM : parts + (((size_t)blockIdx.z * a.heads + head) * strides + stride) * (DIM + 2);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) *(float2 *)(to + (warp * TILES + tile) * 8 + 2 * t) = make_float2((out[tile][2 * row] + 0.0f) * factor, (out[tile][2 * row + 1] + 0.0f) * factor);
        if (!only && warp == 0 && t == 0) to[DIM] = top[row], to[DIM + 1] = mass[2 * row];
    }
}

// Merges the strides of one query and head, a thread for each dimension. Partial results are fetched many at a time, and merged one by one; what is not
// there is a part of no mass, which changes no bit.
template <int DIM> __device__ __forceinline__ void merge(const Attention &a, const float *parts, u32 strides) {
    const int BATCH = 64;
    __shared__ float olds[BATCH], adds[BATCH], masses[BATCH], last;
    u32 token = a.plan.singles[blockIdx.y], head = blockIdx.x, i = threadIdx.x;
    if (token == NONE) return wait_for_earlier_kernels();
    u32 owner = a.plan.owners[token];
    Segment segment = a.plan.segments[owner];
    Visible view = visible(a.plan, segment, a.plan.spans[owner], token);
    const float *part = parts + ((size_t)blockIdx.y * a.heads + head) * strides * (DIM + 2);
    u32 end = (view.end + STRIDE - 1) / STRIDE;
    auto held = [&](u32 stride) { return stride < end && (stride * STRIDE < view.sinks || (stride + 1) * STRIDE > view.start); };
    wait_for_earlier_kernels();
    float total = 0.0f, mass = 0.0f, max = NOTHING;
    for (u32 first = 0; first < end; first += BATCH) {
        float values[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) values[j] = held(first + j) ? part[(size_t)(first + j) * (DIM + 2) + i] : 0.0f;
        // The factors of each merge follow from the largest score up to it, which a warp finds for 32 strides at once.
        if (i < 32) {
#pragma unroll
            for (int j = i; j < BATCH; j += 32) {
                const float *from = part + (size_t)(first + j) * (DIM + 2) + DIM;
                bool is = held(first + j);
                float largest = is ? from[0] : NOTHING, now = largest, before, old, add;
                masses[j] = is ? from[1] : 0.0f;
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    float other = __shfl_up_sync(0xffffffff, now, step);
                    if (i >= step) now = fmaxf(now, other);
                }
                now = fmaxf(now, max);
                before = __shfl_up_sync(0xffffffff, now, 1);
                merging(i == 0 ? max : before, largest, now, old, add);
                olds[j] = old, adds[j] = add;
                max = __shfl_sync(0xffffffff, now, 31);
            }
            last = max;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            total = merged(total, olds[j], values[j], adds[j]);
            mass = merged(mass, olds[j], masses[j], adds[j]);
        }
        __syncthreads();
    }
    a.out[((size_t)token * a.heads + head) * DIM + i] = total * divided(a, head, end > 0 ? last : NOTHING, mass);
}

// Windows of tokens: a block has WARPS * 16 queries of one segment and key/value head, a warp 16 of them; pages pass through shared memory, the next one
// on its way while one is folded.
template <int RAW, int DIM, int WARPS> __device__ __forceinline__ void window(const Attention &a) {
    const int HALF_PAGE = PAGE * DIM, TILES = DIM / 8;
    extern __shared__ __align__(128) u8 shared[];
    wait_for_earlier_kernels();
    u16 *stages = (u16 *)shared;
    float *totals = (float *)(shared + 2 * 2 * HALF_PAGE * 2);
    u32 owner = blockIdx.z, first = blockIdx.x * WARPS * 16, kv = blockIdx.y;
    Segment segment = a.plan.segments[owner];
    if (segment.count <= FEW || first >= segment.count * (a.heads / a.kv_heads)) return;
    Span span = a.plan.spans[owner];
    Pages pages = a.classes[span.cls];
    Plane keys = a.planes[span.cls * 2], values = a.planes[span.cls * 2 + 1];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, share = a.heads / a.kv_heads;
    u32 rows = segment.count * share;
    const float *queries[2];
    float *outs[2];
    Visible views[2];
#pragma unroll
    for (int row = 0; row < 2; row++) {
        u32 at = first + warp * 16 + g + 8 * row;
        u32 token = segment.start + min(at / share, segment.count - 1), head = kv * share + at % share;
        size_t offset = ((size_t)token * a.heads + head) * DIM;
        queries[row] = at < rows ? a.q + offset : 0;
        outs[row] = at < rows ? a.out + offset : 0;
        views[row] = visible(a.plan, segment, span, token);
    }
    u32 q[DIM / 16][4];
    load_queries<RAW, DIM>(queries[0], queries[1], t, q);
    // What any query of the block sees: the first one's begin, the last one's end.
    u32 end_row = min(first + WARPS * 16, rows) - 1;
    Visible early = visible(a.plan, segment, span, segment.start + first / share), late = visible(a.plan, segment, span, segment.start + end_row / share);
    u32 sinks = late.sinks, start = early.start, end = late.end;
    auto held = [&](u32 index) { return index * PAGE < sinks || (index + 1) * PAGE > start; };
    auto after = [&](u32 index) {
        while (index * PAGE < end && !held(index)) index++;
        return index;
    };
    auto fetch = [&](u32 index, u32 stage) {
        const u8 *base = page(pages, table(a.plan, span, index));
        const u16 *k = (const u16 *)(base + keys.offset) + (size_t)kv * HALF_PAGE, *v = (const u16 *)(base + values.offset) + (size_t)kv * HALF_PAGE;
        u16 *to = stages + stage * 2 * HALF_PAGE;
        // 16-byte pieces of odd rows change places with the piece 64 bytes away, so that two rows read together use different banks.
        for (u32 i = threadIdx.x; i < HALF_PAGE / 8; i += WARPS * 32) {
            u32 row = i / (DIM / 8), piece = i % (DIM / 8);
            copy_async(to + row * DIM + (piece ^ (row & 1) * 4) * 8, k + i * 8);
            row = i / (PAGE / 8), piece = i % (PAGE / 8);
            copy_async(to + HALF_PAGE + row * PAGE + (piece ^ (row & 1) * 4) * 8, v + i * 8);
        }
    };
    float out[TILES][4] = {}, mass[4] = {}, top[2] = {NOTHING, NOTHING}, total_mass[2] = {}, total_max[2] = {NOTHING, NOTHING};
    float *total = totals + warp * 16 * DIM + lane * 4;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) *(float4 *)(total + tile * 128) = make_float4(0, 0, 0, 0);
    auto merge_stride = [&]() {
        float old[2], add[2], now;
#pragma unroll
        for (int row = 0; row < 2; row++) {
            merging(total_max[row], top[row], now, old[row], add[row]);
            total_mass[row] = merged(total_mass[row], old[row], mass[2 * row], add[row]);
            total_max[row] = now, top[row] = NOTHING;
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            float4 x = *(float4 *)(total + tile * 128);
            x.x = merged(x.x, old[0], out[tile][0], add[0]), x.y = merged(x.y, old[0], out[tile][1], add[0]);
            x.z = merged(x.z, old[1], out[tile][2], add[1]), x.w = merged(x.w, old[1], out[tile][3], add[1]);
            *(float4 *)(total + tile * 128) = x;
            out[tile][0] = out[tile][1] = out[tile][2] = out[tile][3] = 0.0f;
        }
        mass[0] = mass[1] = mass[2] = mass[3] = 0.0f;
    };
    Scale how = {a.scale, a.softcap};
    u32 ones = narrow2<RAW>(1.0f, 1.0f);
    u32 index = after(0), stride = index * PAGE / STRIDE, stage = 0;
    if (index * PAGE < end) fetch(index, 0);
    copy_commit();
    while (index * PAGE < end) {
        u32 next = after(index + 1);
        if (next * PAGE < end) fetch(next, stage ^ 1);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        if (index * PAGE / STRIDE != stride) {
            merge_stride();
            stride = index * PAGE / STRIDE;
        }
        const u16 *k = stages + stage * 2 * HALF_PAGE, *v = k + HALF_PAGE;
        float s[8][4] = {};
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            uint4 b[8];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                u32 column = n / 4 * 32 + column_of(n % 4, g);
                b[n] = *(const uint4 *)(k + column * DIM + ((i * 4 + t) ^ (column & 1) * 4) * 8);
            }
            // Instructions that follow each other add to different sums.
#pragma unroll
            for (int n = 0; n < 8; n++) mma<RAW>(s[n], q[2 * i], b[n].x, b[n].y);
#pragma unroll
            for (int n = 0; n < 8; n++) mma<RAW>(s[n], q[2 * i + 1], b[n].z, b[n].w);
        }
        float largest[2] = {NOTHING, NOTHING}, old[2];
        bool whole = (index + 1) * PAGE <= min(views[0].end, views[1].end) && index * PAGE >= max(views[0].start, views[1].start);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 column = index * PAGE + n / 4 * 32 + column_of(n % 4, 2 * t + i % 2);
                s[n][i] = whole || seen(column, views[i / 2]) ? scaled(s[n][i], how) : -INFINITY;
                largest[i / 2] = fmaxf(largest[i / 2], s[n][i]);
            }
#pragma unroll
        for (int row = 0; row < 2; row++) {
            largest[row] = fmaxf(largest[row], __shfl_xor_sync(0xffffffff, largest[row], 1));
            largest[row] = fmaxf(largest[row], __shfl_xor_sync(0xffffffff, largest[row], 2));
            float now = fmaxf(top[row], largest[row]);
            old[row] = exp2_fast(top[row] - now);
            top[row] = now;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            mass[i] *= old[i / 2];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) out[tile][i] *= old[i / 2];
        }
#pragma unroll
        for (int chunk = 0; chunk < 2; chunk++) {
            u32 p[2][4];
#pragma unroll
            for (int part = 0; part < 4; part++)
#pragma unroll
                for (int row = 0; row < 2; row++)
                    p[part / 2][part % 2 * 2 + row] = narrow2<RAW>(exp2_fast(s[chunk * 4 + part][2 * row] - top[row]), exp2_fast(s[chunk * 4 + part][2 * row + 1] - top[row]));
            mma<RAW>(mass, p[0], ones, ones);
            mma<RAW>(mass, p[1], ones, ones);
#pragma unroll
            for (int some = 0; some < TILES; some += 4) {
                uint4 b[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 row = (some + i) * 8 + g;
                    b[i] = *(const uint4 *)(v + row * PAGE + ((chunk * 4 + t) ^ (row & 1) * 4) * 8);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) mma<RAW>(out[some + i], p[0], b[i].x, b[i].y);
#pragma unroll
                for (int i = 0; i < 4; i++) mma<RAW>(out[some + i], p[1], b[i].z, b[i].w);
            }
        }
        __syncthreads();
        index = next, stage ^= 1;
    }
    merge_stride();
#pragma unroll
    for (int row = 0; row < 2; row++) {
        if (!outs[row]) continue;
        float factor = divided(a, kv * share + (first + warp * 16 + g + 8 * row) % share, total_max[row], total_mass[row]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            *(float2 *)(outs[row] + tile * 8 + 2 * t) = make_float2(total[tile * 128 + 2 * row] * factor, total[tile * 128 + 2 * row + 1] * factor);
    }
}

#define ATTEND(NAME, RAW, DIM, WARPS)                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(128, 4) attend_decode_##NAME(Attention a, float *parts, u32 strides) { decode<RAW, DIM>(a, parts, strides); } \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) attend_window_##NAME(Attention a) { window<RAW, DIM, WARPS>(a); }

ATTEND(f16_64, F16, 64, 8)
ATTEND(f16_128, F16, 128, 8)
ATTEND(bf16_64, BF16, 64, 8)
ATTEND(bf16_128, BF16, 128, 8)
extern "C" __global__ void attend_merge_64(Attention a, const float *parts, u32 strides) { merge<64>(a, parts, strides); }
extern "C" __global__ void attend_merge_128(Attention a, const float *parts, u32 strides) { merge<128>(a, parts, strides); }
