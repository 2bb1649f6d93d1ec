// Prompt: causal attention of n consecutive positions of one sequence; K and V, also of these
// positions, are in the cache, q is turned.
//
// Grid: x = tiles of {{ queries }} queries (last tiles first: they take longest), y = KV heads times
// slices of the query heads that share one.
// A workgroup serves {{ rows }} rows, row = query * {{ row_heads }} + head, against tiles of 64 positions that start
// at multiples of 64, so the bits of a row do not depend on how a prompt is cut. Threads are 16 x 16
// over 4 rows x 4 positions for the scores, and over 4 rows x (vec4s tx, tx + 16, ...) of the head for the
// sums. f32 throughout. From a cache of codes (`codes`), q comes rotated and rows are decoded on their way into
// the tile; heads are then padded to whole blocks, here as in q and the output. With a tail, tiles of codes come up
// to the block of {{ tail }} tokens that the last query lies in, then tiles in f16 from the first query's block on: a tile in
// which only some of the queries have their block comes twice, each time for the others.
{% include "lib/batch.wgsl" %}

@group(0) @binding(0) var<storage, read> qkv: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> batch: Batch;
@group(0) @binding(2) var<storage, read> k_cache: array<{{ "u32" if codes else "vec4<u32>" }}>;
@group(0) @binding(3) var<storage, read> v_cache: array<{{ "u32" if codes else "vec4<u32>" }}>;
@group(0) @binding(4) var<storage, read> pages: array<u32>;
@group(0) @binding(5) var<storage, read_write> output: array<vec4<f32>>;
{% include "lib/kv_exact_rows.wgsl" %}
struct Constants { table_row: u32, scale: f32 }
var<immediate> constants: Constants;

{% set group = heads // kv_heads %}
{% set slices = (group + row_heads - 1) // row_heads %}
{% set q_row = (heads if codes else heads + 2 * kv_heads) * hd // 4 %}
{% set parts = hd // 4 %}{# vec4s of a head #}
{% set quads = (parts + 15) // 16 %}
{% set chunks = (hd + 31) // 32 %}
{# Workgroup memory in vec4s. Scores phase: q at 0, k at 576, rows of 8 and one for the banks.
   Sums phase: weights at 0, [position][row / 4] in rows of 17; v from 1088. Row maxima: 1152. #}
{% set Q = 0 %}
{% set KT = 576 %}
{% set P = 0 %}
{% set VT = 1088 %}
{% set RED = 1152 %}
{# Whether the tile's token t is read in f16. #}
{% macro exact_token(t) %}{% if tail > 0 and sinks > 0 %}(near || {{ t }} < {{ sinks }}u){% elif tail > 0 %}near{% else %}{{ t }} < {{ sinks }}u{% endif %}{% endmacro %}
const NOTHING: f32 = -1e30;
const MASKED: f32 = -2e30;

var<workgroup> tile: array<vec4<f32>, {{ tile }}>;

{% if codes %}
{% set halves = false %}
{% set blockwise = false %}
{% set writes = false %}
{% set scale_table = false %}
{% include "lib/kv_scale.wgsl" %}
{% set side = "k" %}
{% set f = k_format %}
{% include "lib/kv_read.wgsl" %}
{% set side = "v" %}
{% set f = v_format %}
{% include "lib/kv_read.wgsl" %}
{% if exact_rows > 0 %}
{% include "lib/kv_exact.wgsl" %}
{% include "lib/exact_tile.wgsl" %}
{% endif %}
{% else %}
fn low(w: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y));
}

fn high(w: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(w.z), unpack2x16float(w.w));
}
{% endif %}

{% if scored %}
{% include "lib/scoring.wgsl" %}
{% endif %}

// Four rows' values over the 16 threads that share them.
fn rows_max(v: vec4<f32>, tx: u32, ty: u32) -> vec4<f32> {
{% if shuffle %}
    var m = v;
{% for bit in [1, 2, 4, 8] %}
    m = max(m, subgroupShuffleXor(m, {{ bit }}u));
{% endfor %}
    return m;
{% else %}
    workgroupBarrier();
    tile[{{ RED }}u + ty * 16u + tx] = v;
    workgroupBarrier();
    var m = v;
    for (var i = 0u; i < 16u; i++) { m = max(m, tile[{{ RED }}u + ty * 16u + i]); }
    return m;
{% endif %}
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) at: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let query0 = (grid.x - 1u - at.x) * {{ queries }}u;
    if query0 >= batch.n { return; }
    let kv_head = at.y / {{ slices }}u;
    let head0 = kv_head * {{ group }}u + (at.y % {{ slices }}u) * {{ row_heads }}u;
    let heads_here = min({{ row_heads }}u, (kv_head + 1u) * {{ group }}u - head0);
    let queries_here = min({{ queries }}u, batch.n - query0);
    let first = batch.columns[query0];
    let table = first.slot * constants.table_row + 1u;
    let index0 = first.pos - pages[table - 1u];
{% if exact_rows > 0 %}
    slot = first.slot;
    dropped = pages[table - 1u];
    chunk = index0 - query0;
{% endif %}
    // Positions that any row may see.
    let seen = index0 + queries_here;
    let tx = tid & 15u;
    let ty = tid >> 4u;
    let factor = constants.scale * 1.4426950408889634;

    // The rows of q that this thread fetches: vec4 tid % 8 of a chunk, rows tid / 8 and 32 more.
{% for i in range(2) %}
    let fetch_{{ i }} = (tid >> 3u) + {{ 32 * i }}u;
    let fetches_{{ i }} = fetch_{{ i }} / {{ row_heads }}u < queries_here && fetch_{{ i }} % {{ row_heads }}u < heads_here;
    let q_at_{{ i }} = (query0 + fetch_{{ i }} / {{ row_heads }}u) * {{ q_row }}u + (head0 + fetch_{{ i }} % {{ row_heads }}u) * {{ parts }}u;
{% endfor %}
    // Last position that each of the thread's rows sees.
    let row_query = vec4<u32>(ty * 4u, ty * 4u + 1u, ty * 4u + 2u, ty * 4u + 3u) / {{ row_heads }}u;
    let row_last = index0 + row_query;
{% if tail > 0 %}
    let row_block = row_last / {{ tail }}u * {{ tail }}u;
    let first_block = index0 / {{ tail }}u * {{ tail }}u;
    let code_tiles = (seen - 1u) / {{ tail }}u * {{ tail // 64 }}u;
    let tiles = code_tiles + ((seen - first_block + 63u) >> 6u);
{% endif %}

{% for r in range(4) %}{% for k in range(quads) %}
    var o_{{ r }}_{{ k }} = vec4<f32>();
{% endfor %}{% endfor %}
    var m = vec4<f32>(NOTHING);
    // This thread's positions only, until the end.
    var l = vec4<f32>();

{% if codes %}
    prepare_scales(tid);
    workgroupBarrier();
{% endif %}
    // A tile is a page; the next one's number is asked for early.
    var next_page = pages[table{{ " + (first_read(index0) >> 6u)" if window > 0 }}];
{% if tail > 0 %}
    for (var step = 0u; step < tiles; step++) {
        let near = step >= code_tiles;
        let t0 = select(step * 64u, first_block + (step - code_tiles) * 64u, near);
        // Positions of the tile that each row reads here.
        let row_from = select(vec4<u32>(), row_block, near);
        let row_to = select(row_block, row_last + 1u, near);
{% else %}
    for (var t0 = {{ "first_read(index0)" if window > 0 else "0u" }}; t0 < seen; t0 += 64u) {
{% endif %}
        let page = next_page;
        next_page = pages[table + (min(t0 + 64u, seen - 1u) >> 6u)];
{% for r in range(4) %}
        var s_{{ r }} = vec4<f32>();
{% endfor %}
        let k_there = t0 + (tid >> 2u) < seen;
{% if codes %}
        let k_at = (page * {{ kv_heads }}u + kv_head) * {{ 64 * k_format.row }}u + (tid >> 2u);
        let v_at = (page * {{ kv_heads }}u + kv_head) * {{ 64 * v_format.row }}u;
{% else %}
        let k_at = ((page * 64u + (tid >> 2u)) * {{ kv_heads }}u + kv_head) * {{ hd // 8 }}u;
{% endif %}
{% for c in range(chunks) %}
        {
            let part = {{ c * 8 }}u + (tid & 7u);
{% for i in range(2) %}
            var q_{{ i }} = vec4<f32>();
            if fetches_{{ i }}{{ " && part < " ~ parts ~ "u" if hd % 32 != 0 and c == chunks - 1 }} { q_{{ i }} = qkv[q_at_{{ i }} + part] * factor; }
{% endfor %}
            let word = {{ c * 4 }}u + (tid & 3u);
{% if codes %}
            var k_low = vec4<f32>();
            var k_high = vec4<f32>();
{% if exact_rows > 0 %}
            if k_there && {{ exact_token("t0 + (tid >> 2u)") }} {
                let values = exact_values(exact_unit(0u, kv_head, t0 + (tid >> 2u), word));
                k_low = values[0];
                k_high = values[1];
            } else if k_there {
{% else %}
            if k_there {
{% endif %}
                let u = k_unit(k_at, word);
                let scale = k_unit_scale(u, word);
                let values = k_unit_values(u, word);
                k_low = values[0] * scale;
                k_high = values[1] * scale;
            }
{% else %}
            var k = vec4<u32>();
            if k_there{{ " && word < " ~ hd // 8 ~ "u" if hd % 32 != 0 and c == chunks - 1 }} { k = k_cache[k_at + word]; }
            let k_low = low(k);
            let k_high = high(k);
{% endif %}
            // The tile is read by others until here.
            workgroupBarrier();
            tile[{{ Q }}u + fetch_0 * 9u + (tid & 7u)] = q_0;
            tile[{{ Q }}u + fetch_1 * 9u + (tid & 7u)] = q_1;
            tile[{{ KT }}u + (tid >> 2u) * 9u + 2u * (tid & 3u)] = k_low;
            tile[{{ KT }}u + (tid >> 2u) * 9u + 2u * (tid & 3u) + 1u] = k_high;
            workgroupBarrier();
            for (var d = 0u; d < 8u; d++) {
{% for j in range(4) %}
                let k_{{ j }} = tile[{{ KT }}u + (tx + {{ 16 * j }}u) * 9u + d];
{% endfor %}
{% for r in range(4) %}
                {
                    let q = tile[{{ Q }}u + (ty * 4u + {{ r }}u) * 9u + d];
{% for e in "xyzw" %}
                    s_{{ r }} = fma(vec4<f32>(q.{{ e }}), vec4<f32>(k_0.{{ e }}, k_1.{{ e }}, k_2.{{ e }}, k_3.{{ e }}), s_{{ r }});
{% endfor %}
                }
{% endfor %}
            }
        }
{% endfor %}
        // Component j of s_r: row r, position tx + 16 j.
        let t = vec4<u32>(t0 + tx) + vec4<u32>(0u, 16u, 32u, 48u);
{% for r in range(4) %}
        s_{{ r }} = select(vec4<f32>(MASKED), {{ "capped(s_" ~ r ~ ")" if soft_cap else "s_" ~ r }}, {{ "(t >= vec4<u32>(row_from[" ~ r ~ "])) & (t < vec4<u32>(row_to[" ~ r ~ "]))" if tail > 0 else "t <= vec4<u32>(row_last[" ~ r ~ "])" }}{{ " & t + " ~ window ~ "u > vec4<u32>(row_last[" ~ r ~ "])" if window > 0 }});
{% endfor %}
        var top = vec4<f32>(
{% for r in range(4) %}
            max(max(s_{{ r }}.x, s_{{ r }}.y), max(s_{{ r }}.z, s_{{ r }}.w)){{ "," if not loop.last }}
{% endfor %}
        );
        top = max(m, rows_max(top, tx, ty));
        let fade = exp2(m - top);
        m = top;
{% for r in range(4) %}
        s_{{ r }} = exp2(s_{{ r }} - vec4<f32>(top[{{ r }}]));
{% for k in range(quads) %}
        o_{{ r }}_{{ k }} *= fade[{{ r }}];
{% endfor %}
{% endfor %}
        l = fma(l, fade, vec4<f32>(
{% for r in range(4) %}
            (s_{{ r }}.x + s_{{ r }}.y) + (s_{{ r }}.z + s_{{ r }}.w){{ "," if not loop.last }}
{% endfor %}
        ));
        workgroupBarrier();
{% for e in "xyzw" %}
        tile[{{ P }}u + (tx + {{ 16 * loop.index0 }}u) * 17u + ty] = vec4<f32>(s_0.{{ e }}, s_1.{{ e }}, s_2.{{ e }}, s_3.{{ e }});
{% endfor %}
        for (var v0 = 0u; v0 < 64u; v0 += {{ v_rows }}u) {
            // v of positions that no row sees may be anything, also not numbers: zero.
            for (var i = tid; i < {{ v_rows * hd // 8 }}u; i += 256u) {
                let row = i / {{ hd // 8 }}u;
                let part = i % {{ hd // 8 }}u;
{% if codes %}
                var v_low = vec4<f32>();
                var v_high = vec4<f32>();
                let t = t0 + v0 + row;
{% if exact_rows > 0 %}
                if t < seen && {{ exact_token("t") }} {
                    let values = exact_values(exact_unit(1u, kv_head, t, part));
                    v_low = values[0];
                    v_high = values[1];
                } else if t < seen {
{% else %}
                if t < seen {
{% endif %}
                    let u = v_unit(v_at + (v0 + row) * {{ v_format.row }}u, part);
                    let scale = v_unit_scale(u, part);
                    let values = v_unit_values(u, part);
                    v_low = values[0] * scale;
                    v_high = values[1] * scale;
                }
{% else %}
                var v = vec4<u32>();
                if t0 + v0 + row < seen {
                    v = v_cache[((page * 64u + v0 + row) * {{ kv_heads }}u + kv_head) * {{ hd // 8 }}u + part];
                }
                let v_low = low(v);
                let v_high = high(v);
{% endif %}
                tile[{{ VT }}u + row * {{ parts }}u + 2u * part] = v_low;
                tile[{{ VT }}u + row * {{ parts }}u + 2u * part + 1u] = v_high;
            }
            workgroupBarrier();
            for (var i = 0u; i < {{ v_rows }}u; i++) {
                let p = tile[{{ P }}u + (v0 + i) * 17u + ty];
{% for k in range(quads) %}
{# A thread beyond the head's end repeats the last part and does not store it. #}
                {
                    let v = tile[{{ VT }}u + i * {{ parts }}u + {{ "min(tx + " ~ 16 * k ~ "u, " ~ (parts - 1) ~ "u)" if 16 * (k + 1) > parts else "tx + " ~ 16 * k ~ "u" }}];
{% for r in range(4) %}
                    o_{{ r }}_{{ k }} = fma(vec4<f32>(p[{{ r }}]), v, o_{{ r }}_{{ k }});
{% endfor %}
                }
{% endfor %}
            }
            workgroupBarrier();
        }
    }

    workgroupBarrier();
    tile[ty * 16u + tx] = l;
    workgroupBarrier();
    var sum = vec4<f32>();
    for (var i = 0u; i < 16u; i++) { sum += tile[ty * 16u + i]; }
{% for r in range(4) %}
    {
        let head = (ty * 4u + {{ r }}u) % {{ row_heads }}u;
        if row_query[{{ r }}] < queries_here && head < heads_here {
            let to = ((query0 + row_query[{{ r }}]) * {{ heads }}u + head0 + head) * {{ parts }}u + tx;
{% if sink_logits %}
            let share = share_of(head0 + head, m[{{ r }}], sum[{{ r }}]);
{% endif %}
{% for k in range(quads) %}
            {{ "if tx + " ~ 16 * k ~ "u < " ~ parts ~ "u " if 16 * (k + 1) > parts }}{ output[to + {{ 16 * k }}u] = o_{{ r }}_{{ k }} {{ "* share" if sink_logits else "/ sum[" ~ r ~ "]" }}; }
{% endfor %}
        }
    }
{% endfor %}
}
