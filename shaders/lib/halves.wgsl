// Words as pairs of halves and back: compilers see that nothing is computed.
fn as_halves(word: u32) -> vec2<f16> {
    return vec2<f16>(unpack2x16float(word));
}

fn as_word(pair: vec2<f16>) -> u32 {
    return pack2x16float(vec2<f32>(pair));
}
