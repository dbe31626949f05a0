// State in pages: storing columns, copying pages, and columns in canonical order.
//
// Keys lie [head][column][dim], values [head][dim][column]: both are then read by the matrix instruction in whole 16-byte pieces.

// A block has one token of one plane; rows of tokens that add no column are left out.
extern "C" __global__ void append(Plan plan, const Pages *classes, const Plane *planes, u32 plane_count, u32 plane, const float *x, u32 width) {
    wait_for_earlier_kernels();
    u32 token = blockIdx.x, owner = plan.owners[token];
    if (owner == NONE) return;
    Segment segment = plan.segments[owner];
    Span span = plan.spans[owner];
    u32 before = segment.start + segment.count - span.count;
    if (token < before) return;
    Pages pages = classes[span.cls];
    // The layer's planes as the class stores them.
    Plane to = planes[span.cls * plane_count + plane];
    u32 column = span.past + token - before;
    u8 *base = page(pages, table(plan, span, column / pages.columns)) + to.offset;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x)
        store(base, to.raw, element(to, i / to.dim, column % pages.columns, i % to.dim), x[(size_t)token * width + i]);
}

// Rotates queries and keys, and stores keys and values. A block has some heads of one token: of queries, keys or values, in this order.
extern "C" __global__ void rope_append(Plan plan, const Pages *classes, const Plane *planes, float *q, const float *k, const float *v, const float *angles,
                                       u32 heads, u32 kv_heads, u32 dim, u32 count) {
    u32 token = blockIdx.y, lanes = dim, head = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes, lane = threadIdx.x % lanes;
    const float *cos = angles + (size_t)token * 2 * count, *sin = cos + count;
    if (head < heads) {
        wait_for_earlier_kernels();
        float *row = q + ((size_t)token * heads + head) * dim;
        for (u32 i = lane; i < count; i += lanes) {
            float x0 = row[i], x1 = row[i + count];
            row[i] = x0 * cos[i] - x1 * sin[i];
            row[i + count] = x1 * cos[i] + x0 * sin[i];
        }
        return;
    }
    u32 owner = plan.owners[token];
    if (head >= heads + 2 * kv_heads || owner == NONE) return;
    Segment segment = plan.segments[owner];
    Span span = plan.spans[owner];
    u32 before = segment.start + segment.count - span.count;
    if (token < before) return;
    Pages pages = classes[span.cls];
    u32 column = span.past + token - before, within = column % pages.columns;
    u8 *to = page(pages, table(plan, span, column / pages.columns));
    bool key = head < heads + kv_heads;
    u32 kv = head - heads - (key ? 0 : kv_heads);
    Plane plane = planes[span.cls * 2 + (key ? 0 : 1)];
    wait_for_earlier_kernels();
    const float *row = (key ? k : v) + ((size_t)token * kv_heads + kv) * plane.dim;
    for (u32 i = lane; i < plane.dim; i += lanes) {
        float x = row[i];
        if (key && i < count) x = x * cos[i] - row[i + count] * sin[i];
        else if (key && i < 2 * count) x = x * cos[i - count] + row[i - count] * sin[i - count];
        store(to + plane.offset, plane.raw, element(plane, kv, within, i), x);
    }
}

// Columns of a plane between pages and canonical order: [column][head][dim], encoded. `ids` holds the pages of the columns, one for each page that they touch.
extern "C" __global__ void exchange(Pages pages, Plane plane, const u32 *ids, u32 first, u32 count, u8 *bytes, u32 import) {
    wait_for_earlier_kernels();
    u32 width = plane.heads * plane.dim;
    u64 total = (u64)count * width;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (u64)gridDim.x * blockDim.x) {
        u32 column = first + at / width, i = at % width;
        u8 *base = page(pages, ids[column / pages.columns - first / pages.columns]) + plane.offset;
        size_t there = element(plane, i / plane.dim, column % pages.columns, i % plane.dim);
        if (plane.raw == F32) {
            u32 *a = (u32 *)bytes + at, *b = (u32 *)base + there;
            if (import) *b = *a;
            else *a = *b;
        } else {
            u16 *a = (u16 *)bytes + at, *b = (u16 *)base + there;
            if (import) *b = *a;
            else *a = *b;
        }
    }
}

// Decodes the first `columns` columns of a page and encodes them into a page of another class, for one plane of all layers.
extern "C" __global__ void encode(Pages from, Plane decoded, u32 from_id, Pages to, Plane encoded, u32 to_id, u32 columns, u64 from_layer, u64 to_layer) {
    wait_for_earlier_kernels();
    u32 width = decoded.heads * decoded.dim;
    const u8 *source = page(from, from_id) + decoded.offset + blockIdx.y * from_layer;
    u8 *target = page(to, to_id) + encoded.offset + blockIdx.y * to_layer;
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < columns * width; at += gridDim.x * blockDim.x) {
        u32 column = at / width, head = at % width / decoded.dim, i = at % decoded.dim;
        store(target, encoded.raw, element(encoded, head, column, i), load(source, decoded.raw, element(decoded, head, column, i)));
    }
}

// Whole pages of 16-byte pieces: {from, to} addresses for each; zeros where `from` is none.
extern "C" __global__ void copy_pages(const u64 *pairs, u64 pieces) {
    wait_for_earlier_kernels();
    const uint4 *from = (const uint4 *)pairs[blockIdx.y * 2];
    uint4 *to = (uint4 *)pairs[blockIdx.y * 2 + 1];
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < pieces; i += (u64)gridDim.x * blockDim.x)
        to[i] = from ? from[i] : make_uint4(0, 0, 0, 0);
}
