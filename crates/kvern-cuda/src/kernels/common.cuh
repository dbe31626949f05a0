// What all kernels share: element types, matrix instructions, reductions, and a step's plan as the device sees it.
//
// There are no includes: the driver and NVRTC are all that a machine needs.
//
// Every reduction has one order. It may follow from the size of a matrix or a page, never from the number of rows, their lengths or the grid.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INFINITY __int_as_float(0x7f800000)
#define LOG2E 1.4426950408889634f

// Element types of weights and state, as the host numbers them.
enum Raw { F32 = 0, F16 = 1, BF16 = 2 };

__device__ __forceinline__ float widen_f16(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ float widen_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ u16 narrow_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u16 narrow_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// Two values as one register of 16-bit elements, the first in the low half.
template <int RAW> __device__ __forceinline__ u32 narrow2(float low, float high) {
    u32 y;
    if (RAW == BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// One element of any type, at an index.
__device__ __forceinline__ float load(const void *data, int raw, size_t at) {
    if (raw == F32) return ((const float *)data)[at];
    u16 x = ((const u16 *)data)[at];
    return raw == F16 ? widen_f16(x) : widen_bf16(x);
}
__device__ __forceinline__ void store(void *data, int raw, size_t at, float x) {
    if (raw == F32) ((float *)data)[at] = x;
    else ((u16 *)data)[at] = raw == F16 ? narrow_f16(x) : narrow_bf16(x);
}

// c[16, 8] += a[16, 16] · b[16, 8]; with lane = 4 g + t:
//   a: rows g and g + 8, columns 2t.. and 2t + 8..;  b: column g, rows 2t.. and 2t + 8..;  c: rows g and g + 8, columns 2t..
// Each element of c depends on its own row of a and column of b alone, so rows of activations never meet.
template <int RAW> __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (RAW == BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A kernel may be started while the one before it still runs. What comes before this call may only read what no kernel of a step writes, such as weights, the
// plan and pages that the step adds nothing to; after it, all earlier kernels are done and what they wrote can be seen.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n griddepcontrol.wait;" ::: "memory");
#endif
}

// Asynchronous copies of 16 bytes from device to shared memory.
__device__ __forceinline__ void copy_async(void *to, const void *from) {
    u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }
template <int LEFT> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT)); }

// The first cache may keep what such a load brought in (`.nc`) for as long as the kernel lives, which began before earlier kernels ended: this is for weights,
// which nobody writes. They are read once in a step, and should not push activations out.
__device__ __forceinline__ uint4 load_once(const void *from) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}

// The same for pages, to which earlier kernels of a step may add.
__device__ __forceinline__ uint4 load_page(const void *from) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
    return x;
}

// Loads that stay where they are written, ahead of what needs them; the compiler would move them next to it. Of activations and sums of them, and of a weight's scales.
__device__ __forceinline__ uint4 load_ahead(const void *from) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ u32 load_ahead(const u32 *from) {
    u32 x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ uint2 load_ahead(const uint2 *from) {
    uint2 x;
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
    return x;
}

// 2^x, to two units in the last place.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Sum {
    static const bool SUM = true;
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Max {
    static const bool SUM = false;
    static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

template <class F> __device__ __forceinline__ float warp_reduce(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = F::of(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
}

// Over a value of each of a block's warps.
template <class F> __device__ __forceinline__ float reduce_warps(const float *values) {
    u32 warps = blockDim.x / 32, lane = threadIdx.x % 32;
    // Values beyond the last warp's are copies of the first, which a maximum does not mind; a sum takes none of them.
    float x = values[lane < warps ? lane : 0];
    if (F::SUM && lane >= warps) x = 0.0f;
    return warp_reduce<F>(x);
}

// Over all threads of a block of 32 to 1024; every thread gets the result. `scratch` has 32 floats, and is free again after the next barrier.
template <class F> __device__ __forceinline__ float block_reduce(float x, float *scratch) {
    x = warp_reduce<F>(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    return reduce_warps<F>(scratch);
}
// The same of two values, with one barrier and 64 floats.
template <class F, class G> __device__ __forceinline__ void block_reduce(float &x, float &y, float *scratch) {
    x = warp_reduce<F>(x), y = warp_reduce<G>(y);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x, scratch[32 + threadIdx.x / 32] = y;
    __syncthreads();
    x = reduce_warps<F>(scratch), y = reduce_warps<G>(scratch + 32);
}

// Functions of single values, as the host numbers them.
__device__ __forceinline__ float activated(int activation, float x) {
    if (activation == 0) return x / (1.0f + expf(-x));
    if (activation == 1) return 1.0f / (1.0f + expf(-x));
    float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
}

// A row's share of a step: its tokens are start .. start + count.
struct Segment {
    u32 start, count;
};

// One group of a segment. Columns: `ids` is where its page table begins, of which entries below `kept` are the row's first pages and the
// others its pages from `kept + skipped` on. A recurrent state: `past` is the page it is read from, `ids` where (tokens, page) to store it begin.
struct Span {
    u32 past, count, ids, kept, skipped, first, cls, pad;
};
#define NONE 0xffffffffu

// The plan of a step at fixed addresses, for one group.
struct Plan {
    const u32 *positions;
    const u32 *owners; // Segment of each token; NONE for rows that only round a step up.
    const Segment *segments;
    const Span *spans; // Of the group: one for each segment.
    const u32 *ids;
    const u32 *singles; // Tokens of segments of few tokens; NONE for entries that only round a step up.
    u32 window, sinks; // 0 for no window.
};

// What a query sees: 0 .. sinks and start .. end.
struct Visible {
    u32 sinks, start, end;
};

__device__ __forceinline__ Visible visible(const Plan &plan, const Segment &segment, const Span &span, u32 token) {
    u32 without = segment.count - span.count, index = token - segment.start + 1;
    u32 end = span.past + (index > without ? index - without : 0);
    u32 from = span.count == 0 ? plan.positions[token] + 1 : end;
    u32 start = plan.window && from > plan.window ? from - plan.window : 0;
    start = min(max(start, span.first), end);
    return {plan.window ? min(plan.sinks, start) : 0, start, end};
}

// Pages of a class: slabs of equal numbers of pages.
struct Pages {
    const u64 *slabs;
    u64 bytes;    // Of a page.
    u32 shift;    // log2 of the pages of a slab.
    u32 columns;  // Of a page.
};

__device__ __forceinline__ u8 *page(const Pages &pages, u32 id) {
    return (u8 *)pages.slabs[id >> pages.shift] + (u64)(id & ((1u << pages.shift) - 1)) * pages.bytes;
}
__device__ __forceinline__ u32 table(const Plan &plan, const Span &span, u32 index) {
    return plan.ids[span.ids + (index < span.kept ? index : index - span.skipped)];
}

// Where a plane of a layer lies in a page: element (head, column, i) is at base + (head * head_stride + column * column_stride + i * stride).
struct Plane {
    u64 offset; // Bytes, the layer's included.
    u32 raw, heads, dim, head_stride, column_stride, stride;
};
__device__ __forceinline__ size_t element(const Plane &plane, u32 head, u32 column, u32 i) {
    return (size_t)head * plane.head_stride + (size_t)column * plane.column_stride + (size_t)i * plane.stride;
}
