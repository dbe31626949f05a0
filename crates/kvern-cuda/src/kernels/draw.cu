// Drawing tokens. Masses are integers, in units of 2^-32 of the most probable id's, so that their sums have no order.
//
// Ids are ranked by logit, the lower one first among equals. Each filter keeps a prefix of that ranking, and so do all together: a prefix is told by the
// key of its last id and how many ids of that key belong to it.

struct Draw {
    float temperature, top_p, min_p;
    u32 top_k;
    double uniform;
};

// Order of floats as order of integers.
__device__ __forceinline__ u32 key_of(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

struct Prefix {
    u32 key, ties;
};
__device__ __forceinline__ Prefix shorter(Prefix a, Prefix b) { return a.key > b.key || (a.key == b.key && a.ties < b.ties) ? a : b; }

__device__ __forceinline__ u64 mass(float logit, float max, float heat) { return (u64)(exp2f((logit - max) * heat * LOG2E) * 4294967296.0f); }

// The shortest prefix whose ids have `wanted` in total: their number, or their mass.
template <bool COUNT> __device__ Prefix prefix(const float *logits, u32 vocab, float max, u64 wanted, u64 *histogram) {
    u32 found = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (u32 i = threadIdx.x; i < 256; i += blockDim.x) histogram[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < vocab; i += blockDim.x) {
            u32 key = key_of(logits[i]);
            if (shift == 24 || key >> (shift + 8) == found >> (shift + 8)) {
                u64 part = COUNT ? 1 : mass(logits[i], max, 1.0f);
                if (part) atomicAdd(histogram + (key >> shift & 255), part);
            }
        }
        __syncthreads();
        int digit = 255;
        while (digit > 0 && histogram[digit] < wanted) wanted -= histogram[digit--];
        found |= (u32)digit << shift;
        __syncthreads();
    }
    u64 each = 1;
    if (!COUNT) {
        u32 bits = found & 0x80000000 ? found ^ 0x80000000 : ~found;
        each = mass(__uint_as_float(bits), max, 1.0f);
    }
    return {found, (u32)((wanted + (each ? each : 1) - 1) / (each ? each : 1))};
}

// Sum of the values of all threads before this one; every thread also learns the total.
__device__ u64 before(u64 x, u64 *scratch, u64 &total) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 sum = x;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        u64 other = __shfl_up_sync(0xffffffff, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    u64 offset = 0;
    total = 0;
    for (u32 i = 0; i < blockDim.x / 32; i++) {
        if (i < warp) offset += scratch[i];
        total += scratch[i];
    }
    __syncthreads();
    return offset + sum - x;
}

// One block of 1024 threads for each output.
extern "C" __global__ void __launch_bounds__(1024) draw(const float *all, u32 vocab, const Draw *draws, u32 *tokens) {
    wait_for_earlier_kernels();
    __shared__ u64 histogram[256];
    __shared__ float scratch[32];
    __shared__ u32 chosen;
    const float *logits = all + (size_t)blockIdx.x * vocab;
    Draw how = draws[blockIdx.x];
    // The caller draws this one.
    if (how.temperature < 0.0f) return;
    // The largest of a thread's logits, and the first id that has it: 32 logits at a time, so that their loads overlap.
    float max = -INFINITY;
    u32 best = 0xffffffff;
    for (u32 first = threadIdx.x; first < vocab; first += 32 * blockDim.x) {
        float values[32];
#pragma unroll
        for (int j = 0; j < 32; j++) values[j] = first + j * blockDim.x < vocab ? logits[first + j * blockDim.x] : -INFINITY;
#pragma unroll
        for (int j = 0; j < 32; j++)
            if (values[j] > max) max = values[j], best = first + j * blockDim.x;
    }
    float own = max;
    max = block_reduce<Max>(max, scratch);
    if (threadIdx.x == 0) chosen = 0xffffffff;
    __syncthreads();
    if (how.temperature == 0.0f || !(max > -INFINITY && max < INFINITY)) {
        if (own == max) atomicMin(&chosen, best);
        __syncthreads();
        if (threadIdx.x == 0) tokens[blockIdx.x] = chosen < vocab ? chosen : 0;
        return;
    }
    Prefix keep = {0, 0xffffffff};
    if (how.min_p > 0.0f) {
        // The least key that stays.
        keep = {key_of(max + logf(how.min_p)), 0xffffffff};
    }
    if (how.top_k > 0 && how.top_k < vocab) keep = shorter(keep, prefix<true>(logits, vocab, max, how.top_k, histogram));
    u32 chunk = (vocab + blockDim.x - 1) / blockDim.x, begin = min(threadIdx.x * chunk, vocab), end = min(begin + chunk, vocab);
    u64 total;
    if (how.top_p < 1.0f) {
        u64 masses = 0;
        for (u32 i = threadIdx.x; i < vocab; i += blockDim.x) masses += mass(logits[i], max, 1.0f);
        before(masses, histogram, total);
        u64 wanted = (u64)((double)how.top_p * (double)total);
        keep = shorter(keep, prefix<false>(logits, vocab, max, wanted ? wanted : 1, histogram));
    }
    u64 ties = 0;
    for (u32 i = begin; i < end; i++) ties += key_of(logits[i]) == keep.key;
    u64 rank = before(ties, histogram, total), part = 0, seen = rank;
    float heat = 1.0f / how.temperature;
    for (u32 i = begin; i < end; i++) {
        u32 key = key_of(logits[i]);
        if (key > keep.key || (key == keep.key && seen++ < keep.ties)) part += mass(logits[i], max, heat);
    }
    u64 sum = before(part, histogram, total);
    u64 target = (u64)(how.uniform * (double)total);
    target = target < total ? target : total - 1;
    if (target >= sum && target < sum + part) {
        seen = rank;
        for (u32 i = begin; i < end; i++) {
            u32 key = key_of(logits[i]);
            if (!(key > keep.key || (key == keep.key && seen++ < keep.ties))) continue;
            u64 each = mass(logits[i], max, heat);
            if (target < sum + each) {
                tokens[blockIdx.x] = i;
                break;
            }
            sum += each;
        }
    }
}
