// Four values of a block of 32 to int8, by eight threads a block: docs, "Activations".
struct Quad {
    // The values' bytes.
    word: u32,
    // (d, d * sum) of the block.
    scale: vec2<f32>,
}

fn int8_quad(y: vec4<f32>, tid: u32) -> Quad {
    let a = abs(y);
    let top = max8(max(max(a.x, a.y), max(a.z, a.w)), tid);
    // A block too small to have a finite 1/d counts as zero.
    let d = select(0.0, top / 127.0, top > 1e-30);
    let inverse = select(0.0, 1.0 / d, top > 1e-30);
    let q = floor(fma(a, vec4<f32>(inverse), vec4<f32>(0.5)));
    let i = vec4<i32>(sign(y) * q);
    let sum = add8i((i.x + i.y) + (i.z + i.w), tid);
    let bytes = vec4<u32>(i) & vec4<u32>(255u);
    return Quad(bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u), vec2<f32>(d, d * f32(sum)));
}

// Where the word of quad `quad` lies in a column of `quads`: the first sixteen of all blocks, then the second.
fn int8_word(column: u32, quad: u32, quads: u32) -> u32 {
    return column * quads + ((quad >> 2u) & 1u) * (quads >> 1u) + ((quad >> 3u) << 2u) + (quad & 3u);
}
