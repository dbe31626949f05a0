// Verbs that read and write activations alone: a block for each row, or one for each run of a norm.

// One run of `width` values: x / sqrt(mean(x²) + eps) * weight, or that added to what is there.
extern "C" __global__ void rms_norm(const float *x, const float *weight, float eps, u32 width, float *out, u32 add) {
    wait_for_earlier_kernels();
    __shared__ float scratch[32];
    const float *from = x + (size_t)blockIdx.x * width;
    float *to = out + (size_t)blockIdx.x * width;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) squares = fmaf(from[i], from[i], squares);
    float factor = rsqrtf(block_reduce<Sum>(squares, scratch) / width + eps);
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float y = from[i] * factor * weight[i];
        to[i] = add ? to[i] + y : y;
    }
}

// Angles in f64, as on every backend: positions are large, and so are their errors.
extern "C" __global__ void rope_angles(const u32 *positions, const float *frequencies, u32 count, float scale, float *out) {
    wait_for_earlier_kernels();
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        double sin, cos;
        sincos((double)((float)positions[blockIdx.x] * frequencies[i]), &sin, &cos);
        out[(size_t)blockIdx.x * 2 * count + i] = (float)(cos * scale);
        out[(size_t)blockIdx.x * 2 * count + count + i] = (float)(sin * scale);
    }
}

extern "C" __global__ void rope(float *x, const float *angles, u32 width, u32 dim, u32 count) {
    wait_for_earlier_kernels();
    float *row = x + (size_t)blockIdx.x * width;
    const float *cos = angles + (size_t)blockIdx.x * 2 * count, *sin = cos + count;
    for (u32 at = threadIdx.x; at < width / dim * count; at += blockDim.x) {
        u32 i = at % count;
        float *a = row + at / count * dim + i, *b = a + count;
        float x0 = *a, x1 = *b;
        *a = x0 * cos[i] - x1 * sin[i];
        *b = x1 * cos[i] + x0 * sin[i];
    }
}

// gate = activation(gate) * up; x = activation(x) without an `up`.
extern "C" __global__ void activate(float *x, const float *up, int activation, u64 count) {
    wait_for_earlier_kernels();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        float y = activated(activation, x[i]);
        x[i] = up ? y * up[i] : y;
    }
}

extern "C" __global__ void softcap(float *x, float cap, u64 count) {
    wait_for_earlier_kernels();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x)
        x[i] = cap * tanhf(x[i] / cap);
}

extern "C" __global__ void scale(float *x, float factor, u64 count) {
    wait_for_earlier_kernels();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) x[i] *= factor;
}

// out[t] = x[t][first..], a block a row.
extern "C" __global__ void slice(const float *x, float *out, u32 first, u32 from, u32 width) {
    wait_for_earlier_kernels();
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[(size_t)blockIdx.x * width + i] = x[(size_t)blockIdx.x * from + first + i];
}

extern "C" __global__ void decay(float *x, const float *rate, const float *bias, u32 width, u64 count) {
    wait_for_earlier_kernels();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        u32 channel = i % width;
        float y = x[i] + bias[channel];
        // log(1 + e^y) without overflow.
        float soft = fmaxf(y, 0.0f) + log1pf(expf(-fabsf(y)));
        x[i] = expf(-rate[channel] * soft);
    }
}

extern "C" __global__ void gather(const u32 *outputs, const float *x, float *out, u32 width) {
    wait_for_earlier_kernels();
    const float *from = x + (size_t)outputs[blockIdx.x] * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[(size_t)blockIdx.x * width + i] = from[i];
}

// Tokens that the step before drew take their places.
extern "C" __global__ void resolve(const u32 *pending, u32 count, const u32 *drawn, u32 *tokens) {
    wait_for_earlier_kernels();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && pending[2 * i] != NONE) tokens[pending[2 * i]] = drawn[pending[2 * i + 1]];
}

// Reads everything once: the limit that other kernels are measured against.
extern "C" __global__ void read_all(const uint4 *data, u64 count, u32 *out) {
    wait_for_earlier_kernels();
    u32 sum = 0;
    u64 stride = (u64)gridDim.x * blockDim.x;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
        uint4 a = load_once(data + i), b = load_once(data + i + stride), c = load_once(data + i + 2 * stride), d = load_once(data + i + 3 * stride);
        sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    if (sum == 0x12345678) *out = sum;
}

// Matrix instructions on registers, nothing else: the limit of products.
extern "C" __global__ void multiply_all(u32 rounds, float *out) {
    wait_for_earlier_kernels();
    float sums[8][4] = {};
    u32 a[4] = {threadIdx.x, threadIdx.x * 3, threadIdx.x * 5, threadIdx.x * 7};
    for (u32 i = 0; i < rounds; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) mma<F16>(sums[j], a, threadIdx.x, threadIdx.x + j);
    float sum = 0.0f;
    for (int j = 0; j < 8; j++) sum += sums[j][0] + sums[j][1] + sums[j][2] + sums[j][3];
    if (sum == 1.0f) *out = sum;
}
