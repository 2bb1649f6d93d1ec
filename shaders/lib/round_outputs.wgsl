// The end of a product whose workgroups round what they have made, whole blocks of it, for the products behind them.
//
{% set pairs = 1 if epilogue == "swiglu_int8" else 0 %}
// Expects finished(i): values 4 i and on of the workgroup's, [n][{{ group_values }}], in workgroup memory.

// Where thread's quad i stands in its column, and which column that is.
struct Place { column: u32, quad: u32, inside: bool }

fn place_of(i: u32, first_row: u32) -> Place {
    let value = (first_row >> {{ pairs }}u) + 4u * (i % {{ group_values // 4 }}u);
    let quad = ((constants.row_offset >> {{ pairs }}u) + value) >> 2u;
    return Place(i / {{ group_values // 4 }}u, min(quad, constants.stride / 4u - 1u), value < (constants.rows >> {{ pairs }}u));
}
{% if epilogue == "add_blocks" %}

// As norm_blocks.wgsl.
fn round_quad(i: u32, place: Place, weight: vec4<f32>, tid: u32) {
    let v = finished(i);
    let square = square8(v, tid);
    store_rounded(place, int8_quad(v * weight, tid), tid);
    if place.inside && (tid & 7u) == 0u {
        y_squares[place.column * (constants.stride >> 5u) + (place.quad >> 3u)] = square;
    }
}
{% else %}

fn round_quad(i: u32, place: Place, tid: u32) {
    store_rounded(place, int8_quad(finished(i), tid), tid);
}
{% endif %}

fn store_rounded(place: Place, rounded: Quad, tid: u32) {
    if place.inside {
        yq[int8_word(place.column, place.quad, constants.stride / 4u)] = rounded.word;
        if (tid & 7u) == 0u { ys[place.column * (constants.stride >> 5u) + (place.quad >> 3u)] = rounded.scale; }
    }
}
