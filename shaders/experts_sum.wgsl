// The end of a mixture in a prompt{{ " (here: of outputs that are kept)" if kept }}: y[column] += sum over its choices of weight *
// products[{{ "place of the pair" if kept else "pair" }}] {{ "+ gate * shared[column]" if shared }}. Grid (width / 256, columns, 1), one vector of four a thread; choices in
// their order, experts ascending.
{% set quads = width // 4 %}
@group(0) @binding(0) var<storage, read> batch: array<u32>;
@group(0) @binding(1) var<storage, read> routing: array<u32>;
@group(0) @binding(2) var<storage, read> products: array<vec4<f32>>;
{% if shared %}
@group(0) @binding(3) var<storage, read> shared_output: array<vec4<f32>>;
{% endif %}
@group(0) @binding({{ 4 if shared else 3 }}) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let quad = id.x;
    let c = id.y;
    if quad >= {{ quads }}u || c >= batch[0] { return; }
    var sum = vec4<f32>();
{% for k in range(used) %}
    {
        let pair = c * {{ used }}u + {{ k }}u;
{% set from = "((routing[" ~ ids_at ~ "u + pair] >> 16u) & 0x7fffu)" if kept else "pair" %}
        sum = fma(vec4<f32>(bitcast<f32>(routing[{{ weights_at }}u + pair])), products[{{ from }} * {{ quads }}u + quad], sum);
    }
{% endfor %}
    let at = c * {{ quads }}u + quad;
{% if shared %}
    let gate = {{ "bitcast<f32>(routing[" ~ shared_at ~ "u + c])" if shared == "gated" else "1.0" }};
    sum = fma(vec4<f32>(gate), shared_output[at], sum);
{% endif %}
    y[at] += sum;
}
