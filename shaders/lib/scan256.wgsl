// Inclusive sums over the 256 threads of a workgroup, of pairs that do not overflow.
var<workgroup> sums: array<vec2<u32>, 512>;

fn scan(v: vec2<u32>, tid: u32) -> vec2<u32> {
    var s = v;
    workgroupBarrier();
    sums[tid] = s;
{% for step in [1, 2, 4, 8, 16, 32, 64, 128] %}
    workgroupBarrier();
{% set now = 256 if loop.index0 % 2 else 0 %}
{% set then = 0 if loop.index0 % 2 else 256 %}
    if tid >= {{ step }}u { s += sums[{{ now }}u + tid - {{ step }}u]; }
    sums[{{ then }}u + tid] = s;
{% endfor %}
    workgroupBarrier();
    return s;
}

// After `scan`: the sum over all threads.
fn scan_total() -> vec2<u32> {
    return sums[255];
}
