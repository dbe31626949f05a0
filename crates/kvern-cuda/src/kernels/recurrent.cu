// Recurrent layers: the same update for each token in prefill and decode, so that no chunk shows. States are never written in place.

// A plane of a recurrent state: f32 at `offset` of a page.
struct State {
    Plan plan;
    Pages pages;
    u64 offset;
};

__device__ __forceinline__ float *state_of(const State &state, u32 id) { return (float *)(page(state.pages, id) + state.offset); }

// A block has 256 channels of a segment. A thread walks its channel, with the inputs before the segment in registers.
#define TAPS 8
extern "C" __global__ void convolve(State state, const float *kernel, u32 taps, const float *x, float *out, u32 width) {
    wait_for_earlier_kernels();
    u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= width) return;
    Segment segment = state.plan.segments[blockIdx.y];
    Span span = state.plan.spans[blockIdx.y];
    if (segment.count == 0) return;
    float weights[TAPS], window[TAPS];
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
        weights[tap] = tap < taps ? kernel[tap * width + channel] : 0.0f;
        window[tap] = tap + 1 < taps && span.past != NONE ? state_of(state, span.past)[tap * width + channel] : 0.0f;
    }
    const u32 *to = state.plan.ids + span.ids;
    for (u32 i = 0; i < segment.count; i++) {
        size_t at = (size_t)(segment.start + i) * width + channel;
        float sum = 0.0f, now = x[at];
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) {
            if (tap + 1 == taps) window[tap] = now;
            if (tap < taps) sum = fmaf(weights[tap], window[tap], sum);
        }
        out[at] = sum;
#pragma unroll
        for (int tap = 0; tap + 1 < TAPS; tap++) window[tap] = window[tap + 1];
        for (; span.count > 0 && to[0] == i + 1; span.count--, to += 2)
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++)
                if (tap + 1 < taps) state_of(state, to[1])[tap * width + channel] = window[tap];
    }
}

// A block has 32 value dimensions of one head; eight warps share the key dimensions, a thread has every eighth of them in registers.
#define KEYS 32
extern "C" __global__ void __launch_bounds__(256) delta_rule(State state, const float *q, const float *k, const float *v, const float *decay, const float *beta, float *out,
                                      u32 heads, u32 key_heads, u32 key_dim, u32 value_dim) {
    wait_for_earlier_kernels();
    __shared__ float partial[8][32];
    u32 lane = threadIdx.x % 32, part = threadIdx.x / 32, d = blockIdx.x * 32 + lane, head = blockIdx.y;
    Segment segment = state.plan.segments[blockIdx.z];
    Span span = state.plan.spans[blockIdx.z];
    if (segment.count == 0) return;
    size_t base = (size_t)head * key_dim * value_dim;
    u32 key = head / (heads / key_heads) * key_dim;
    bool real = d < value_dim;
    float s[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        u32 j = part + i * 8;
        s[i] = real && j < key_dim && span.past != NONE ? state_of(state, span.past)[base + j * value_dim + d] : 0.0f;
    }
    auto across = [&](float x) {
        partial[part][lane] = x;
        __syncthreads();
        float sum = partial[0][lane];
#pragma unroll
        for (int i = 1; i < 8; i++) sum += partial[i][lane];
        __syncthreads();
        return sum;
    };
    const u32 *to = state.plan.ids + span.ids;
    for (u32 i = 0; i < segment.count; i++) {
        u32 token = segment.start + i;
        const float *qt = q + (size_t)token * key_heads * key_dim + key, *kt = k + (size_t)token * key_heads * key_dim + key;
        float fade = decay[(size_t)token * heads + head], strength = beta[(size_t)token * heads + head], held = 0.0f, read = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS; j++)
            if (part + j * 8 < key_dim) {
                s[j] *= fade;
                held = fmaf(kt[part + j * 8], s[j], held);
            }
        held = across(held);
        float write = real ? (v[((size_t)token * heads + head) * value_dim + d] - held) * strength : 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS; j++)
            if (part + j * 8 < key_dim) {
                s[j] = fmaf(kt[part + j * 8], write, s[j]);
                read = fmaf(qt[part + j * 8], s[j], read);
            }
        read = across(read);
        if (part == 0 && real) out[((size_t)token * heads + head) * value_dim + d] = read;
        for (; span.count > 0 && to[0] == i + 1; span.count--, to += 2)
#pragma unroll
            for (int j = 0; j < KEYS; j++)
                if (real && part + j * 8 < key_dim) state_of(state, to[1])[base + (part + j * 8) * value_dim + d] = s[j];
    }
}
